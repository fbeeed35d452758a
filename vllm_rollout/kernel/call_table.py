"""The operations that an API process may call on an engine core: one row each, with the codecs of both ends.

Here are the kernel's rows. Each part has its own (`parts/*/calls.py`).

    API process   service -> EngineCalls.call_rank(rank, OPERATION, argument)  -- encode_argument
    engine core   rollout_call(name, payload) -- decode_argument -> its answer -- encode_result
    API process   decode_result

Invariant: an operation has the same name in the API process, here and in the engine core. One value of the named type
travels each way. An error that concerns the client is a value. An exception is a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from vllm_rollout.kernel.rules.types import RankCounts

CALL_METHOD = "rollout_call"
"""The only method added to vLLM's EngineCore: `rollout_call(operation: str, payload: bytes) -> bytes`."""

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class NamedChoices(NamedTuple):
    """Candidates of a group that are choices in a request's answer."""

    name: str
    """Name of the request."""
    group_id: str
    choices: dict[int, int]
    """Index of the candidate, by choice."""


class Operation(Generic[Argument, Result]):
    """One row: an operation's name, and the codecs of its argument and of its result."""

    def __init__(self, name: str, argument: Any, result: Any) -> None:
        """`argument`, `result`: their types."""
        self.name = name
        self.encode_argument: Callable[[Argument], bytes] = msgspec.msgpack.encode
        self.decode_argument: Callable[[bytes], Argument] = msgspec.msgpack.Decoder(argument).decode
        self.encode_result: Callable[[Result], bytes] = msgspec.msgpack.encode
        self.decode_result: Callable[[bytes], Result] = msgspec.msgpack.Decoder(result).decode


NAME_CHOICES: Operation[NamedChoices, None] = Operation("name_choices", NamedChoices, None)
"""Names for the candidates of a group, by which clients refer to them from now on."""
CANCEL_GROUPS: Operation[list[str], None] = Operation("cancel_groups", list[str], None)
"""Stop the running candidates of these groups as `deferred`, in the next step. Unknown groups are ignored."""
ABORT_REQUESTS: Operation[list[str], list[str]] = Operation("abort_requests", list[str], list[str])
"""Abort candidates in the next step, by the names of their requests. Returns the ids of those that ran."""
RECOMPUTE: Operation[list[str] | None, int] = Operation("recompute", list[str] | None, int)
"""Compute the KV of candidates again by the newest weights. The argument has names of requests, or is None for all
groups. Returns the number of these candidates.
"""
GIVE_UP: Operation[dict[str, list[int]], None] = Operation("give_up", dict[str, list[int]], None)
"""Stop running candidates as `surplus` in the next step, by group. Their API process needs them no more."""
WEIGHT_VERSION: Operation[str, str] = Operation("weight_version", str, str)
"""The newest name that weights of an adapter were given. Any other name stands for the base model."""
NAME_ADAPTER: Operation[tuple[str, str], None] = Operation("name_adapter", tuple[str, str], None)
"""Name the newest weights of an adapter. The argument: adapter, version."""
RANK_COUNTS: Operation[None, RankCounts] = Operation("rank_counts", None, RankCounts)
