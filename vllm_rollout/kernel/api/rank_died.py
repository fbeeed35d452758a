"""The error of a request or call whose rank has died while others live."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Hashable, Mapping
from http import HTTPStatus
from typing import TypeVar

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


class RankDied(GracefulHTTPError):
    """The rank died, and the request or call to it is lost. The server goes on."""

    rank: int
    request_id: str | None
    """Id of the request that was not sent, if any."""

    @classmethod
    def of(cls, rank: int, request_id: str | None = None) -> RankDied:
        died = cls(
            f"rank {rank} of the engine has died, and what ran there is lost. Send it again: other ranks go on. "
            "The server's log says why it died.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )
        died.rank, died.request_id = rank, request_id
        return died


async def answers_of_the_living(calls: Mapping[Key, Awaitable[Answer]]) -> dict[Key, Answer]:
    """Answers of the calls whose rank is alive to the end. Raises: EngineDeadError if no rank is left."""
    answers = await asyncio.gather(*calls.values(), return_exceptions=True)
    if all(isinstance(answer, RankDied) for answer in answers):
        raise EngineDeadError()
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, RankDied):
            raise answer
    return {key: answer for key, answer in zip(calls, answers, strict=True) if not isinstance(answer, BaseException)}
