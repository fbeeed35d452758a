"""Choice of vLLM's platform. Imported before vLLM, which chooses its platform on import."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vllm_rollout.kernel.parts import faces
from vllm_rollout.on_cpu import COMPILE_NOTHING, WAIT_POLICY, compiler
from vllm_rollout.process import runs_on_cpu


def choose_platform(arguments: Sequence[str]) -> None:
    """If a part says that the arguments need no device, choose vLLM's CPU platform.

    On a CPU, waiting threads of a model sleep, so that other programs can run.
    """
    if runs_on_cpu():
        os.environ.setdefault(*WAIT_POLICY)
        if compiler() is None:
            os.environ.setdefault(*COMPILE_NOTHING)
    if any(needs_no_device(arguments) for _, needs_no_device in faces("platform")):
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
