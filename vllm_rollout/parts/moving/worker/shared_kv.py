"""KV blocks between worker processes on the same host, through memory without a file name.

    source  `share` copies blocks into a memory file and answers where it is -> target `fetch` copies them out of it

Invariant: the memory belongs to the source. It is freed when it is dropped or the process ends, however it ends. A late
reader finds no file, or another one, and raises.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from vllm_rollout.parts.moving.wire import KVSegment
from vllm_rollout.parts.moving.worker.kv_layers import KVLayers, KVTransfer, check_room, free_bytes


class SharedKV(KVTransfer):
    """KV blocks by host memory."""

    way = "host_memory"

    def __init__(self, layers: KVLayers, rank: int) -> None:
        super().__init__(layers, rank)
        self._files: dict[str, int] = {}
        """Open memory files that others may read, by name."""

    def _lend(self, name: str, block_ids: Sequence[int]) -> bytes:
        num_bytes = sum(self._layers.sizes(len(block_ids)))
        check_room(num_bytes, free_bytes())
        file = self._files[name] = os.memfd_create(name)
        os.posix_fallocate(file, 0, num_bytes)
        self._layers.gather_into(self._parts(file, len(block_ids)), block_ids)
        return f"/proc/{os.getpid()}/fd/{file}".encode()

    def _read(self, segment: KVSegment, slots: Sequence[int], block_ids: Sequence[int]) -> None:
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
        """Parts of each layer in a memory file, [num_blocks, ...]."""
        memory = mmap.mmap(file, sum(self._layers.sizes(num_blocks)))
        return self._layers.parts(torch.frombuffer(memory, dtype=torch.uint8), num_blocks)
