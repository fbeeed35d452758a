"""The answer of a round, as the events that a stream would have sent. Invariant: they say what the answer says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from vllm_rollout.server.answers import (
    CandidateEvent,
    DeferredEvent,
    Event,
    FilteredEvent,
    GroupEvent,
    GroupSummary,
    RoundAnswer,
    RoundDoneEvent,
    RoundEvent,
    TrajectoryEvent,
)


async def replayed(answer: bytes) -> AsyncGenerator[Event, None]:
    """Events of a RoundAnswer in JSON; no `tokens`, which are in the trajectories."""
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
        name = {"prompt_id": group.prompt_id, "group_id": group.group_id}
        for trajectory in group.trajectories:
            yield TrajectoryEvent(**name, trajectory=trajectory)
        for candidate in group.candidates:
            yield CandidateEvent(**name, candidate=candidate)
        over = {name: value for name, value in vars(group).items() if name in GroupSummary.model_fields}
        yield GroupEvent(**over, selected=[trajectory.index for trajectory in group.trajectories])
    for prompt_id in round.deferred:
        yield DeferredEvent(prompt_id=prompt_id, group_id="", reason="cut")
    for prompt_id in round.filtered:
        yield FilteredEvent(prompt_id=prompt_id)
    fields = {name: value for name, value in vars(round).items() if name not in ("groups", "object")}
    yield RoundDoneEvent(**fields)
