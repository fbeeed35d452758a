"""Turns without an engine: an app whose `/v1/chat/completions` and `/v1/completions` speak the protocol of sessions.

A turn answers at once with "so " and what it was asked; one whose last message, or line, is "long" runs until its
session has lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CollectorRegistry

from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.sessions.fakes import put
from tests.support.waiting import WAIT_S
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.clients import ClientNamespaces
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.rewards.http.plan import RewardsPlan
from vllm_rollout.parts.sessions.http.asked import client_session, turn_from_xargs
from vllm_rollout.parts.sessions.http.groups import OpenTurn
from vllm_rollout.parts.sessions.http.service import SessionService


class Turns:
    """The app, and what it has seen."""

    def __init__(self, database: Path) -> None:
        self.app: FastAPI = make_app(FakeEngine(), database=database)
        service = self.app.state.rollout_service
        self.service = SessionService(
            self._stop, service.part(RewardsPlan).grading, service.rewards, Metrics(CollectorRegistry()), decode
        )
        put(self.app, self.service)
        self.app.add_middleware(ClientNamespaces)
        router = APIRouter(route_class=RolloutRoute)
        router.post("/v1/chat/completions")(self._chat)
        router.post("/v1/completions")(self._completions)
        self.app.include_router(router)
        self.bodies: list[dict[str, Any]] = []
        self.num_stopped = 0
        self.prunes: set[int] = set()
        """Indices of turns that their score stops."""
        self.lets_stop: Callable[[], bool] = lambda: True
        """True if stops reach their turns now. The service sends them again."""
        self._stops: dict[tuple[str, int], asyncio.Event] = {}

    @property
    def num_groups(self) -> int:
        return len(self.service._groups)

    async def _stop(self, turns: Mapping[str, Sequence[int]]) -> None:
        for group, indices in turns.items():
            for index in indices if self.lets_stop() else ():
                self._stops[group, index].set()

    async def _chat(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        prompt = "".join(f"<{each['role']}>{each['content']}" for each in body["messages"])
        answer, told = await self._turn(request, body, prompt + "<assistant>", body["messages"][-1]["content"])
        return {"choices": [{"message": {"role": "assistant", "content": answer}, **told}]}

    async def _completions(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        prompt = body["prompt"] if isinstance(body["prompt"], str) else decode(body["prompt"])
        answer, told = await self._turn(request, body, prompt, prompt.rpartition("\n")[2])
        return {"choices": [{"text": answer, "token_ids": list(map(ord, answer)), **told}]}

    async def _turn(
        self, request: Request, body: dict[str, Any], prompt: str, asked: str
    ) -> tuple[str, dict[str, Any]]:
        self.bodies.append(body)
        tokens = list(map(ord, prompt))
        turn = self.service.turn(
            turn_from_xargs(body.get("vllm_xargs", {}), client_session(), n=1), body.get("model"), tokens
        )
        if turn is not None:
            await self.service.compare(turn)
        if turn is None or not self.service.begin(turn):
            return "", {"finish_reason": "abort", "stop_reason": "surplus"}
        try:
            return await self._generate(request, turn, tokens, asked, body)
        finally:
            self.service.leave(turn)

    async def _generate(
        self, request: Request, turn: OpenTurn, tokens: list[int], asked: str, body: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        if asked == "bad weights":
            turn.group.saw_bad_weights = True
            raise RequestError("JSON has no NaN")
        text, reason = f"so {asked}", "stop"
        if asked == "long":
            stop = self._stops[turn.group.engine_id, turn.index] = asyncio.Event()
            async with asyncio.timeout(WAIT_S):
                while not stop.is_set() and not await request.is_disconnected():
                    await asyncio.sleep(0.01)
            if not stop.is_set():
                raise ConnectionError("the client has left")
            self.num_stopped += 1
            text, reason = "so", "abort"
        if turn.index in self.prunes:
            text, reason = "so", "abort"
        logprobs = None if body["logprobs"] is False else [-1.0] * len(text)
        pruned = turn.index in self.prunes
        told = {"text": text, "finish_reason": reason, "logprobs": logprobs, "pruned": pruned}
        self.service.end(turn, tokens, list(map(ord, text)), **told)
        stop_reason = None if reason != "abort" else "pruned" if pruned else "surplus"
        return text, {"finish_reason": reason, "stop_reason": stop_reason}


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.fixture
def turns(tmp_path: Path) -> Turns:
    return Turns(tmp_path / "runs.sqlite")


@pytest.fixture
def url(turns: Turns) -> Iterator[str]:
    with serving(turns.app) as url:
        yield url
