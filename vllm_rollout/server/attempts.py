"""Attempts to run a group, of which the last one counts. Invariant: whatever was said of an earlier one is void."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from vllm_rollout.group.plans.fields import OnEngineFailure
from vllm_rollout.rewards.values import Grade
from vllm_rollout.server.engine import CandidateEnd, GroupLost, Happening

Attempt = Callable[[], AsyncGenerator[Happening, None]]
"""Starts a group, and yields what happens to it."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The group runs again: what happened before is void."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The group stays lost; nothing more comes."""

    reason: str


@dataclass(frozen=True, slots=True)
class Graded:
    """A candidate that has finished has its grade."""

    end: CandidateEnd
    grade: Grade


async def attempts(
    run: Attempt,
    on_engine_failure: OnEngineFailure,
    before_retry: Callable[[], Awaitable[None]],
) -> AsyncGenerator[Happening | Restarted | Lost, None]:
    """What happens to a group that `run` starts. There are fewer retries than ranks, since each takes the death of one.

    `before_retry` waits until it may run again. Raises what `run` raises when the whole engine is dead.
    """
    while True:
        try:
            async with aclosing(run()) as happenings:
                async for happening in happenings:
                    yield happening
            return
        except GroupLost as lost:
            reason = str(lost)
        if on_engine_failure == "fail":
            yield Lost(reason)
            return
        yield Restarted(reason)
        await before_retry()
