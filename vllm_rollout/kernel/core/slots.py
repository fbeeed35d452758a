"""Slots for tokens of requests that only decode.

In each step vLLM's scheduler asks its KV cache manager for slots of each running request. The asynchronous one also
asks whether a block of it is full. A decoding request needs a block, and fills a block, only at every `block_size`-th
token. In between there is nothing to do, and finding that out is half of the cost of scheduling.

Invariant: the answer equals the manager's own, and the manager is asked wherever something is to be done.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request


def answer_for_room(manager: KVCacheManager) -> None:
    """Answer in place of the manager for a token that has its slot already.

    This applies only to a cache with one kind of full attention: other kinds free, copy or cache blocks in between.
    """
    kinds = manager.coordinator.single_type_managers
    if len(kinds) != 1 or type(kinds[0]) is not FullAttentionManager:
        return
    (kind,) = kinds
    size = kind.block_size
    if size != manager.block_pool.hash_block_size:  # the end of a prompt is cached within a block
        return
    ask, cache = manager.allocate_slots, manager.cache_blocks
    blocks, num_cached, is_cached = kind.req_to_blocks, kind.num_cached_block, kind.enable_caching
    nothing = manager.empty_kv_cache_blocks

    def allocate_slots(
        request: Request, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **others: Any
    ) -> KVCacheBlocks | None:
        if num_new_tokens == 1 and not (num_lookahead_tokens or args or others):
            id, end = request.request_id, request.num_computed_tokens + 1
            has_slot = id in blocks and len(blocks[id]) * size >= end
            if has_slot and not (is_cached and num_cached.get(id, 0) < end // size):
                return nothing
        return ask(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **others)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if num_cached.get(request.request_id, 0) < num_computed_tokens // size:
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks  # type: ignore[method-assign]
