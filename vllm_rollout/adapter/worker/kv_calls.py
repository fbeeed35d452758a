"""What an engine core asks of its workers when KV blocks leave or come with a group, by `collective_rpc`.

Invariant: what cannot be sent or received is answered with the reason; the target computes it again.
"""

from __future__ import annotations

from functools import cached_property

import torch

from vllm_rollout.adapter.parcel import KVSegment
from vllm_rollout.adapter.worker.shared_kv import SharedKV


class KVCalls:
    """The methods of a worker that move KV blocks."""

    @cached_property
    def shared_kv(self) -> SharedKV:
        return SharedKV(self.model_runner.kv_blocks, self.rank)  # type: ignore[attr-defined]

    @torch.inference_mode()
    def rollout_share_kv(self, block_ids: list[int]) -> KVSegment | str:
        """Copy blocks to where the workers of another engine find them; or why not."""
        try:
            return self.shared_kv.share(block_ids)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            return str(error)

    @torch.inference_mode()
    def rollout_fetch_kv(self, segments: list[KVSegment], slots: list[int], block_ids: list[int]) -> str | None:
        """Copy blocks of another engine into blocks that nobody uses; or why not."""
        try:
            return self.shared_kv.fetch(segments, slots, block_ids)
        except (OSError, ValueError, torch.OutOfMemoryError) as error:
            return str(error)

    def rollout_drop_kv(self, segments: list[KVSegment]) -> None:
        """Nobody reads these any more."""
        for segment in segments:
            self.shared_kv.drop(segment.name)
