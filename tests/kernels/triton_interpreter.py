"""Runs a Triton kernel on CPU tensors: triton_interpreter.py CASES RESULTS, both written by torch.save.

A process of its own, because TRITON_INTERPRET must be set before triton is first imported and then holds for good.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from vllm_rollout.kernels.token_stats import token_stats_triton

cases_path, results_path = sys.argv[1:]
results = {name: token_stats_triton(*case) for name, case in torch.load(cases_path).items()}
torch.save(results, results_path)
