"""KV blocks between worker processes on the same host, through memory of the source's device.

    source  `share` copies blocks into a buffer and answers the buffer's CUDA IPC handle
    target  `fetch` opens the handle, copies them out of the buffer, over NVLink or PCIe if it is another device's, and
            closes it

Buffers come from the CUDA runtime, because a torch buffer lies in a segment that is exported as a whole, or not at all.

Invariant: every buffer is lent to one segment, spare or freed, and every opened handle is closed. A segment's stamp is
written before its blocks and read after them. So a late reader finds another stamp, and raises.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_rollout.parts.moving.wire import KVSegment
from vllm_rollout.parts.moving.worker.kv_layers import (
    KV_FAILURES,
    STAMP_BYTES,
    KVLayers,
    KVTransfer,
    TransferError,
    check_room,
    check_stamp,
    stamp_of,
)

logger = init_logger("vllm.vllm_rollout")

GRANULE_BYTES = 2 << 20
"""Buffer sizes are multiples of this, in bytes. The driver exports nothing smaller, and would expose
neighbouring data.
"""
SPARE_BYTES = 256 << 20
"""Largest buffer in bytes that is kept for the next segment: freeing one waits for the whole device."""
LENT_S = 60.0
"""Seconds until a segment that was not dropped is dropped, when the next one is made."""


class DeviceMemory:
    """Memory of one device. Raises: TransferError, or MemoryError if none is left.

    Args:
        runtime: `cuda.bindings.runtime`.
    """

    def __init__(self, device: torch.device, runtime: Any) -> None:
        self._device, self._runtime = device, runtime

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def num_free_bytes(self) -> int:
        return self._ask("cudaMemGetInfo")[0]

    def allocate(self, num_bytes: int) -> int:
        return self._ask("cudaMalloc", num_bytes)[0]

    def free(self, pointer: int) -> None:
        self._ask("cudaFree", pointer)

    def export(self, pointer: int) -> bytes:
        (handle,) = self._ask("cudaIpcGetMemHandle", pointer)
        return ctypes.string_at(handle.getPtr(), self._runtime.CUDA_IPC_HANDLE_SIZE)

    def open(self, exported: bytes) -> int:
        if len(exported) != self._runtime.CUDA_IPC_HANDLE_SIZE:
            raise ValueError(f"a CUDA IPC handle of {len(exported)} bytes is none")
        handle = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), exported, len(exported))
        return self._ask("cudaIpcOpenMemHandle", handle, self._runtime.cudaIpcMemLazyEnablePeerAccess)[0]

    def close(self, pointer: int) -> None:
        self._ask("cudaIpcCloseMemHandle", pointer)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy between any two memories of this process, after work that was launched here before."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        stream = 0 if self._stream is None else self._stream.cuda_stream
        self._ask("cudaMemcpyAsync", target, source, num_bytes, kind, stream)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the block on a stream of its own, after the launched steps. Its work is done when the block ends."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                done = torch.cuda.Event(blocking=True)
                done.record()
                done.synchronize()

    def _ask(self, function: str, *arguments: Any) -> Sequence[Any]:
        calls = ("cudaSetDevice", self._device.index or 0), (function, *arguments)
        for name, *values in calls:
            error, *answer = getattr(self._runtime, name)(*values)
            if error == self._runtime.cudaError_t.cudaSuccess:
                continue
            self._runtime.cudaGetLastError()  # clears it, or the next call would report it
            no_room = error == self._runtime.cudaError_t.cudaErrorMemoryAllocation
            raise (MemoryError if no_room else TransferError)(f"{name}: {error.name}")
        return answer


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that other processes can open."""

    pointer: int
    num_bytes: int
    handle: bytes


class DeviceKV(KVTransfer):
    """KV blocks by CUDA IPC."""

    way = "cuda_ipc"

    def __init__(
        self, layers: KVLayers, rank: int, device: DeviceMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(layers, rank)
        self._device, self._clock = device, clock
        self._lent: dict[str, tuple[Buffer, float]] = {}
        """Buffers by segment, with the time after which they may be dropped. The oldest is first."""
        self._spare: Buffer | None = None

    def _lend(self, name: str, block_ids: Sequence[int]) -> bytes:
        while self._lent and (oldest := next(iter(self._lent.items())))[1][1] <= self._clock():
            self.drop(oldest[0])
        buffer = self._take(STAMP_BYTES + sum(self._layers.sizes(len(block_ids))))
        self._lent[name] = buffer, self._clock() + LENT_S
        with self._device.aside():
            stamp = torch.frombuffer(bytearray(stamp_of(name)), dtype=torch.uint8).to(self._layers.device)
            self._device.copy(buffer.pointer, stamp.data_ptr(), STAMP_BYTES)
            place = buffer.pointer + STAMP_BYTES
            for part in self._layers.gather(block_ids):
                self._device.copy(place, part.data_ptr(), part.nbytes)
                place += part.nbytes
        return buffer.handle

    def _read(self, segment: KVSegment, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        pointer = self._device.open(segment.address)
        try:
            stamp = torch.empty(STAMP_BYTES, dtype=torch.uint8, device=self._layers.device)
            with self._device.aside():
                self._layers.scatter(self._parts(pointer + STAMP_BYTES, segment.num_blocks), slots, block_ids)
                self._device.copy(stamp.data_ptr(), pointer, STAMP_BYTES)
        finally:
            self._device.close(pointer)
        check_stamp(stamp, segment)

    def drop(self, name: str) -> None:
        if (lent := self._lent.pop(name, None)) is None:
            return
        buffers = [buffer for buffer in (lent[0], self._spare) if buffer is not None]
        kept = [buffer for buffer in buffers if buffer.num_bytes <= SPARE_BYTES]
        self._spare = max(kept, key=lambda buffer: buffer.num_bytes, default=None)
        for buffer in buffers:
            if buffer is not self._spare:
                self._free(buffer)

    def _parts(self, place: int, num_blocks: int) -> Iterator[torch.Tensor]:
        """Copies of each layer's part on this device."""
        for part in self._layers.empty_parts(num_blocks):
            self._device.copy(part.data_ptr(), place, part.nbytes)
            place += part.nbytes
            yield part

    def _take(self, num_bytes: int) -> Buffer:
        spare, self._spare = self._spare, None
        if spare is not None and spare.num_bytes >= num_bytes:
            return spare
        if spare is not None:
            self._free(spare)
        num_bytes += -num_bytes % GRANULE_BYTES
        check_room(num_bytes, self._device.num_free_bytes())
        pointer = self._device.allocate(num_bytes)
        buffer = Buffer(pointer, num_bytes, b"")
        try:
            return Buffer(pointer, num_bytes, self._device.export(pointer))
        except KV_FAILURES:
            self._free(buffer)
            raise

    def _free(self, buffer: Buffer) -> None:
        try:
            self._device.free(buffer.pointer)
        except KV_FAILURES as error:
            logger.warning("%d MiB of device memory are lost: %s", buffer.num_bytes >> 20, error)
