"""Differences between supported versions of vLLM for groups that leave or come: one function per difference.

Invariant: no other file of the part asks the contract which variant applies in the engine core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_rollout.adapter.compat import ADOPTS_FOUND, DEFERRED_WAITING, SKIPS_ZEROING, has


def leave_deferred(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Remove these requests from the skipped ones."""
    if has(DEFERRED_WAITING):
        scheduler.deferred_waiting.difference_update(requests)
    else:
        scheduler.skipped_waiting.remove_requests(requests)


def holds_what_is_found() -> bool:
    """True if a request can be given blocks of the prefix cache and no others."""
    return has(ADOPTS_FOUND)


def without_zeroing() -> dict[str, Any]:
    """Arguments to allocate KV blocks that are filled before the next step."""
    return {"skip_zeroing_group_ids": (0,)} if has(SKIPS_ZEROING) else {}


def zeroes_what_comes(scheduler: Scheduler) -> bool:
    """True if the next step would clear KV blocks that have just been filled."""
    return not has(SKIPS_ZEROING) and scheduler.kv_cache_config.needs_kv_cache_zeroing
