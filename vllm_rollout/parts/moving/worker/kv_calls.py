"""Calls of an engine core to its workers when KV blocks leave or come with a group, by `collective_rpc`.

Invariant: if blocks cannot be sent or received, the answer is the reason, and the target computes them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_rollout.kernel.worker.runner import RunnerMixin
from vllm_rollout.parts.moving.options import MovingOptions
from vllm_rollout.parts.moving.wire import KVSegment, KVWay
from vllm_rollout.parts.moving.worker.device_kv import DeviceKV, DeviceMemory
from vllm_rollout.parts.moving.worker.kv_layers import KV_FAILURES, KVLayers, KVTransfer, TransferError
from vllm_rollout.parts.moving.worker.nixl_kv import Agent, NixlKV
from vllm_rollout.parts.moving.worker.shared_kv import SharedKV

logger = init_logger("vllm.vllm_rollout")


class KVCalls:
    """The methods of a worker that move KV blocks."""

    rank: int
    vllm_config: VllmConfig
    model_runner: Any

    @cached_property
    def kv_transfers(self) -> Mapping[KVWay, KVTransfer]:
        transfers = kv_transfers(self.vllm_config, KVLayers(kv_blocks(self.model_runner)), self.rank)
        logger.info_once("KV blocks of groups that move go by: %s", ", else ".join(transfers))
        return transfers

    @torch.inference_mode()
    def rollout_share_kv(self, block_ids: list[int]) -> KVSegment | str:
        """Copy blocks to memory that workers of another engine can read, by the first way that works. Returns the
        reason if none does.
        """
        reason = ""
        try:
            for way, transfer in self.kv_transfers.items():
                try:
                    return transfer.share(block_ids)
                except KV_FAILURES as error:
                    reason = f"{way}: {error}"
                    logger.warning_once("KV blocks cannot go by %s", reason)
        except TransferError as error:
            reason = str(error)
        return reason

    @torch.inference_mode()
    def rollout_fetch_kv(self, segments: list[KVSegment], slots: list[int], block_ids: list[int]) -> str | None:
        """Copy blocks of another engine into unused blocks. Returns the reason if that fails."""
        segment = next((segment for segment in segments if segment.rank == self.rank), None)
        if segment is None:
            return f"the KV blocks are of {len(segments)} workers, none of them of rank {self.rank}"
        try:
            if (transfer := self.kv_transfers.get(segment.way)) is None:
                return f"KV blocks do not come here by {segment.way}"
            transfer.fetch(segment, slots, block_ids)
        except KV_FAILURES as error:
            return f"{segment.way}: {error}"
        return None

    def rollout_drop_kv(self, segments: list[KVSegment]) -> None:
        """Drop segments that are not needed any more."""
        for segment in segments:
            if segment.rank == self.rank:
                self.kv_transfers[segment.way].drop(segment.name)


def kv_blocks(runner: RunnerMixin) -> list[torch.Tensor]:
    """The KV cache of a model runner, one tensor per layer, [num_blocks, kernel blocks in each, ...]."""
    num_blocks = runner.kv_cache_config.num_blocks
    caches = {cache.data_ptr(): cache for cache in runner.kv_caches}.values()  # layers may share one
    return [cache.unflatten(0, (num_blocks, -1)) for cache in caches]


def kv_transfers(vllm_config: VllmConfig, layers: KVLayers, rank: int) -> Mapping[KVWay, KVTransfer]:
    """Ways out of a worker and into it, the best first. Raises: TransferError if there is none."""
    if MovingOptions.of(vllm_config).moves_kv_by_nixl:
        return {"nixl": NixlKV(layers, rank, Agent.load())}
    host_memory = SharedKV(layers, rank)
    if layers.device.type != "cuda" or (runtime := cuda_runtime()) is None:
        return {"host_memory": host_memory}
    return {"cuda_ipc": DeviceKV(layers, rank, DeviceMemory(layers.device, runtime)), "host_memory": host_memory}


def cuda_runtime() -> ModuleType | None:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        logger.warning_once("Without cuda-python KV blocks go over the host's memory: %s", error)
        return None
    return runtime
