"""An engine of turns for `SessionService`: a test says what arrives, runs a step, ends or fails, and when.

Invariant: each token that it generates exists once, so that where a token came from can be told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from vllm_rollout.kernel.http.protocol import RewardOptions
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.sessions.http.asked import TurnSaid
from vllm_rollout.parts.sessions.http.groups import OpenTurn
from vllm_rollout.parts.sessions.http.service import SessionService
from vllm_rollout.parts.sessions.http.trajectory import Comparison, Continuation, Conversation, Decode

FIRST_GENERATED = 1000
"""Tokens from here on are the policy's."""


@dataclass(eq=False)
class EngineTurn:
    """A turn that a client has asked for."""

    turn: OpenTurn
    prompt: Sequence[int]
    has_arrived: bool = False
    is_stopped: bool = False
    token_ids: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.turn.engine_id, self.turn.index

    @property
    def runs(self) -> bool:
        return self.has_arrived and not self.is_stopped


class SessionEngine:
    """Turns that are asked for, and those that have begun."""

    def __init__(self) -> None:
        self.asked: list[EngineTurn] = []
        self.turns: list[EngineTurn] = []
        self._fresh = count(FIRST_GENERATED)

    async def stop(self, indices: Mapping[str, Sequence[int]]) -> None:
        """Stop turns that have arrived, and ignore the others."""
        for each in self.turns:
            if each.has_arrived and each.turn.index in indices.get(each.turn.engine_id, ()):
                each.is_stopped = True

    def ask(self, service: SessionService, said: TurnSaid, prompt: Sequence[int]) -> EngineTurn | None:
        """As a request does. None: its session has ended."""
        turn = service.turn(said, None, prompt)
        if turn is None:
            return None
        compare_now(turn)
        self.asked.append(EngineTurn(turn, list(turn.continuation.token_ids)))
        return self.asked[-1]

    def begin(self, service: SessionService, each: EngineTurn) -> EngineTurn | None:
        """It is sent to the engine, unless its session has ended meanwhile."""
        self.asked.remove(each)
        if not service.begin(each.turn):
            return None
        self.turns.append(each)
        return each

    def step(self) -> None:
        """All that run generate a token, as far as their group lets them."""
        for each in self.turns:
            assert not each.runs or each.turn.session.is_open, "no turn of a lost session runs a step"
            if each.runs and (each.turn.max_tokens is None or len(each.token_ids) < each.turn.max_tokens):
                each.token_ids.append(next(self._fresh))

    def end(self, service: SessionService, each: EngineTurn) -> None:
        """By itself, or since it was stopped; at the most that it may generate it is cut."""
        self.turns.remove(each)
        is_cut = len(each.token_ids) == each.turn.max_tokens
        reason = "abort" if each.is_stopped else "length" if is_cut else "stop"
        service.end(each.turn, each.prompt, each.token_ids, finish_reason=reason)
        service.leave(each.turn)

    def fail(self, service: SessionService, each: EngineTurn) -> None:
        """Fail a turn: its engine dies, or its client leaves."""
        self.turns.remove(each)
        service.leave(each.turn)


def compare_now(turn: OpenTurn) -> None:
    """As the service does beside the event loop. All tokens are other texts."""
    if isinstance(turn.continuation, Comparison):
        turn.continuation = turn.continuation.continuation(str)


def followed(conversation: Conversation, prompt: Sequence[int], decode: Decode) -> Continuation:
    """Continuation of a conversation by a prompt, compared at once."""
    found = conversation.follow(prompt)
    return found.continuation(decode) if isinstance(found, Comparison) else found


class Grader:
    """Grades when a test allows it."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Grade]] = []
        self.num_promised = 0

    def check(self, reward: RewardOptions, num_candidates: int) -> None:
        pass

    def promise(self, name: str, num: int) -> None:
        self.num_promised += num

    async def grade(self, *_: object) -> Grade:
        self.waiting.append(asyncio.get_running_loop().create_future())
        return await self.waiting[-1]
