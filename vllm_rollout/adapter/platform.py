"""Which of vLLM's platforms a server runs on, where that is ours to say. Imported before vLLM, which chooses then."""

from __future__ import annotations

import os
from collections.abc import Iterable

from vllm_rollout.on_cpu import COMPILE_NOTHING, WAIT_POLICY, compiler
from vllm_rollout.process import runs_on_cpu


def choose_platform(arguments: Iterable[str]) -> None:
    """An emulated device needs none: with --rollout-emulate it is the CPU platform, whatever is built in or plugged in.

    On a CPU the threads of a model wait asleep, so that other programs may run beside it.
    """
    if runs_on_cpu():
        os.environ.setdefault(*WAIT_POLICY)
        if compiler() is None:
            os.environ.setdefault(*COMPILE_NOTHING)
    if any(argument.partition("=")[0].replace("_", "-") == "--rollout-emulate" for argument in arguments):
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
