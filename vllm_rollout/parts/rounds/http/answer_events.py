"""The stream of a finished round, made from its answer.

Invariant: it repeats the first stream's events of every group and of the round, without `tokens`. Its first event
describes the outcome. Prompts that did not start are its `reserve`, and `num_wanted` is the number of returned groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from pydantic import Discriminator, TypeAdapter

from vllm_rollout.kernel.http.answers import GroupAnswer
from vllm_rollout.parts.rounds.http.answers import DeferredEvent, FilteredEvent, RoundAnswer, RoundDoneEvent, RoundEvent
from vllm_rollout.parts.rounds.http.ended_groups import events_of
from vllm_rollout.parts.rounds.http.live import LiveEvent
from vllm_rollout.parts.rounds.http.of_sessions import ANY_ANSWER, of_sessions

_FORM: Any = ANY_ANSWER if of_sessions is None else Annotated[ANY_ANSWER, Discriminator("object")]
_ANSWER: TypeAdapter[Any] = TypeAdapter(_FORM)


async def events_of_answer(answer: bytes) -> AsyncGenerator[LiveEvent, None]:
    """The events that a stream would have sent, made from an answer in JSON."""
    round = await asyncio.to_thread(_ANSWER.validate_json, answer)
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
        if isinstance(group, GroupAnswer):
            for event in events_of(group):
                yield event
        else:
            yield of_sessions.ReturnedEvent(**vars(group))
    for prompt_id in round.deferred:
        yield DeferredEvent(prompt_id=prompt_id, group_id="", reason="cut")
    for prompt_id in round.filtered:
        yield FilteredEvent(prompt_id=prompt_id)
    fields = {name: value for name, value in vars(round).items() if name not in ("groups", "object")}
    yield (RoundDoneEvent if isinstance(round, RoundAnswer) else of_sessions.SessionRoundDoneEvent)(**fields)
