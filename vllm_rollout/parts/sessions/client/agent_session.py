"""One conversation of a group of agents, as passed to the user's function.

Invariant: turns that the function left behind are tracked. A finish is sent again until the session has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from vllm_rollout.background import begin, cancelled, heard
from vllm_rollout.kernel.client.calls import Call, typed
from vllm_rollout.kernel.client.connection import RolloutError
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.parts.sessions.http.body import FinishAnswer, TrajectoryAnswer

AGAIN_S = 0.2
"""Seconds until a finish is sent again that arrived before the end of a turn, such as a turn whose call was cancelled.
"""
OPEN = frozenset({"turn", "between_turns"})
UNWANTED = frozenset({"surplus", "pruned", "deferred", "void"})
"""States of a session in which its function is to stop."""


def end_session(id: str, body: Mapping[str, Any]) -> Call[FinishAnswer]:
    """`body`: fields of a FinishRequest."""
    return Call("POST", f"/v1/sessions/{quote(id, safe='')}/finish", typed(FinishAnswer), body)


class SessionLost(Exception):
    """The session has lost and needs no more turns. Do not catch this, so that the function ends."""


class Void(Exception):
    """Raise this if a tool or a sandbox failed. The session is discarded, and another session replaces it."""


class AgentSession:
    """One conversation: the argument of the user's function."""

    def __init__(self, client: Sender, id: str, prompt: Any, number: int, on_their_way: set[asyncio.Task[Any]]) -> None:
        """`on_their_way`: set to which running turns are added. The caller cancels its tasks at the end."""
        self._client, self._on_their_way = client, on_their_way
        self.id = id
        self.prompt = prompt
        """The element of `prompts`."""
        self.number = number
        """Position among the sessions of its group, from 0."""
        self.messages: list[dict[str, Any]] | None = None
        """Messages of the last `chat` call with its answer appended. None before the first call."""
        self.is_ending = False
        """True once a finish is being sent or was sent."""
        self.has_lost = False
        self.turns: set[asyncio.Task[dict[str, Any]]] = set()
        """Turns that are running."""

    @property
    def base_url(self) -> str:
        """Base URL for any OpenAI client. Use it with `headers`."""
        return f"{self._client.base_url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that make a request a turn of this session."""
        return {"X-Session-ID": self.id, **self._client.key_headers}

    async def chat(self, messages: Iterable[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Send one turn by POST /v1/chat/completions, with any of its `fields`. Returns the parsed answer.

        Asks for log probabilities, which the trajectory holds, unless `logprobs=False`.

        Raises: SessionLost. RolloutError with the server's words, for example if the prompt is too long. TypeError for
        `stream`.
        """
        sent = [dict(message) for message in messages]
        answer = await self._turn("chat/completions", {"messages": sent, "logprobs": True, **fields})
        self.messages = [*sent, answer["choices"][0]["message"]]
        return answer

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """Send one turn by POST /v1/completions, like `chat`. Asks for log probabilities unless `logprobs=None`."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        return await self._turn("completions", {"prompt": prompt, "logprobs": 0, **fields})

    async def finish(self, reward: float | None = None) -> FinishAnswer:
        """End the session. If the function does not call this, the session ends when the function returns.

        `reward`: None leaves grading to the group's reward function, if it has one.

        Raises: RolloutError, 409 if the session has already ended. ValueError or TypeError if `reward` is no finite
        number.
        """
        return await self.end({} if reward is None else {"reward": as_reward(reward)})

    async def end(self, body: Mapping[str, Any]) -> FinishAnswer:
        call = end_session(self.id, body)
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
        """The trajectory so far. Raises: RolloutError, 404 before the session's first turn."""
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
    """The value as a finite float. Raises: ValueError, TypeError."""
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be a finite number, got {reward}. Return None for none, or raise Void.")
    return reward
