"""A group on its way from one engine core to another: what travels, and the codec of both ends.

    source worker  `WorkerState` of each candidate  -> source engine core: `Parcel` -> bytes
    bytes -> API process, which does not look into them -> target engine core: `Parcel` -> target worker
    source worker  blocks of the KV cache -> memory that others can read (`KVSegment`) -> target worker

Invariant: a candidate in a parcel is in no scheduler, and every token of it that the API process has not got is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_rollout.adapter.call_table import Features
from vllm_rollout.emulation.fate import Fate
from vllm_rollout.group.step.moving import DetachedGroup
from vllm_rollout.tracker.tracker import TrackedCandidate


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker knows of a candidate beside its tokens."""

    generator: bytes | None = None
    """State of its random generator (model runner V1, seeded requests)."""
    tracked: TrackedCandidate | None = None
    features: dict[int, Features] = field(default_factory=dict)
    """The hidden states that await its reward, by detection length."""
    fate: Fate | None = None
    """What becomes of it, on an emulated device."""


@dataclass(frozen=True, slots=True)
class MovedCandidate:
    """A candidate that runs nowhere."""

    index: int
    request: EngineCoreRequest
    """As it came."""
    output_token_ids: list[int]
    output_interval: int
    passes_next: bool
    """The next output is to be sent at once."""
    held: EngineCoreOutput | None
    """Tokens that wait for others to make a message."""
    weights: list[tuple[int, int]]
    """From which output token on which weights sampled it. All engine cores count the same changes."""
    state: WorkerState | None
    """None when it has no output tokens."""


KVWay = Literal["host_memory", "cuda_ipc", "nixl"]
"""How KV blocks get from worker to worker; only the last leads to another host."""


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Where one worker's part of some KV blocks is."""

    rank: int
    """The worker's rank in its engine."""
    name: str
    way: KVWay
    host: str
    address: bytes
    """What the way needs to find it."""
    layout: list[str]
    """The layout of a block in each layer: both ends must have the same."""
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """What the source has computed of a group and still has: full blocks, each once."""

    segments: list[KVSegment]
    """One per worker."""
    slots: list[list[int]]
    """For each candidate: where in the segments its first block is, its second, and so on as far as they are there.
    Positions rather than hashes, since each engine core may hash with a seed of its own."""
    num_resets: int
    """How often the source's prefix cache was reset: what was computed before a reset is worth nothing after it."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A whole group."""

    detached: DetachedGroup
    candidates: list[MovedCandidate]
    kv: KVBlocks | None
    """None: the target computes all anew."""

    def encode(self) -> bytes:
        # Several buffers, since vLLM's encoder does not copy large arrays.
        return msgspec.msgpack.encode([bytes(buffer) for buffer in MsgpackEncoder().encode(self)])

    @classmethod
    def decode(cls, data: bytes) -> Parcel:
        return MsgpackDecoder(cls).decode(msgspec.msgpack.decode(data, type=list[bytes]))


def request_to_move(request: Request, cache_salt: str | None) -> EngineCoreRequest:
    """What an API process would send to make this request anew, with another salt."""
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
