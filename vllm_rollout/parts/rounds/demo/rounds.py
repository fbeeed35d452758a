"""Rounds as they ran, and the two ways to run them: plain, and with tail batching by the server.

Invariant: both ways return every prompt once, in equally many rounds. A round's clock runs from its first request to
its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import httpx

from vllm_rollout import AsyncRolloutClient
from vllm_rollout.demo.phases import raise_for_status
from vllm_rollout.kernel.http.answers import GroupEvent, TrajectoryEvent
from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.parts.rounds.client.run import AsyncRun, Fed, RoundFeed
from vllm_rollout.parts.rounds.http.answers import DeferredEvent, RoundDoneEvent
from vllm_rollout.parts.rounds.rules.rounds import RunTerms

RoundName = Literal["plain", "short", "long"]


class ReturnedGroup(NamedTuple):
    """One prompt in one round."""

    prompt: int
    """Position of the prompt in the data."""
    seconds: float
    """Seconds from the round's start until the prompt was complete or deferred."""
    lengths: tuple[int, ...] = ()
    """Lengths of the prompt's trajectories. Empty if it was deferred."""

    @property
    def is_deferred(self) -> bool:
        return not self.lengths


@dataclass(frozen=True, slots=True)
class Round:
    name: RoundName
    seconds: float
    groups: tuple[ReturnedGroup, ...]
    generated_tokens: int

    @property
    def lengths(self) -> list[int]:
        """Lengths of the trajectories that the round returned."""
        return [length for group in self.groups for length in group.lengths]

    @property
    def returned_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def deferred(self) -> list[int]:
        return [group.prompt for group in self.groups if group.is_deferred]


@dataclass(frozen=True, slots=True)
class Period:
    """All rounds until every prompt is returned."""

    rounds: tuple[Round, ...]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.rounds)

    @property
    def generated_tokens(self) -> int:
        return sum(each.generated_tokens for each in self.rounds)

    @property
    def wasted_tokens(self) -> int:
        return self.generated_tokens - sum(each.returned_tokens for each in self.rounds)

    @property
    def deferred(self) -> set[int]:
        """Prompts that waited for a later round."""
        return {prompt for each in self.rounds for prompt in each.deferred}


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def sampling_of(sampling: Mapping[str, Any], prompt: int) -> dict[str, Any]:
    """Sampling parameters of one prompt by itself, with the seed that it has in a run."""
    return {**sampling, "seed": seed_for(sampling["seed"], str(prompt))}


async def plain_rounds(
    client: httpx.AsyncClient,
    questions: Sequence[str],
    terms: RunTerms,
    sampling: dict[str, Any],
    on_group: Callable[[], None] = lambda: None,
) -> AsyncIterator[Round]:
    """Rounds of stock chat requests in the order of the data. Each round waits for all its answers. Raises:
    ServerError."""

    async def ask(prompt: int, started: float) -> ReturnedGroup:
        body = {"messages": messages(questions[prompt]), "n": terms.group_size, "return_token_ids": True}
        response = await client.post("/v1/chat/completions", json=body | sampling_of(sampling, prompt))
        raise_for_status(response)
        seconds = time.monotonic() - started
        on_group()
        return ReturnedGroup(prompt, seconds, tuple(len(choice["token_ids"]) for choice in response.json()["choices"]))

    size = terms.prompts_per_round
    for first in range(0, len(questions), size):
        started = time.monotonic()
        prompts = range(first, min(first + size, len(questions)))
        groups = await asyncio.gather(*(ask(prompt, started) for prompt in prompts))
        seconds = time.monotonic() - started
        yield Round("plain", seconds, tuple(groups), sum(sum(group.lengths) for group in groups))


async def tail_rounds(
    client: AsyncRolloutClient,
    questions: Sequence[str],
    terms: RunTerms,
    sampling: dict[str, Any],
    on_group: Callable[[], None] = lambda: None,
) -> AsyncIterator[Round]:
    """Rounds of a run until every prompt is returned. Raises: RolloutError."""
    run = await client.run(
        terms.group_size,
        terms.prompts_per_round,
        prompt_speculation=terms.prompt_speculation,
        response_speculation=terms.response_speculation,
        sampling_params=sampling,
        include=[],
    )
    prompts = [{"id": str(i), "messages": messages(question)} for i, question in enumerate(questions)]
    feed = RoundFeed(prompts, terms.prompts_per_round)
    try:
        while (fed := feed.next(run.info)) is not None:
            yield await _tail_round(run, fed, on_group)
            await run.refresh()
    finally:
        await run.delete()


async def _tail_round(run: AsyncRun, fed: Fed, on_group: Callable[[], None]) -> Round:
    groups: list[ReturnedGroup] = []
    lengths: dict[str, list[int]] = {}
    generated_tokens = 0
    kind = run.info.next_round if fed.kind is None else fed.kind
    started = time.monotonic()
    async with aclosing(run.stream(fed.prompts, kind=fed.kind)) as events:
        async for event in events:
            seconds = time.monotonic() - started
            if isinstance(event, TrajectoryEvent):
                lengths.setdefault(event.prompt_id, []).append(event.trajectory.num_tokens)
            elif isinstance(event, GroupEvent):
                groups.append(ReturnedGroup(int(event.prompt_id), seconds, tuple(lengths[event.prompt_id])))
                on_group()
            elif isinstance(event, DeferredEvent):
                groups.append(ReturnedGroup(int(event.prompt_id), seconds))
            elif isinstance(event, RoundDoneEvent):
                generated_tokens = event.usage.generated_tokens
    return Round(kind, time.monotonic() - started, tuple(groups), generated_tokens)
