"""The KV cache of one worker as blocks to copy out and in, and the common part of the ways from worker to worker.

Invariant: blocks arrive whole, at a worker of the same rank and layout, or `fetch` raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from uuid import uuid4

import psutil
import torch

from vllm_rollout.parts.moving.wire import KVSegment, KVWay

MEMORY_SHARE = 0.5
"""Largest part of free memory for a segment. Larger segments are refused."""
CGROUP = Path("/sys/fs/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STAMP_BYTES = 16
WORD = torch.int64
"""Unit of copies, if the layout allows it: single bytes take ten times as long."""


class TransferError(Exception):
    """A library failed to transfer KV blocks."""


KV_FAILURES = (OSError, MemoryError, ValueError, TransferError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Exceptions of `share` and `fetch` if blocks cannot move."""


class KVLayers:
    """KV cache layers. Args: layers: each [num_blocks, ...], in the same order in every engine."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.layout = [f"{str(layer.dtype).removeprefix('torch.')}{list(layer.shape[1:])}" for layer in layers]
        unit = WORD if all(map(_is_whole_words, layers)) else torch.uint8
        self.layers = [layer.view(unit) for layer in layers]
        self.device = layers[0].device

    def sizes(self, num_blocks: int) -> list[int]:
        """Bytes of this many blocks, for each layer."""
        return [num_blocks * layer[0].numel() * layer.itemsize for layer in self.layers]

    def parts(self, memory: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
        """Bytes as parts of each layer, [num_blocks, ...]."""
        return [
            part.view(layer.dtype).view(num_blocks, *layer.shape[1:])
            for layer, part in zip(self.layers, memory.split(self.sizes(num_blocks)), strict=True)
        ]

    def empty_parts(self, num_blocks: int) -> Iterator[torch.Tensor]:
        """Uninitialized parts for this many blocks on the device of the cache, layer by layer."""
        return (layer.new_empty((num_blocks, *layer.shape[1:])) for layer in self.layers)

    def gather(self, block_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Copies of blocks, layer by layer, [num_blocks, ...], with axes in logical order. In the cache of most CUDA
        backends tokens lie before heads in memory, and `layer[ids]` would keep that order.
        """
        ids = torch.tensor(block_ids, device=self.device)
        parts = self.empty_parts(len(block_ids))
        return (torch.index_select(layer, 0, ids, out=part) for layer, part in zip(self.layers, parts, strict=True))

    def gather_into(self, parts: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
        """Copy blocks into parts in host memory, like `gather`."""
        ids = torch.tensor(block_ids, device=self.device)
        for layer, part in zip(self.layers, parts, strict=True):
            if layer.is_cpu:
                torch.index_select(layer, 0, ids, out=part)
            else:
                part.copy_(layer[ids])

    def scatter(self, parts: Iterable[torch.Tensor], slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy the blocks at positions `slots` of the parts into the blocks `block_ids`."""
        chosen, targets = torch.tensor(slots), torch.tensor(block_ids, device=self.device)
        for layer, part in zip(self.layers, parts, strict=True):
            chosen = chosen.to(part.device)
            layer.index_copy_(0, targets, part[chosen].to(layer.device))


class KVTransfer:
    """One way from worker to worker. Args: rank: of the worker in its engine."""

    way: KVWay
    leads_to_other_hosts = False

    def __init__(self, layers: KVLayers, rank: int) -> None:
        self._layers, self._rank = layers, rank

    def share(self, block_ids: Sequence[int]) -> KVSegment:
        """Copy blocks to memory that the same rank of another engine can read, until they are dropped.

        Raises: MemoryError if there is too little memory, and other KV_FAILURES.
        """
        name = f"rollout-kv-{uuid4().hex}"
        try:
            address = self._lend(name, block_ids)
        except KV_FAILURES:
            self.drop(name)
            raise
        return KVSegment(self._rank, name, self.way, this_host(), address, self._layers.layout, len(block_ids))

    def fetch(self, segment: KVSegment, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy the blocks at positions `slots` of a segment into the blocks `block_ids` here. Raises: KV_FAILURES."""
        if not self.leads_to_other_hosts and segment.host != this_host():
            raise ValueError(f"{segment.name} is in memory of another host")
        if segment.layout != self._layers.layout:
            raise ValueError(f"KV blocks of {segment.layout} do not fit into {self._layers.layout}")
        self._read(segment, slots, block_ids)

    def drop(self, name: str) -> None:
        """Drop a segment that is not needed any more. Unknown names are ignored."""
        raise NotImplementedError

    def _lend(self, name: str, block_ids: Sequence[int]) -> bytes:
        """Copy blocks into memory lent to the segment of this name. Returns its address for the target."""
        raise NotImplementedError

    def _read(self, segment: KVSegment, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        raise NotImplementedError


@cache
def this_host() -> str:
    """Id of this host: the same in all its containers, and another one after a restart of the host."""
    return BOOT_ID.read_text().strip()


def stamp_of(name: str) -> bytes:
    """Stamp that is stored with the blocks of the segment of this name, STAMP_BYTES bytes."""
    return bytes.fromhex(name[-2 * STAMP_BYTES :])


def check_stamp(stamp: torch.Tensor, segment: KVSegment) -> None:
    """Raises: ValueError if the stamp that was read with the blocks, uint8 [STAMP_BYTES], is not this segment's."""
    if bytes(stamp.tolist()) != stamp_of(segment.name):
        raise ValueError(f"{segment.name} is another segment now")


def free_bytes() -> int:
    """Free host memory in bytes, on this host and in its container."""
    free = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int((CGROUP / "memory.current").read_text()))
    return free


def check_room(num_bytes: int, num_free: int) -> None:
    """Raises: MemoryError if a segment would take too much of the free memory."""
    if num_bytes > (room := MEMORY_SHARE * num_free):
        raise MemoryError(f"{num_bytes >> 20} MiB of KV blocks are more than {int(room) >> 20} MiB")


def _is_whole_words(layer: torch.Tensor) -> bool:
    steps = (*layer.stride()[:-1], layer.shape[-1], layer.storage_offset())
    return all(step * layer.itemsize % WORD.itemsize == 0 for step in steps)
