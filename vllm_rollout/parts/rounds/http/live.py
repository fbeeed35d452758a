"""A round that this process runs, and its answer. Invariant: an answer is made once and never changes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import BaseModel

from vllm_rollout.kernel.http.clients import id_of
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.parts.rounds.http.answers import OpenGroupAnswer, RebuildAnswer, RoundEvent, RoundSummary
from vllm_rollout.parts.rounds.http.ended_groups import EndedGroups
from vllm_rollout.parts.rounds.http.stored import PlannedRound
from vllm_rollout.parts.rounds.rules.round_progress import RoundProgress
from vllm_rollout.parts.rounds.rules.rounds import OpenRound, Run

LiveEvent = BaseModel
LastEvent = RoundSummary
Keep = Callable[[], Awaitable[LastEvent]]
"""Writes the outcome of a finished round, and returns the round's last event. Raises: RequestError."""


class Spent(NamedTuple):
    """Time, tokens and kept output of a finished round, for the store."""

    latency_s: float
    generated_tokens: int
    returned_tokens: int
    receipt: Receipt | None = None
    kept: Mapping[int, bytes] = {}
    """Kept output of deferred prompts, by number."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRound(ABC):
    """A round that this process runs. Its candidates are answers of the engine, or sessions."""

    id: str
    """The id of its rollout, or of its sessions together."""
    run_name: str
    """The run's name among the runs of all clients."""
    progress: RoundProgress
    owner: str = ""
    """The store's name for this process's ownership of the round, once the round is taken."""
    is_kept: bool = False
    """True if the outcome is on disk."""
    answer: bytes = b""
    """Its answer as JSON, once it is kept."""
    rebuilt: RebuildAnswer | None = None
    """The rebuild of the engine before this round, if there was one."""
    ended: EndedGroups | None = None
    """None if finished groups are not written before the round's end."""
    keeping: asyncio.Task[LastEvent] | None = field(default=None)
    """The task that writes the outcome. All callers wait for this task."""

    @property
    def run_id(self) -> str:
        """The run's id as its client knows it."""
        return id_of(self.run_name)

    @property
    def opened(self) -> OpenRound:
        return self.progress.opened

    @abstractmethod
    def take_up(self, planned: PlannedRound) -> None:
        """Take over the finished groups of an interrupted round (`ended`), so that they need not run again."""

    @abstractmethod
    def events(self, keep: Keep) -> AsyncGenerator[LiveEvent, None]:
        """Run the round. Yields all events after the first. Raises: RequestError."""

    @abstractmethod
    def spent(self) -> Spent:
        """Time and tokens of the finished round."""

    @abstractmethod
    def parts(self, told: RoundSummary) -> list[bytes]:
        """The answer as JSON, in parts. It is made once."""

    @abstractmethod
    def done(self, told: RoundSummary) -> LastEvent: ...

    @property
    def groups_to_run(self) -> list[OpenGroupAnswer]:
        """Groups of sessions that a harness is to run."""
        return []


@dataclass(frozen=True, slots=True)
class Begun:
    """A round and its events. The first event has been made, so that the round ends even without a reader."""

    live: LiveRound
    events: AsyncGenerator[LiveEvent, None]


def made_answer(live: LiveRound, run: Run) -> bytes:
    """The answer as JSON. It is made once, so that a second attempt to write it has the same bytes."""
    if not live.answer:
        live.answer = b"".join(live.parts(summary(live, run)))
    return live.answer


def first_event(live: LiveRound) -> RoundEvent:
    opened = live.opened
    return RoundEvent(
        id=live.id,
        run=live.run_id,
        round=opened.number,
        kind=opened.kind,
        idempotency_key=opened.key,
        num_wanted=opened.num_wanted,
        prompt_ids=[entry.prompt_id for entry in opened.entries],
        reserve=[entry.prompt_id for entry in opened.reserve],
        rebuilt=live.rebuilt,
    )


def summary(live: LiveRound, run: Run) -> RoundSummary:
    """The outcome of a round. `run`: the run after the round."""
    by_fate: dict[str, list[str]] = {"deferred": [], "filtered": [], "unstarted": []}
    for position, entry in enumerate(live.opened.all_entries):
        by_fate.setdefault(live.progress.fates.get(position, "unstarted"), []).append(entry.prompt_id)
    return RoundSummary(
        run=live.run_id,
        round=live.opened.number,
        kind=live.opened.kind,
        idempotency_key=live.opened.key,
        deferred=by_fate["deferred"],
        filtered=by_fate["filtered"],
        unstarted=by_fate["unstarted"],
        next_round=run.next_kind,
        num_fresh_prompts=run.num_fresh,
        num_waiting=run.num_waiting,
        rebuilt=live.rebuilt,
    )
