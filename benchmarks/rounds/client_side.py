"""Tail batching as a trainer writes it around a stock server: streams, a queue of its own, connections closed early.

Invariant: a prompt is in one round at a time and is returned once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from vllm_rollout.demo.phases import raise_for_status
from vllm_rollout.parts.rounds.demo.rounds import ReturnedGroup, Round, RoundName, messages, sampling_of
from vllm_rollout.parts.rounds.rules.rounds import RunTerms


async def client_rounds(
    client: httpx.AsyncClient, questions: Sequence[str], terms: RunTerms, sampling: dict[str, Any]
) -> AsyncIterator[Round]:
    """Short rounds over the data. A long one follows when the queue can fill it, and at the end for what remains."""
    fresh = list(range(len(questions)))
    queue: list[int] = []
    while fresh or queue:
        size = terms.prompts_per_round
        if len(queue) >= size or len(fresh) < terms.num_prompts:
            rest = max(0, size - len(queue)) if len(queue) < size else 0
            prompts, queue, fresh = [*queue[:size], *fresh[:rest]], queue[size:], fresh[rest:]
            yield await _round("long", client, questions, prompts, len(prompts), terms.group_size, terms, sampling)
            continue
        prompts, fresh = fresh[: terms.num_prompts], fresh[terms.num_prompts :]
        done = await _round("short", client, questions, prompts, size, terms.num_candidates, terms, sampling)
        queue += done.deferred
        yield done


async def _round(
    name: RoundName,
    client: httpx.AsyncClient,
    questions: Sequence[str],
    prompts: Sequence[int],
    num_wanted: int,
    num_candidates: int,
    terms: RunTerms,
    sampling: dict[str, Any],
) -> Round:
    """Run one round until `num_wanted` prompts are complete. Then close the other streams: the server aborts them."""
    started = time.monotonic()
    received = dict.fromkeys(prompts, 0)

    async def ask(prompt: int) -> ReturnedGroup:
        body = {"messages": messages(questions[prompt]), "n": num_candidates, "return_token_ids": True, "stream": True}
        lengths = [0] * num_candidates
        finished: list[int] = []
        async with client.stream("POST", "/v1/chat/completions", json=body | sampling_of(sampling, prompt)) as response:
            if response.status_code != 200:
                await response.aread()
                raise_for_status(response)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    new = len(choice.get("token_ids") or ())
                    lengths[choice["index"]] += new
                    received[prompt] += new
                    if choice["finish_reason"] is not None:
                        finished.append(choice["index"])
                if len(finished) >= terms.group_size:
                    break
        kept = tuple(lengths[index] for index in finished[: terms.group_size])
        return ReturnedGroup(prompt, time.monotonic() - started, kept)

    tasks = {asyncio.create_task(ask(prompt)): prompt for prompt in prompts}
    groups: list[ReturnedGroup] = []
    try:
        for next_one in asyncio.as_completed(tasks):
            groups.append(await next_one)
            if len(groups) == num_wanted:
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.monotonic() - started
    returned = {group.prompt for group in groups}
    groups += [ReturnedGroup(prompt, seconds) for prompt in prompts if prompt not in returned]
    return Round(name, seconds, tuple(groups), sum(received.values()))
