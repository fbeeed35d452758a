"""All reports about one group, read as one: of attempts to run it, of candidates that are launched later, and of parts.

Invariants: a restart voids all reports of earlier attempts. After `close` no source runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm_rollout.kernel.http.engine import CandidateEnd, GroupLost, Happening, NoRankTakes
from vllm_rollout.kernel.http.fan_in import FanIn
from vllm_rollout.kernel.rules.fields import OnEngineFailure
from vllm_rollout.kernel.rules.rewards import Grade

Attempt = Callable[[], AsyncGenerator[Happening, None]]
"""Starts a group, and yields its tokens and ends."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The group runs again. All earlier reports are void."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The candidates stay lost. Each has ended, and nothing follows."""

    reason: str
    no_rank: bool = False
    """True if no rank took them. One may take them later."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The grade of a finished candidate."""

    end: CandidateEnd
    grade: Grade


async def attempts(
    run: Attempt,
    on_engine_failure: OnEngineFailure,
    before_retry: Callable[[], Awaitable[None]],
    *,
    has_begun: bool = False,
) -> AsyncGenerator[Happening | Restarted | Lost, None]:
    """Run a group until it ends, and yield its tokens and ends, its restarts and its loss.

    `run` starts one attempt. If the engine loses the group, then `on_engine_failure` "fail" yields `Lost`. Otherwise
    `Restarted` is yielded, and the group runs again after `before_retry`. Each retry takes the death of a rank, so
    there are fewer retries than ranks. If no rank is left for one, `Lost` is yielded.

    `has_begun`: candidates of the group have run before. Raises: what `run` raises when the whole engine is dead, or
    when no rank takes a group that had not begun.
    """
    reason = ""
    while True:
        try:
            async with aclosing(run()) as happenings:
                async for happening in happenings:
                    yield happening
            return
        except GroupLost as lost:
            reason = str(lost)
        except NoRankTakes as refusal:
            if not (reason or has_begun):
                raise
            yield Lost(f"{reason}, and {refusal}" if reason else str(refusal), no_rank=True)
            return
        if on_engine_failure == "fail":
            yield Lost(reason)
            return
        yield Restarted(reason)
        await before_retry()


@dataclass(frozen=True, slots=True)
class LaunchOver:
    """All candidates that were launched together have ended."""


class Sources(FanIn[Any]):
    """Reports about one group."""

    def __init__(self) -> None:
        super().__init__(1)

    def launch(self, candidates: AsyncGenerator[Any, None]) -> None:
        """Also read the reports on candidates that are launched together. `LaunchOver` follows them."""

        async def launched() -> AsyncGenerator[Any, None]:
            async with aclosing(candidates) as reports:
                async for report in reports:
                    yield report
            yield LaunchOver()

        self.add(launched())
