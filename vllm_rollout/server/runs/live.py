"""A round that this process runs, and its answer. Invariant: an answer is made once, and never changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from vllm_rollout.group.rounds.rounds import OpenRound, Run
from vllm_rollout.server.answers import (
    DeferredEvent,
    Event,
    FilteredEvent,
    GroupAnswer,
    RebuildAnswer,
    RoundAnswer,
    RoundDoneEvent,
    RoundEvent,
    RoundSummary,
)
from vllm_rollout.server.rollout import Rollout
from vllm_rollout.server.runs.course import RoundCourse
from vllm_rollout.server.runs.ended_groups import EndedGroups, events_of
from vllm_rollout.server.serialised import GroupsInJson


@dataclass(slots=True)
class LiveRound:
    """A round that this process runs."""

    run_id: str
    opened: OpenRound
    rollout: Rollout
    course: RoundCourse
    owner: str = ""
    """What the store calls this process's hold on it, once it has been taken."""
    groups: GroupsInJson = field(default_factory=GroupsInJson)
    ended: EndedGroups | None = None
    """None: what has ended of it before its end is kept nowhere."""
    before: Mapping[int, GroupAnswer] = field(default_factory=dict)
    """By position: groups that were complete when it was interrupted."""
    is_kept: bool = False
    """What came of it is on disk."""
    answer: bytes = b""
    """A RoundAnswer as JSON, once it is kept."""
    rebuilt: RebuildAnswer | None = None
    """What became of the engine before it."""
    keeping: asyncio.Task[RoundDoneEvent] | None = None
    """Writes it, whoever waits for it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A round's events, of which the first has been made: so it ends even if nobody reads it."""

    live: LiveRound
    events: AsyncGenerator[Event, None]


def made_answer(live: LiveRound, run: Run) -> bytes:
    """Once: a second attempt to write it has the same bytes."""
    if not live.answer:
        rollout, fates = live.rollout, live.course.progress.fates
        envelope = RoundAnswer(**summary(live, run).model_dump(), **rollout.envelope(), groups=[])
        ids = [e.prompt_id for i, e in enumerate(live.opened.all_entries) if fates.get(i) == "returned"]
        live.answer = b"".join(live.groups.answer(envelope, ids))
    return live.answer


def summary(live: LiveRound, run: Run) -> RoundSummary:
    """`run`: after the round."""
    by_fate: dict[str, list[str]] = {"deferred": [], "filtered": [], "unstarted": []}
    for position, entry in enumerate(live.opened.all_entries):
        by_fate.setdefault(live.course.progress.fates.get(position, "unstarted"), []).append(entry.prompt_id)
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


async def replayed(answer: bytes) -> AsyncGenerator[Event, None]:
    """The events that a stream would have sent, of a RoundAnswer in JSON; no `tokens`: they are in the trajectories."""
    round = await asyncio.to_thread(RoundAnswer.model_validate_json, answer)
    returned = [group.prompt_id for group in round.groups]
    yield RoundEvent(
        id=round.id,
        run=round.run,
        round=round.round,
        kind=round.kind,
        idempotency_key=round.idempotency_key,
        num_wanted=len(returned),
        prompt_ids=[*returned, *round.deferred, *round.filtered],
        reserve=round.unstarted,
    )
    for group in round.groups:
        for event in events_of(group):
            yield event
    for prompt_id in round.deferred:
        yield DeferredEvent(prompt_id=prompt_id, group_id="", reason="cut")
    for prompt_id in round.filtered:
        yield FilteredEvent(prompt_id=prompt_id)
    fields = {name: value for name, value in vars(round).items() if name not in ("groups", "object")}
    yield RoundDoneEvent(**fields)
