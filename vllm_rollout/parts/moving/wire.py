"""A packed group on its way from one engine core to another, with the codec of both ends.

    source worker  `WorkerState` of each candidate  -> source engine core: `Parcel` -> bytes
    bytes -> API process, which does not look into them -> target engine core: `Parcel` -> target worker
    source worker  blocks of the KV cache -> memory that others can read (`KVSegment`) -> target worker

Invariant: a packed candidate is in no scheduler. Tokens of it that the API process has not got are in the pack.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_rollout.kernel.rules.detached import DetachedGroup
from vllm_rollout.kernel.wire import typed


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's data about a candidate, beside its tokens."""

    generator: bytes | None = None
    """State of the request's random generator (model runner V1, seeded requests)."""
    of_parts: dict[str, bytes] = field(default_factory=dict)
    """Data of the worker's parts, by part."""


@dataclass(frozen=True, slots=True)
class MovedCandidate:
    """A candidate that has left its engine core and runs nowhere."""

    index: int
    request: EngineCoreRequest
    """The request as an API process would send it."""
    output_token_ids: list[int]
    output_interval: int
    passes_next: bool
    """True if the next output is to be sent at once."""
    held: EngineCoreOutput | None
    """Tokens that wait for others to fill a message."""
    weights: list[tuple[int, int]]
    """Pairs of first output token and number of the weights change. All engine cores count the same changes."""
    num_preemptions: int
    state: WorkerState | None
    """None if the candidate has no output tokens."""


KVWay = Literal["host_memory", "cuda_ipc", "nixl"]
"""Ways of KV blocks from worker to worker. Only `nixl` reaches other hosts."""


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Location of one worker's part of some KV blocks."""

    rank: int
    """Rank of the worker in its engine."""
    name: str
    way: KVWay
    host: str
    address: bytes
    """Data by which the target finds the segment."""
    layout: list[str]
    """Layout of a block in each layer. Both ends must have the same."""
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """KV blocks of a group that the source still has: full blocks, each once."""

    segments: list[KVSegment]
    """One segment per worker."""
    slots: list[list[int]]
    """Positions of each candidate's blocks in the segments, in the order of its blocks, as far as they exist. Positions
    are used, because each engine core may hash with a seed of its own.
    """
    num_resets: int
    """Resets of the source's prefix cache so far. Blocks from before a reset are void."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packed group."""

    detached: DetachedGroup
    candidates: list[MovedCandidate]
    kv: KVBlocks | None
    """KV blocks. None: the target computes all of them."""

    def encode(self) -> bytes:
        # Several buffers, since vLLM's encoder does not copy large arrays.
        return msgspec.msgpack.encode([bytes(buffer) for buffer in MsgpackEncoder().encode(self)])  # type: ignore[arg-type]

    @classmethod
    def decode(cls, data: bytes) -> Parcel:
        parcel: Parcel = MsgpackDecoder(cls).decode(msgspec.msgpack.decode(data, type=list[bytes]))
        detached = parcel.detached
        detached.group.terms = replace(detached.group.terms, parts=typed("terms", detached.group.terms.parts))
        return replace(parcel, detached=replace(detached, parts=typed("taken", detached.parts)))


def request_to_move(request: Request, cache_salt: str | None) -> EngineCoreRequest:
    """The request as an API process would send it anew, with another salt."""
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=None,
        sampling_params=request.sampling_params,
        pooling_params=None,
        arrival_time=request.arrival_time,
        lora_request=request.lora_request,
        cache_salt=cache_salt,
        data_parallel_rank=None,
        client_index=request.client_index,
        priority=request.priority,
        trace_headers=request.trace_headers,
    )
