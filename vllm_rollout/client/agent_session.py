"""One conversation of a group of agents, as the user's function has it.

Invariant: turns that its function left behind are known, and a finish is sent until the session has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from vllm_rollout.background import begin, heard
from vllm_rollout.client.calls import Call, typed
from vllm_rollout.client.connection import RolloutError
from vllm_rollout.client.sender import Sender
from vllm_rollout.server.sessions.body import FinishAnswer, TrajectoryAnswer

AGAIN_S = 0.2
"""A finish that overtook the end of a turn, such as one whose call was cancelled, is sent again after so long."""
OPEN = frozenset({"turn", "between_turns"})
UNWANTED = frozenset({"surplus", "pruned", "deferred", "void"})
"""States of sessions whose function is to stop."""


class SessionLost(Exception):
    """Nobody needs this session's turns any more: let it pass, so that the function ends."""


class Void(Exception):
    """Raise it where a tool or a sandbox failed: the session counts for nothing, and another one takes its place."""


class AgentSession:
    """One conversation: what a user's function is called with."""

    def __init__(self, client: Sender, id: str, prompt: Any, number: int, on_their_way: set[asyncio.Task[Any]]) -> None:
        """`on_their_way`: tasks that end with the caller; turns of this session come to them."""
        self._client, self._on_their_way = client, on_their_way
        self.id = id
        self.prompt = prompt
        """The element of `prompts`."""
        self.number = number
        """Among the sessions of its group, from 0."""
        self.messages: list[dict[str, Any]] | None = None
        """The messages of the last `chat`, and its answer; None before the first."""
        self.is_ending = False
        """It was finished, or is being."""
        self.has_lost = False
        self.turns: set[asyncio.Task[dict[str, Any]]] = set()
        """On their way."""

    @property
    def base_url(self) -> str:
        """For an OpenAI client of any kind, with `headers`."""
        return f"{self._client.base_url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        """That make a request a turn of this session."""
        return {"X-Session-ID": self.id, **self._client.key_headers}

    async def chat(self, messages: Iterable[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """One turn by POST /v1/chat/completions, with any of its `fields`; the parsed answer.

        Asks for log probabilities, which the trajectory holds, unless `logprobs=False`.

        Raises: SessionLost; RolloutError with the server's words, such as a prompt that is too long.
        """
        sent = [dict(message) for message in messages]
        answer = await self._turn("chat/completions", {"messages": sent, "logprobs": True, **fields})
        self.messages = [*sent, answer["choices"][0]["message"]]
        return answer

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """One turn by POST /v1/completions, as `chat`. Log probabilities: unless `logprobs=None`."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        return await self._turn("completions", {"prompt": prompt, "logprobs": 0, **fields})

    async def finish(self, reward: float | None = None) -> FinishAnswer:
        """The session is over. Where a function does not say so, its return does.

        None: the group's reward function grades it, if it has one. Raises: RolloutError, 409 for a second time.
        """
        return await self.end({} if reward is None else {"reward": as_reward(reward)})

    async def end(self, body: Mapping[str, Any]) -> FinishAnswer:
        call = Call("POST", f"/v1/sessions/{quote(self.id, safe='')}/finish", typed(FinishAnswer), body)
        self.is_ending = True
        while True:
            try:
                answer = await self._client.send(call)
            except RolloutError as error:
                if error.status != HTTPStatus.CONFLICT or (await self.read()).state not in OPEN:
                    self.is_ending = False
                    raise
                await self._client._sleep(AGAIN_S)
            else:
                return answer

    async def read(self) -> TrajectoryAnswer:
        """What it has become so far. Raises: RolloutError, 404 before its first turn."""
        return await self._client.send(Call("GET", f"/v1/sessions/{quote(self.id, safe='')}", typed(TrajectoryAnswer)))

    async def _turn(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if body.get("stream"):
            raise TypeError(
                "stream: a turn's answer is whole here. Stream with a client at `base_url`, with `headers`."
            )
        call = Call("POST", f"/v1/{path}", typed(dict[str, Any]), body, headers=self.headers)
        turn = begin(self._client.send(call), self._on_their_way)
        self.turns.add(turn)
        turn.add_done_callback(self.turns.discard)
        try:
            answer: dict[str, Any] = await heard(turn, "a turn", refusals=(RolloutError,))
        except asyncio.CancelledError:
            if not self.has_lost:  # else the server ends the turn, and counts its tokens
                await cancelled([turn])
            raise
        choice = answer["choices"][0]
        if choice["finish_reason"] == "abort" and choice.get("stop_reason") in UNWANTED:
            raise SessionLost(f"session {self.id} of prompt {self.prompt!r:.80}: {choice['stop_reason']}")
        return answer


def as_reward(value: Any) -> float:
    """Raises: ValueError, TypeError."""
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be a finite number, got {reward}. Return None for none, or raise Void.")
    return reward


def cancel(task: asyncio.Task[Any]) -> None:
    """Once: a second time would interrupt what closes its sandbox."""
    if not task.cancelling():
        task.cancel()


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Once they have ended; what they raise is of no interest any more."""
    tasks = list(tasks)
    for task in tasks:
        cancel(task)
    await asyncio.gather(*tasks, return_exceptions=True)
