"""Differences between supported versions of vLLM in the engine core: one function per difference.

Invariant: no other file of the kernel asks the contract which variant applies in the engine core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_rollout.adapter.compat import ACTIVE_LIMIT, DEFERRED_WAITING, has


def num_deferred(scheduler: Scheduler) -> int:
    """Waiting requests that the last step skipped. vLLM counts them separately."""
    return len(scheduler.deferred_waiting if has(DEFERRED_WAITING) else scheduler.skipped_waiting)


def returns_experts(scheduler: Scheduler) -> bool:
    """True if the workers keep what vLLM returns of each request's routing to experts. Then a request must not run in
    the step that tells them of its preemption."""
    return getattr(scheduler, "aux_output_connector", None) is not None


@contextmanager
def admitting(scheduler: Scheduler, most: int) -> Iterator[None]:
    """Admit no request inside the block if `most` requests run."""
    field = "max_num_active_reqs" if has(ACTIVE_LIMIT) else "max_num_running_reqs"
    before = getattr(scheduler, field)
    setattr(scheduler, field, min(before, most))
    try:
        yield
    finally:
        setattr(scheduler, field, before)
