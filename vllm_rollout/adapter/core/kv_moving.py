"""KV blocks that go along with a group, so that what its source has computed is not computed again.

The blocks of a group that has stopped are free, and in the prefix cache until somebody needs them. The source's workers
copy those that are left; those of the target copy them into free blocks, which its prefix cache then has under the
hashes of its own requests. The candidates come as preempted requests, and hit it.

Invariant: this changes when a group goes on, not whether, nor what it says; whatever goes wrong, the target computes.
Blocks that come take the place of free ones and are free again, as if the target had computed them earlier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from vllm_rollout.adapter.core.versions import holds_what_is_found, without_zeroing, zeroes_what_comes
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.adapter.parcel import KVBlocks, KVSegment
from vllm_rollout.group.ranks.load import ArrivedKV, TransferCost

WITHOUT_BLOCKS = ("custom_class", "ngram", "suffix")
"""Methods of speculative decoding whose drafts no model makes."""

logger = init_logger("vllm.vllm_rollout")


class KVMoves:
    """The KV blocks that leave one engine core and come to it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._refusal = refusal(scheduler)
        self._shared: dict[str, list[KVSegment]] = {}
        """By group that has left: what its target may still read."""
        self.num_groups_in = 0
        """That came with blocks."""
        self.num_blocks_in = 0
        self.num_fallbacks = 0
        """Groups that the target computed, though there were blocks: they could not be sent or received."""
        self.num_resets = 0
        """How often the prefix cache was cleared: blocks that were shared before the last time are void."""
        self._transfer = None if self._refusal is not None else _assumed_cost(scheduler)
        self._has_failed = False
        """The last group that came with blocks did not get them."""

    @property
    def arrived(self) -> ArrivedKV:
        transfer = None if self._has_failed else self._transfer
        return ArrivedKV(self.num_groups_in, self.num_blocks_in, self.num_fallbacks, transfer)

    def share(self, core: EngineCore, group_id: str, requests: Sequence[Request]) -> KVBlocks | None:
        """Copy what is left of the blocks of stopped requests to where another engine finds it."""
        if self._refusal is not None:
            logger.info_once("Groups that move leave their KV blocks behind, since %s", self._refusal)
            return None
        slot_of: dict[int, int] = {}
        """By block, in the order of copying; siblings share those of their prompt."""
        slots = []
        for request in requests:
            found, _, _ = self._scheduler.kv_cache_manager.get_computed_blocks(request)
            slots.append([slot_of.setdefault(block.block_id, len(slot_of)) for block in found.blocks[0]])
        if not slot_of:
            return None
        answers = core.collective_rpc("rollout_share_kv", args=(list(slot_of),))
        self._shared[group_id] = [answer for answer in answers if isinstance(answer, KVSegment)]
        if reasons := [answer for answer in answers if isinstance(answer, str)]:
            self._fall_back(group_id, reasons[0])
            self.drop(core, group_id)
            return None
        return KVBlocks(self._shared[group_id], slots, self.num_resets)

    def drop(self, core: EngineCore, group_id: str) -> None:
        """The group has arrived, or stays."""
        if segments := self._shared.pop(group_id, None):
            try:
                core.collective_rpc("rollout_drop_kv", args=(segments,))
            except Exception:  # the group is where it belongs
                logger.exception("the KV segments of group %s are left", group_id)

    def fetch(self, core: EngineCore, group_id: str, kv: KVBlocks, requests: Sequence[Request]) -> None:
        """Put the blocks of requests that are added next into the prefix cache."""
        if kv.num_resets != self.num_resets:
            self._fall_back(group_id, "a prefix cache was reset")
            return
        started = time.perf_counter()
        cache = self._scheduler.kv_cache_manager
        held: list[Request] = []
        """Requests that have the blocks that were found or taken for them, until these are filled."""
        slot_of: dict[int, int] = {}
        """By block to fill."""
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
        """Give a request its first blocks, as far as the prefix cache has them or free ones can take their place.

        Those are in the prefix cache from now on. Returns how many were found, None when there is no room.
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
        answers = core.collective_rpc("rollout_fetch_kv", args=(segments, list(slot_of.values()), list(slot_of)))
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
    """Why no KV blocks move to and from this engine core; None when they do."""
    options, groups = ServeOptions.of(scheduler.vllm_config), scheduler.kv_cache_config.kv_cache_groups
    if not options.moves_kv:
        return "--no-enable-rollout-move-kv was given"
    if options.emulation is not None:
        return "an emulated device keeps none"
    if not scheduler.kv_cache_manager.enable_caching:
        return "prefix caching is off"
    speculative = scheduler.vllm_config.speculative_config
    if speculative is not None and speculative.method not in WITHOUT_BLOCKS:
        return "a draft model has blocks of its own"
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return "not all layers keep every token"
    if zeroes_what_comes(scheduler):
        return "this vLLM would clear them where they come"
    return None
