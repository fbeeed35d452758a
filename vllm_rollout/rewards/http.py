"""A reward server of a user's: asked about one trajectory by `POST`, again with growing pauses while it fails.

It gets `{"id", "prompt", "text", "data"}`. It answers a number, or `{"reward": …}`, beside which other numbers are
parts, or `{"reward": null}` for void. Invariant: a server that is slow, dead or wrong gives `error`, never a reward: it
is not the policy's fault.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Self
from uuid import uuid4

import httpx
import msgspec

from vllm_rollout.group.checks import shown
from vllm_rollout.rewards.functions import grade_of
from vllm_rollout.rewards.values import Grade, Trajectory, failed

FIRST_PAUSE_S = 0.2
MAX_ANSWER_BYTES = 1 << 20


class RewardServer:
    """`url`: of the route that grades."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        try:
            host = httpx.URL(url).host
        except httpx.InvalidURL:
            host = ""
        if not host:
            raise ValueError(f"a reward server must be a URL such as http://127.0.0.1:9000/grade, got {shown(url)}")
        self._url = url
        self._client = httpx.AsyncClient(transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def grade(self, trajectory: Trajectory, limit_s: float) -> Grade:
        """`limit_s`: for all attempts together."""
        began, pause_s, said = time.monotonic(), FIRST_PAUSE_S, f"it did not answer within {limit_s:.3g} s"
        asked = {"id": uuid4().hex, "prompt": trajectory.prompt, "text": trajectory.text, "data": trajectory.data}
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        grade = await self._attempt(asked)
                        break
                    except (httpx.HTTPError, _FailsNow) as error:
                        said = str(error) or type(error).__name__
                    await asyncio.sleep(pause_s)
                    pause_s *= 2
        except TimeoutError:
            grade = failed(f"the reward server {self._url} gave no reward: {said}")
        return msgspec.structs.replace(grade, seconds=time.monotonic() - began)

    async def _attempt(self, asked: dict[str, Any]) -> Grade:
        """Raises: _FailsNow or httpx.HTTPError when another attempt may help."""
        async with self._client.stream("POST", self._url, json=asked, timeout=None) as answer:
            if answer.status_code >= 500 or answer.status_code == 429:
                raise _FailsNow(f"it answered {answer.status_code}")
            body = b""
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    return failed(f"the reward server answered more than {MAX_ANSWER_BYTES >> 20} MiB")
        if not answer.is_success:
            return failed(f"the reward server answered {answer.status_code}: {body.decode(errors='replace'):.200}")
        try:
            said = json.loads(body)
        except ValueError:
            return failed(f"the reward server answered no JSON: {shown(body.decode(errors='replace'))}")
        if isinstance(said, dict):
            if said.pop("id", asked["id"]) != asked["id"]:
                return failed(
                    "the reward server answered for another trajectory: its `id` is not the one that was sent"
                )
            if "reward" in said and said["reward"] is None:
                return grade_of(None)
        return grade_of(said)


class _FailsNow(Exception):
    """Another attempt may help."""
