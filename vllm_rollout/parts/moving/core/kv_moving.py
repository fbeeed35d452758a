"""KV blocks that move with a group, so that the target does not compute them again.

The blocks of a stopped group are free, and stay in the prefix cache until they are reused. The source's workers copy
those that are left. The target's workers copy them into free blocks, which the target's prefix cache then has under the
hashes of its own requests. The candidates come as preempted requests, and find the blocks.

Invariant: this changes when a group continues, not whether it does, nor its tokens. If anything goes wrong, the target
computes the blocks. Blocks that come replace free ones and are free again, as if the target had computed them earlier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.core.versions import returns_experts
from vllm_rollout.parts.moving.core.versions import holds_what_is_found, without_zeroing, zeroes_what_comes
from vllm_rollout.parts.moving.options import MovingOptions
from vllm_rollout.parts.moving.rules.load import ArrivedKV, TransferCost
from vllm_rollout.parts.moving.wire import KVBlocks, KVSegment

WITHOUT_BLOCKS = ("custom_class", "ngram", "suffix")
"""Methods of speculative decoding that need no draft model."""

logger = init_logger("vllm.vllm_rollout")


class KVMoves:
    """KV blocks that leave and enter one engine core."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._refusal = refusal(scheduler)
        self._shared: dict[str, list[KVSegment]] = {}
        """Segments that the target of a move may still read, by group that has left."""
        self.num_groups_in = 0
        """Groups that came with blocks."""
        self.num_blocks_in = 0
        self.num_fallbacks = 0
        """Groups that the target computed although blocks existed: they could not be sent or received."""
        self.num_resets = 0
        """Resets of the prefix cache. Blocks that were shared before the last one are void."""
        self._transfer = None if self._refusal is not None else _assumed_cost(scheduler)
        self._has_failed = False
        """True if the last group that came with blocks did not get them."""

    @property
    def arrived(self) -> ArrivedKV:
        transfer = None if self._has_failed else self._transfer
        return ArrivedKV(self.num_groups_in, self.num_blocks_in, self.num_fallbacks, transfer)

    def share(self, core: EngineCore, group_id: str, requests: Sequence[Request]) -> KVBlocks | None:
        """Copy the remaining blocks of stopped requests to memory that another engine can read. None if
        there are none.
        """
        if self._refusal is not None:
            logger.info_once("Groups that move leave their KV blocks behind, since %s", self._refusal)
            return None
        slot_of: dict[int, int] = {}
        """Position of each block in the copy, by block id. Siblings share the blocks of their prompt."""
        slots = []
        for request in requests:
            found, _, _ = self._scheduler.kv_cache_manager.get_computed_blocks(request)
            slots.append([slot_of.setdefault(block.block_id, len(slot_of)) for block in found.blocks[0]])
        if not slot_of:
            return None
        answers: list[Any] = core.collective_rpc("rollout_share_kv", args=(list(slot_of),))
        self._shared[group_id] = [answer for answer in answers if isinstance(answer, KVSegment)]
        if reasons := [answer for answer in answers if isinstance(answer, str)]:
            self._fall_back(group_id, reasons[0])
            self.drop(core, group_id)
            return None
        return KVBlocks(self._shared[group_id], slots, self.num_resets)

    def drop(self, core: EngineCore, group_id: str) -> None:
        """Drop the segments of a group that has arrived, or stays."""
        if segments := self._shared.pop(group_id, None):
            try:
                core.collective_rpc("rollout_drop_kv", args=(segments,))
            except Exception:  # the group itself has moved, or stays
                logger.exception("the KV segments of group %s are left", group_id)

    def fetch(self, core: EngineCore, group_id: str, kv: KVBlocks, requests: Sequence[Request]) -> None:
        """Put the blocks of requests that are added next into the prefix cache."""
        if kv.num_resets != self.num_resets:
            self._fall_back(group_id, "a prefix cache was reset")
            return
        started = time.perf_counter()
        cache = self._scheduler.kv_cache_manager
        held: list[Request] = []
        """Requests that hold blocks, found or allocated, until these are filled."""
        slot_of: dict[int, int] = {}
        """Position in the segments, by id of the block to fill."""
        for request, slots in zip(requests, kv.slots, strict=True):
            num_found = self._hold(request, len(slots))
            if num_found is None:
                self._fall_back(group_id, f"there are no free blocks for {len(requests) - len(held)} candidates")
                break
            held.append(request)
            (block_ids,) = cache.get_block_ids(request.request_id)
            slot_of.update(zip(block_ids[num_found:], slots[num_found:], strict=True))
        is_filled = False
        try:
            is_filled = self._fill(core, group_id, kv.segments, slot_of)
        finally:
            self._has_failed = not is_filled
            if not is_filled:
                cache.evict_blocks(set(slot_of))
            for request in held:
                cache.free(request)
        if is_filled and slot_of:
            seconds = time.perf_counter() - started
            self._transfer = self._transfer.after(len(slot_of) * self._scheduler.block_size, seconds)
            self.num_groups_in += 1
            self.num_blocks_in += len(slot_of)
        logger.info("group %s came with %d KV blocks", group_id, len(slot_of) if is_filled else 0)

    def _hold(self, request: Request, num_blocks: int) -> int | None:
        """Give a request its first blocks: those in the prefix cache, and free ones for the rest.

        The blocks are then in the prefix cache. Returns how many were found there. None if there are too few free
        blocks.
        """
        cache = self._scheduler.kv_cache_manager
        found, num_found_tokens, _ = cache.get_computed_blocks(request)
        num_found = len(found.blocks[0])
        num_tokens = max(0, num_blocks - num_found) * self._scheduler.block_size
        if num_tokens == 0 and not (num_found_tokens and holds_what_is_found()):
            return num_found
        taken = cache.allocate_slots(
            request,
            0,
            num_new_computed_tokens=num_found_tokens,
            new_computed_blocks=found,
            num_external_computed_tokens=num_tokens,
            **without_zeroing(),
        )
        return None if taken is None else num_found

    def _fill(self, core: EngineCore, group_id: str, segments: list[KVSegment], slot_of: dict[int, int]) -> bool:
        if not slot_of:
            return True
        answers: list[Any] = core.collective_rpc(
            "rollout_fetch_kv", args=(segments, list(slot_of.values()), list(slot_of))
        )
        if reasons := [answer for answer in answers if answer is not None]:
            self._fall_back(group_id, reasons[0])
            return False
        return True

    def _fall_back(self, group_id: str, reason: str) -> None:
        self.num_fallbacks += 1
        logger.warning("group %s moves without its KV blocks, or some of them: %s", group_id, reason)


def _assumed_cost(scheduler: Scheduler) -> TransferCost:
    (group,) = scheduler.kv_cache_config.kv_cache_groups
    num_bytes = len(group.layer_names) * group.kv_cache_spec.page_size_bytes
    return TransferCost.assumed(num_bytes / scheduler.block_size, scheduler.block_size)


def refusal(scheduler: Scheduler) -> str | None:
    """Reason if no KV blocks move to and from this engine core, else None."""
    config, groups = scheduler.vllm_config, scheduler.kv_cache_config.kv_cache_groups
    if not MovingOptions.of(config).moves_kv:
        return "--no-enable-rollout-move-kv was given"
    if not ServeOptions.of(config).has_model:
        return "an emulated device keeps none"
    if not scheduler.kv_cache_manager.enable_caching:
        return "prefix caching is off"
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in WITHOUT_BLOCKS:
        return "a draft model has blocks of its own"
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return "not all layers keep every token"
    if returns_experts(scheduler):
        return "the experts of their tokens, which vLLM returns, stay in the worker"
    if zeroes_what_comes(scheduler):
        return "this vLLM would clear them where they come"
    return None
