"""KV blocks on their way from one worker process to another on the same host, through memory without a file name.

    source  `share` copies blocks into a memory file and answers where it is -> target `fetch` copies them out of it

Invariant: the memory belongs to the source and is gone when it is dropped or the process ends, however it ends. Who
comes too late finds nothing, or something else, and says so.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import psutil
import torch

from vllm_rollout.adapter.parcel import KVSegment

MEMORY_SHARE = 0.5
"""Of the free memory of this host, or of its container: larger segments are not made."""
CGROUP = Path("/sys/fs/cgroup")
WORD = torch.int64
"""What is copied as a unit, where the layout allows it: single bytes take ten times as long."""


class SharedKV:
    """The KV cache of one worker, layer by layer, as blocks that can be copied.

    Args:
        layers: each [num_blocks, ...], in the same order in every engine.
        rank: of the worker in its engine.
    """

    def __init__(self, layers: Sequence[torch.Tensor], rank: int) -> None:
        self.layout = [f"{str(layer.dtype).removeprefix('torch.')}{list(layer.shape[1:])}" for layer in layers]
        self._layers = [_as_words(layer) for layer in layers]
        self._rank = rank
        self._files: dict[str, int] = {}
        """Open memory files that others may read, by name."""

    def share(self, block_ids: Sequence[int]) -> KVSegment:
        """Copy blocks into shared memory. Raises: OSError, MemoryError when there is no room."""
        num_bytes = self._num_bytes(len(block_ids))
        if num_bytes > (room := MEMORY_SHARE * free_bytes()):
            raise MemoryError(f"{num_bytes >> 20} MiB of KV blocks are more than {int(room) >> 20} MiB")
        name = f"rollout-kv-{uuid4().hex}"
        file = os.memfd_create(name)
        self._files[name] = file
        try:
            os.posix_fallocate(file, 0, num_bytes)
        except OSError:
            self.drop(name)
            raise
        ids = torch.tensor(block_ids, device=self._layers[0].device)
        for layer, part in zip(self._layers, self._parts(file, len(block_ids)), strict=True):
            if layer.is_cpu:
                torch.index_select(layer, 0, ids, out=part)
            else:
                part.copy_(layer[ids])
        return KVSegment(self._rank, name, f"/proc/{os.getpid()}/fd/{file}", self.layout, len(block_ids))

    def fetch(self, segments: Sequence[KVSegment], slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy blocks out of the segment of this rank: what is in `slots` of it goes to `block_ids` here.

        Raises: OSError when it is not there, ValueError when it does not fit.
        """
        segment = next((segment for segment in segments if segment.rank == self._rank), None)
        if segment is None:
            raise ValueError(f"the KV blocks are of {len(segments)} workers, none of them of rank {self._rank}")
        if segment.layout != self.layout:
            raise ValueError(f"KV blocks of {segment.layout} do not fit into {self.layout}")
        file = os.open(segment.path, os.O_RDWR)
        try:
            if segment.name not in os.readlink(f"/proc/self/fd/{file}"):
                raise FileNotFoundError(f"{segment.path} is another file now")
            parts = self._parts(file, segment.num_blocks)
        finally:
            os.close(file)
        targets = torch.tensor(block_ids, device=self._layers[0].device)
        chosen = torch.tensor(slots)
        for layer, part in zip(self._layers, parts, strict=True):
            layer.index_copy_(0, targets, part[chosen].to(layer.device))

    def drop(self, name: str) -> None:
        """Nobody reads this segment any more, if it is one."""
        if (file := self._files.pop(name, None)) is not None:
            os.close(file)

    def _num_bytes(self, num_blocks: int) -> int:
        return sum(num_blocks * layer[0].numel() * layer.itemsize for layer in self._layers)

    def _parts(self, file: int, num_blocks: int) -> list[torch.Tensor]:
        """What a memory file has of each layer, [num_blocks, ...]."""
        memory = torch.frombuffer(mmap.mmap(file, self._num_bytes(num_blocks)), dtype=torch.uint8)
        sizes = [num_blocks * layer[0].numel() * layer.itemsize for layer in self._layers]
        return [
            part.view(layer.dtype).view(num_blocks, *layer.shape[1:])
            for layer, part in zip(self._layers, memory.split(sizes), strict=True)
        ]


def _as_words(layer: torch.Tensor) -> torch.Tensor:
    """The same memory as words or, where rows are not whole words, as bytes."""
    steps = (*layer.stride()[:-1], layer.shape[-1], layer.storage_offset())
    fits = all(step * layer.itemsize % WORD.itemsize == 0 for step in steps)
    return layer.view(WORD if fits else torch.uint8)


def free_bytes() -> int:
    """Memory that is free, on this host and in its container."""
    free = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int((CGROUP / "memory.current").read_text()))
    return free
