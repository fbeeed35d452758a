"""Ways to run a step of conversations: plain requests that a client waits for or cancels, and our sessions."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

from benchmarks.agents.world import Tools, course_of, prompt_of
from vllm_rollout import AgentSession, AsyncRolloutClient, Void
from vllm_rollout.kernel.client.calls import Call, typed
from vllm_rollout.parts.emulation.tokens import succeeded

GROUP_SIZE, NUM_CANDIDATES = 8, 16
LONG_TOKENS = 2000
"""Longer than any turn, in tokens."""
PRUNING: dict[str, Any] = {"pruning": {"detection_length": 8, "min_labels": 16}, "pruning_turn": 2}
Way = Literal["wait 8", "wait 16", "client", "race", "pruned", "race 10", "refill 10"]
OPTIONS: dict[Way, dict[str, Any]] = {
    "race": {"redundancy": 8},
    "pruned": {"redundancy": 8, **PRUNING, "audit_ratio": 0.0},
    "race 10": {"redundancy": 2, "max_sessions": 10},
    "refill 10": {"redundancy": 2},
}
"""Arguments of `client.agents`, by way. All other ways are plain requests."""


class Answer(NamedTuple):
    token_ids: list[int]
    num_found: int
    """Tokens of the prompt that the prefix cache had."""


class Ran(NamedTuple):
    """A turn whose end the client received."""

    group: int
    turn: int
    """Number of the turn, from 1."""
    began: float
    ended: float
    num_prompt_tokens: int
    num_before: int
    """Tokens of the conversation at the end of the turn before."""
    answer: Answer


@dataclass
class Step:
    """One step of training, as the client measured it."""

    turns: list[Ran] = field(default_factory=list)
    ends: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Group -> times at which its conversations ended, without void ones."""
    kept_tokens: int = 0
    num_kept: int = 0

    def after(self) -> tuple[int, float]:
        """Number of turns that began after their group was complete, and tokens that turns generated after that."""
        over = {group: sorted(ends)[GROUP_SIZE - 1] for group, ends in self.ends.items() if len(ends) >= GROUP_SIZE}
        num_late, tokens = 0, 0.0
        for turn in self.turns:
            at = over.get(turn.group, turn.ended)
            num_late += turn.began > at
            share = (turn.ended - max(turn.began, at)) / (turn.ended - turn.began)
            tokens += len(turn.answer.token_ids) * max(0.0, share)
        return num_late, tokens


Complete = Callable[[list[int], int], Awaitable[Answer]]
"""Takes the tokens of a prompt and the number of tokens to generate."""


def fields_of(num_tokens: int) -> dict[str, Any]:
    xargs = {"emulate_lengths": num_tokens}
    return {"max_tokens": LONG_TOKENS + 1, "return_token_ids": True, "logprobs": None, "vllm_xargs": xargs}


def answer_of(body: Mapping[str, Any]) -> Answer:
    details = body["usage"].get("prompt_tokens_details") or {}
    return Answer(list(body["choices"][0]["token_ids"]), details.get("cached_tokens") or 0)


def plain(client: AsyncRolloutClient) -> Complete:
    async def complete(tokens: list[int], num_tokens: int) -> Answer:
        body = {"prompt": tokens, **fields_of(num_tokens)}
        return answer_of(await client.send(Call("POST", "/v1/completions", typed(dict[str, Any]), body)))

    return complete


def of_session(session: AgentSession) -> Complete:
    async def complete(tokens: list[int], num_tokens: int) -> Answer:
        return answer_of(await session.complete(tokens, **fields_of(num_tokens)))

    return complete


class Talk(NamedTuple):
    """A conversation that has ended."""

    num_tokens: int
    reward: float
    """1 if its second turn succeeded, which its score in that turn predicts, else 0. 1 without a second turn."""


class Bench:
    """One step, run in one way."""

    def __init__(self, client: AsyncRolloutClient, tools: Tools, seed: int, num_groups: int, speed: float) -> None:
        self.client, self.tools, self.seed, self.num_groups, self.speed = client, tools, seed, num_groups, speed
        self.step = Step()

    async def run(self, way: Way, **more: Any) -> Step:
        if way in OPTIONS:
            await self._race(**{**OPTIONS[way], **more})
        else:
            num = GROUP_SIZE if way == "wait 8" else NUM_CANDIDATES
            await asyncio.gather(*(self._rival(group, num, way == "client") for group in range(self.num_groups)))
        return self.step

    async def converse(self, group: int, number: int, complete: Complete) -> Talk:
        """Run one conversation. Raises: Void if a tool fails."""
        course, tokens, before = course_of(self.seed, group, number), prompt_of(self.seed, group), 0
        total, reward = 0, 1.0
        for index, num_tokens in enumerate(course.turns):
            began = time.perf_counter()
            answer = await complete(tokens, num_tokens)
            ended = time.perf_counter()
            self.step.turns.append(Ran(group, index + 1, began, ended, len(tokens), before, answer))
            total += len(answer.token_ids)
            reward = float(succeeded(answer.token_ids)) if index == 1 else reward
            if index < len(course.tools_s):
                await asyncio.sleep(course.tools_s[index] / self.speed)
                said = self.tools.answer(self.seed, group, number, index)
                before = len(tokens) + len(answer.token_ids)
                tokens = [*tokens, *answer.token_ids, *said]
        if course.fails:
            raise Void("the tool failed")
        self.step.ends[group].append(time.perf_counter())
        return Talk(total, reward)

    async def _race(self, **options: Any) -> None:
        async def run(session: AgentSession) -> float:
            return (await self.converse(session.prompt, session.number, of_session(session))).reward

        groups = self.client.agents(range(self.num_groups), GROUP_SIZE, run=run, max_concurrent=4096, **options)
        async with aclosing(groups):
            async for group in groups:
                self.step.kept_tokens += group.returned_tokens
                self.step.num_kept += len(group.trajectories)

    async def _rival(self, group: int, num_candidates: int, cancels: bool) -> None:
        """Run a group by plain requests, as a client of stock vLLM would."""
        numbers, complete = count(), plain(self.client)
        running = {asyncio.create_task(self.converse(group, next(numbers), complete)) for _ in range(num_candidates)}
        kept: list[int] = []
        while running and not (cancels and len(kept) >= GROUP_SIZE):
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not isinstance(task.exception(), Void):
                    kept.append(task.result().num_tokens)
            while len(kept) + len(running) < GROUP_SIZE:
                running.add(asyncio.create_task(self.converse(group, next(numbers), complete)))
        for task in running:
            task.cancel()
        self.step.kept_tokens += sum(kept[:GROUP_SIZE])
        self.step.num_kept += GROUP_SIZE
