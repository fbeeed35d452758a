"""A round that this process runs, and its answer. Invariant: an answer is made once, and never changes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_rollout.group.lengths.receipt import Receipt
from vllm_rollout.group.rounds.round_progress import RoundProgress
from vllm_rollout.group.rounds.rounds import OpenRound, Run
from vllm_rollout.server.answers import Event, RebuildAnswer, RoundDoneEvent, RoundEvent, RoundSummary
from vllm_rollout.server.clients import id_of
from vllm_rollout.server.runs.answers import OpenGroupAnswer
from vllm_rollout.server.runs.ended_groups import EndedGroups
from vllm_rollout.server.runs.session_answers import SessionRoundDoneEvent, SessionRoundEvent
from vllm_rollout.server.runs.stored import PlannedRound

LiveEvent = Event | SessionRoundEvent
LastEvent = RoundDoneEvent | SessionRoundDoneEvent
Keep = Callable[[], Awaitable[LastEvent]]
"""Writes what came of a round that is over; returns its last event. Raises: RequestError."""


class Spent(NamedTuple):
    """What the store is told of a round that is over, beside what became of its prompts."""

    latency_s: float
    generated_tokens: int
    returned_tokens: int
    receipt: Receipt | None = None
    kept: Mapping[int, bytes] = {}
    """What deferred prompts have generated, by number."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRound(ABC):
    """A round that this process runs, whoever its candidates are."""

    id: str
    """The id of its rollout, or of its sessions together."""
    run_name: str
    """Among the runs of all clients."""
    progress: RoundProgress
    owner: str = ""
    """What the store calls this process's hold on it, once it has been taken."""
    is_kept: bool = False
    """What came of it is on disk."""
    answer: bytes = b""
    """Its answer as JSON, once it is kept."""
    rebuilt: RebuildAnswer | None = None
    """What became of the engine before it."""
    ended: EndedGroups | None = None
    """None: what has ended of it before its end is kept nowhere."""
    keeping: asyncio.Task[LastEvent] | None = field(default=None)
    """Writes it, whoever waits for it."""

    @property
    def run_id(self) -> str:
        """As its client calls it."""
        return id_of(self.run_name)

    @property
    def opened(self) -> OpenRound:
        return self.progress.opened

    @abstractmethod
    def take_up(self, planned: PlannedRound) -> None:
        """It was interrupted: what `ended` has of it need not run again."""

    @abstractmethod
    def events(self, keep: Keep) -> AsyncGenerator[LiveEvent, None]:
        """Runs it; all events behind the first. Raises: RequestError."""

    @abstractmethod
    def spent(self) -> Spent:
        """What a round that is over has spent."""

    @abstractmethod
    def parts(self, told: RoundSummary) -> list[bytes]:
        """Its answer as JSON, once."""

    @abstractmethod
    def done(self, told: RoundSummary) -> LastEvent: ...

    @property
    def groups_to_run(self) -> list[OpenGroupAnswer]:
        """Groups that somebody else is to run."""
        return []


@dataclass(frozen=True, slots=True)
class Begun:
    """A round's events, of which the first has been made: so it ends even if nobody reads it."""

    live: LiveRound
    events: AsyncGenerator[LiveEvent, None]


def made_answer(live: LiveRound, run: Run) -> bytes:
    """Once: a second attempt to write it has the same bytes."""
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
    """`run`: after the round."""
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
