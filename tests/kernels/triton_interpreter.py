"""Runs Triton kernels on CPU tensors: triton_interpreter.py CASES RESULTS, both written by torch.save.

A process of its own, because TRITON_INTERPRET must be set before triton is first imported and then holds for good.
"""

import importlib
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from vllm_rollout.parts.observing.tracker.dispatch import operators

cases_path, results_path = sys.argv[1:]
results = {}
for name, (operator, arguments) in torch.load(cases_path).items():
    module = importlib.import_module(f"vllm_rollout.kernels.{operators()[operator].triton}")
    kernel = getattr(module, f"{operator}_triton")
    results[name] = (kernel(*arguments), arguments)
torch.save(results, results_path)
