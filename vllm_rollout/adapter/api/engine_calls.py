"""Calls from an API process to its engine cores. Invariant: a dead engine is a RequestError (503)."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.adapter.api.client import RolloutAsyncLLM
from vllm_rollout.adapter.core.calls import METHOD
from vllm_rollout.server.engine import RequestError


class EngineCalls:
    """What every part of the service's engine has: the client, and calls through it."""

    def __init__(self, client: RolloutAsyncLLM) -> None:
        self._client = client
        self.after_change: Callable[[], None] = lambda: None
        """Called when training is done and when lengths were told: there is something new to save."""

    async def _call(self, operation: str, *arguments: Any) -> list[Any]:
        """One operation on every rank; its results in the order of the ranks."""
        try:
            return await self._client.engine_core.call_utility_all_async(METHOD, operation, arguments)
        except EngineDeadError as error:
            raise engine_stopped() from error


def engine_stopped() -> RequestError:
    """What a client is told of a dead engine."""
    return RequestError(
        "the engine has stopped; restart the server and see its log for the reason.",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
    )
