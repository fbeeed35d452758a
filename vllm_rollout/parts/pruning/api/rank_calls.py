"""Calls of several messages to an engine core, and calls of a rank that may be dead."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.call_table import Argument, Operation, Result
from vllm_rollout.kernel.http.engine import EngineStopped, RequestError
from vllm_rollout.parts.pruning.calls import READ


async def call_if_alive(
    calls: EngineCalls, rank: int, operation: Operation[Argument, Result], argument: Argument
) -> Result | None:
    """Run one operation on one rank. Returns None if the rank is dead or dies meanwhile."""
    try:
        return await calls.call_rank(rank, operation, argument)
    except EngineStopped:
        if rank in calls.living_ranks:
            raise
        return None


async def read(calls: EngineCalls, open_operation: Operation[Any, Any], argument: Callable[[str], Any]) -> bytes | None:
    """Read data that the first rank writes in pieces, each between two of its steps. Returns None if there is nothing
    to open.

    `argument`: makes the opening operation's argument from a reader's name. Raises: EngineStopped.
    """
    return await calls.ask_first(lambda rank: _read_from(calls, rank, open_operation, argument))


async def _read_from(
    calls: EngineCalls, rank: int, open_operation: Operation[Any, Any], argument: Callable[[str], Any]
) -> bytes | None:
    reader = uuid.uuid4().hex
    if await calls.call_rank(rank, open_operation, argument(reader)) is False:
        return None
    pieces = []
    while (piece := await calls.call_rank(rank, READ, reader)) is not None:
        pieces.append(piece.data)
        if piece.is_last:
            return b"".join(pieces)
    raise RequestError(
        "too many read what this server has learned at the same time. Try again.",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
    )
