"""Choice of vLLM's platform. Imported before vLLM, which chooses its platform on import."""

from __future__ import annotations

import os
from collections.abc import Iterable

from vllm_rollout.on_cpu import WAIT_POLICY
from vllm_rollout.process import runs_on_cpu


def choose_platform(arguments: Iterable[str]) -> None:
    """With --emulate, choose vLLM's CPU platform, whatever is built in or plugged in: an emulated device needs no GPU.

    On a CPU, waiting threads of a model sleep, so that other programs can run.
    """
    if runs_on_cpu():
        os.environ.setdefault(*WAIT_POLICY)
    if any(argument.partition("=")[0] == "--emulate" for argument in arguments):
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
