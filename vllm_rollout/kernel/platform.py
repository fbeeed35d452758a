"""Choice of vLLM's platform. Imported before vLLM, which chooses its platform on import."""

from __future__ import annotations

import os
from collections.abc import Iterable

from vllm_rollout.on_cpu import COMPILE_NOTHING, WAIT_POLICY, compiler
from vllm_rollout.process import runs_on_cpu


def choose_platform(arguments: Iterable[str]) -> None:
    """With --rollout-emulate, choose vLLM's CPU platform: an emulated device needs no GPU.

    On a CPU, waiting threads of a model sleep, so that other programs can run.
    """
    if runs_on_cpu():
        os.environ.setdefault(*WAIT_POLICY)
        if compiler() is None:
            os.environ.setdefault(*COMPILE_NOTHING)
    if any(argument.partition("=")[0].replace("_", "-") == "--rollout-emulate" for argument in arguments):
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
