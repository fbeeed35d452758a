"""KV blocks between worker processes on any hosts, through host memory that NIXL transfers.

    source  `share` copies blocks into memory that is registered with NIXL and answers how to reach it
    target  `fetch` reads them into memory of its own, and puts them into the cache

vLLM's NixlConnector transfers the prompt of a request that has ended. A group that moves has unfinished answers, and
its candidates share blocks. So NIXL is used here as vLLM loads it, without the connector.

Invariant: memory that a transfer may still read or write stays mapped. A segment's stamp is read after its blocks. So a
late reader finds another stamp, and raises.
"""

from __future__ import annotations

import importlib
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import torch
from vllm.distributed import nixl_utils
from vllm.logger import init_logger

from vllm_rollout.extras import install_command
from vllm_rollout.parts.moving.wire import KVSegment
from vllm_rollout.parts.moving.worker.kv_layers import (
    STAMP_BYTES,
    KVLayers,
    KVTransfer,
    TransferError,
    check_room,
    check_stamp,
    free_bytes,
    stamp_of,
)

logger = init_logger("vllm.vllm_rollout")

BACKEND = "UCX"
TRANSFER_LIMIT_S = 5.0
"""Longest transfer of one segment in seconds. The target makes no step meanwhile."""
POLL_S = 0.0005
NUM_KEPT = 8
"""Dropped segments whose pages are freed, but still mapped: a reader that gave up may still be reading."""


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Location of registered memory."""

    agent: bytes
    """Metadata of the memory's agent, with the keys of this memory."""
    start: int


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    """Host memory that is registered with the agent."""

    map: mmap.mmap
    bytes: torch.Tensor
    token: Any

    @property
    def start(self) -> int:
        return self.bytes.data_ptr()


class Late(NamedTuple):
    """A transfer that could not be cancelled."""

    handle: Any
    there: str
    into: RegisteredMemory


class Agent:
    """The part of NIXL that is needed here. Raises: TransferError.

    Args:
        nixl: an agent.
        errors: exceptions that the agent raises.
    """

    def __init__(
        self,
        nixl: Any,
        errors: tuple[type[Exception], ...],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nixl, self._errors, self._clock, self._sleep = nixl, errors, clock, sleep
        self._late: list[Late] = []

    @classmethod
    def load(cls) -> Agent:
        """Load NIXL. Raises: TransferError if the package cannot be loaded."""
        new_agent = nixl_utils.NixlWrapper
        if new_agent is None:
            raise TransferError(f"NIXL cannot be loaded. Run {install_command('nixl')}.")
        bindings = importlib.import_module("._bindings", new_agent.__module__.rpartition(".")[0])
        kinds = [each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception)]
        name = f"vllm-rollout-{uuid4().hex}"
        try:
            return cls(new_agent(name, nixl_utils.nixl_agent_config(backends=[BACKEND])), tuple(kinds))
        except tuple(kinds) as error:
            raise TransferError(f"NIXL has no {BACKEND}: {error}") from error

    def register(self, num_bytes: int) -> RegisteredMemory:
        self._late = [late for late in self._late if not self._released(late.handle)]
        map = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(map, dtype=torch.uint8)
        return RegisteredMemory(
            map, memory, self._ask("register_memory", [(memory.data_ptr(), num_bytes, 0, "")], "DRAM")
        )

    def forget(self, memory: RegisteredMemory) -> None:
        """Free the memory's pages, unless a late transfer writes to them. It stays mapped as long as it is
        referenced.
        """
        if all(late.into is not memory for late in self._late):
            self._ask("deregister_memory", memory.token)
            memory.map.madvise(mmap.MADV_DONTNEED)

    def place(self, memory: RegisteredMemory) -> Place:
        return Place(self._ask("get_partial_agent_metadata", memory.token, True, [BACKEND]), memory.start)

    @contextmanager
    def connected(self, place: Place) -> Iterator[str]:
        """Connect to the agent that has the memory. Yields its name."""
        name = self._ask("add_remote_agent", place.agent)
        try:
            yield name
        finally:
            if all(late.there != name for late in self._late):
                self._ask("remove_remote_agent", name)

    def read(self, there: str, start: int, into: RegisteredMemory, first: int, num_bytes: int) -> None:
        """Copy `num_bytes` bytes at offset `first` of remote memory to the same offset of `into`. `start`: remote
        address.
        """
        local = self._ask("get_xfer_descs", [(into.start + first, num_bytes, 0)], "DRAM")
        remote = self._ask("get_xfer_descs", [(start + first, num_bytes, 0)], "DRAM")
        handle = self._ask("initialize_xfer", "READ", local, remote, there)
        state, until = "ERR", self._clock() + TRANSFER_LIMIT_S
        try:
            state = self._ask("transfer", handle)
            while state == "PROC" and self._clock() < until:
                self._sleep(POLL_S)
                state = self._ask("check_xfer_state", handle)
        finally:
            if not self._released(handle):
                self._late.append(Late(handle, there, into))
        if state != "DONE":
            why = f"takes longer than {TRANSFER_LIMIT_S} s" if state == "PROC" else "failed"
            raise TransferError(f"a transfer of {num_bytes >> 20} MiB by NIXL {why}")

    def _released(self, handle: Any) -> bool:
        try:
            self._ask("release_xfer_handle", handle)
        except TransferError:
            return False
        return True

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nixl, function)(*arguments)
        except self._errors as error:
            raise TransferError(f"NIXL: {function}: {error}") from error


class NixlKV(KVTransfer):
    """KV blocks by NIXL."""

    way = "nixl"
    leads_to_other_hosts = True

    def __init__(self, layers: KVLayers, rank: int, agent: Agent) -> None:
        super().__init__(layers, rank)
        self._agent = agent
        self._lent: dict[str, RegisteredMemory] = {}
        """Registered memory by segment."""
        self._dropped: deque[RegisteredMemory] = deque(maxlen=NUM_KEPT)

    def _lend(self, name: str, block_ids: Sequence[int]) -> bytes:
        num_bytes = STAMP_BYTES + sum(self._layers.sizes(len(block_ids)))
        check_room(num_bytes, free_bytes())
        memory = self._lent[name] = self._agent.register(num_bytes)
        memory.bytes[:STAMP_BYTES] = torch.frombuffer(bytearray(stamp_of(name)), dtype=torch.uint8)
        self._layers.gather_into(self._layers.parts(memory.bytes[STAMP_BYTES:], len(block_ids)), block_ids)
        return msgspec.msgpack.encode(self._agent.place(memory))

    def _read(self, segment: KVSegment, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        place = msgspec.msgpack.decode(segment.address, type=Place)
        num_bytes = sum(self._layers.sizes(segment.num_blocks))
        check_room(num_bytes, free_bytes())
        memory = self._agent.register(STAMP_BYTES + num_bytes)
        try:
            with self._agent.connected(place) as there:
                self._agent.read(there, place.start, memory, STAMP_BYTES, num_bytes)
                self._agent.read(there, place.start, memory, 0, STAMP_BYTES)
            check_stamp(memory.bytes[:STAMP_BYTES], segment)
            parts = self._layers.parts(memory.bytes[STAMP_BYTES:], segment.num_blocks)
            self._layers.scatter(parts, slots, block_ids)
        finally:
            self._agent.forget(memory)

    def drop(self, name: str) -> None:
        if (memory := self._lent.pop(name, None)) is None:
            return
        self._dropped.append(memory)
        try:
            self._agent.forget(memory)
        except TransferError as error:
            logger.warning("%d MiB of memory stay registered: %s", len(memory.bytes) >> 20, error)
