"""KV blocks on their way from one worker process to another on the same host, through memory without a file name.

    source  `share` copies blocks into a memory file and answers where it is -> target `fetch` copies them out of it

Invariant: the memory belongs to the source and is gone when it is dropped or the process ends, however it ends. Who
comes too late finds nothing, or something else, and says so.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from uuid import uuid4

import torch

from vllm_rollout.adapter.parcel import KVSegment
from vllm_rollout.adapter.worker.kv_layers import (
    KV_FAILURES,
    KVLayers,
    check_host,
    check_room,
    free_bytes,
    this_host,
)


class SharedKV:
    """Host memory. Args: rank: of the worker in its engine."""

    def __init__(self, layers: KVLayers, rank: int) -> None:
        self._layers = layers
        self._rank = rank
        self._files: dict[str, int] = {}
        """Open memory files that others may read, by name."""

    def share(self, block_ids: Sequence[int]) -> KVSegment:
        num_bytes = sum(self._layers.sizes(len(block_ids)))
        check_room(num_bytes, free_bytes())
        name = f"rollout-kv-{uuid4().hex}"
        file = os.memfd_create(name)
        self._files[name] = file
        try:
            os.posix_fallocate(file, 0, num_bytes)
            self._layers.gather_into(self._parts(file, len(block_ids)), block_ids)
        except KV_FAILURES:
            self.drop(name)
            raise
        path = f"/proc/{os.getpid()}/fd/{file}"
        return KVSegment(
            self._rank, name, "host_memory", this_host(), path.encode(), self._layers.layout, len(block_ids)
        )

    def fetch(self, segment: KVSegment, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        check_host(segment)
        self._layers.check(segment)
        path = segment.address.decode()
        file = os.open(path, os.O_RDWR)
        try:
            if segment.name not in os.readlink(f"/proc/self/fd/{file}"):
                raise FileNotFoundError(f"{path} is another file now")
            parts = self._parts(file, segment.num_blocks)
        finally:
            os.close(file)
        self._layers.scatter(parts, slots, block_ids)

    def drop(self, name: str) -> None:
        if (file := self._files.pop(name, None)) is not None:
            os.close(file)

    def _parts(self, file: int, num_blocks: int) -> list[torch.Tensor]:
        """What a memory file has of each layer, [num_blocks, ...]."""
        memory = mmap.mmap(file, sum(self._layers.sizes(num_blocks)))
        return self._layers.parts(torch.frombuffer(memory, dtype=torch.uint8), num_blocks)
