"""A user's reward server. It gets one trajectory by `POST`, again with growing pauses while it fails.

The request is `{"id", "prompt", "text", "data"}`. The answer is a number or `{"reward": …}`, beside which other numbers
are parts. `{"reward": null}` is void.

Invariant: a server that is slow, dead or wrong gives `error`, never a reward: it is not the policy's fault.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any, Self
from uuid import uuid4

import httpx

from vllm_rollout.checks import shown
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.functions import grade_of
from vllm_rollout.parts.rewards.grading.values import Trajectory, failed

FIRST_PAUSE_S = 0.2
MAX_ANSWER_BYTES = 1 << 20


class NoAnswer(Exception):
    """Reason why a server gave no usable answer, as the rest of a sentence. Another attempt would not help."""


class Question:
    """One `POST` of JSON, sent again with growing pauses until the server answers it."""

    def __init__(self, client: httpx.AsyncClient, url: str, asked: Any, headers: dict[str, str] | None = None) -> None:
        self._request = client.build_request("POST", url, json=asked, headers=headers, timeout=None)
        self._client = client
        self._failure: str | None = None

    @property
    def content(self) -> bytes:
        """Body of the request."""
        return self._request.content

    async def answer(self) -> Any:
        """The answer's JSON, however long it takes. Raises: NoAnswer."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await self._attempt()
            except (httpx.HTTPError, _FailsNow) as error:
                self._failure = str(error) or type(error).__name__
            await asyncio.sleep(pause_s)
            pause_s *= 2

    def unanswered(self, limit_s: float) -> str:
        """Reason why there is no answer after `limit_s` seconds."""
        return f"gave no reward: {self._failure or f'it did not answer within {limit_s:.3g} s'}"

    async def _attempt(self) -> Any:
        """Send the request once. Raises: _FailsNow or httpx.HTTPError if another attempt may help, else NoAnswer."""
        answer = await self._client.send(self._request, stream=True)
        try:
            if answer.status_code >= 500 or answer.status_code == 429:
                raise _FailsNow(f"it answered {answer.status_code}")
            body = b""
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise NoAnswer(f"answered more than {MAX_ANSWER_BYTES >> 20} MiB")
        finally:
            await answer.aclose()
        if not answer.is_success:
            raise NoAnswer(f"answered {answer.status_code}: {body.decode(errors='replace'):.200}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise NoAnswer(f"answered no JSON: {shown(body.decode(errors='replace'))}") from error


def host_of(url: str) -> str:
    """Host of a URL. Empty without a host, or if `url` is no URL."""
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return ""


class RewardServer:
    """A user's reward server. `url`: the route that grades."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        if not host_of(url):
            raise ValueError(f"a reward server must be a URL such as http://127.0.0.1:9000/grade, got {shown(url)}")
        self._url = url
        self._host = httpx.URL(url).netloc.decode()  # the rest may be secret, and clients get this name
        self._client = httpx.AsyncClient(transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def grade(self, trajectory: Trajectory, limit_s: float) -> Grade:
        """`limit_s`: seconds for all attempts together."""
        began = time.monotonic()
        asked = {"id": uuid4().hex, "prompt": trajectory.prompt, "text": trajectory.text, "data": trajectory.data}
        question = Question(self._client, self._url, asked)
        try:
            async with asyncio.timeout(limit_s):
                grade = _grade_of(await question.answer(), asked["id"])
        except TimeoutError:
            grade = failed(f"the reward server {self._host} {question.unanswered(limit_s)}")
        except NoAnswer as error:
            grade = failed(f"the reward server {error}")
        return replace(grade, seconds=time.monotonic() - began)


def _grade_of(said: Any, asked_id: str) -> Grade:
    if isinstance(said, dict):
        if said.pop("id", asked_id) != asked_id:
            return failed("the reward server answered for another trajectory: its `id` is not the one that was sent")
        if "reward" in said and said["reward"] is None:
            return grade_of(None)
    return grade_of(said)


class _FailsNow(Exception):
    """An attempt failed, and another may succeed."""
