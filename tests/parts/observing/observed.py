"""Observed model runners without a model."""

from typing import Any

from vllm_rollout.kernel.worker.runner import extend_runner
from vllm_rollout.parts.observing.worker.runner import observe_runner


def observe(runner: Any, is_read: bool = True, *, v2: bool, cpu: bool) -> None:
    """Let a runner show its candidates to a tracker, as our worker does."""
    extend_runner(runner, v2=v2, cpu=cpu)
    observe_runner(runner, is_read, v2=v2)


def called(name: str, operator: Any, calls: list) -> Any:
    """The operator, which notes that it was called, and with what."""
    return lambda *tensors: calls.append((name, tensors)) or operator(*tensors)
