"""KV blocks that go along with a group: who computes which tokens, and what is done when blocks cannot come."""

import os
from pathlib import Path

import pytest

from tests.kernel.core.scheduler_runs import add_group
from tests.parts.moving.moving_runs import Ranks, assert_each_once, ids_and_lengths
from vllm_rollout.parts.moving.calls import RANK_STATE
from vllm_rollout.parts.moving.core.kv_moving import refusal
from vllm_rollout.parts.moving.core.moving import GroupMoves
from vllm_rollout.parts.moving.options import MovingOptions
from vllm_rollout.parts.moving.wire import KVSegment, Parcel
from vllm_rollout.parts.moving.worker import shared_kv

BLOCK_SIZE = 16
PROMPT = [5] * 100
NUM_TOKENS = 60
"""Tokens of each candidate when it moves."""


def path_of(segment: KVSegment) -> Path:
    return Path(segment.address.decode())


def moved(ranks: Ranks, num_candidates: int = 3) -> int:
    """Tokens that the target computes until the end of a group of candidates that have all run."""
    lengths = [NUM_TOKENS + 40] * num_candidates
    ids = add_group(ranks.runs[0], "g", lengths, group_size=num_candidates, prompt_token_ids=PROMPT)
    for id in ids:
        ranks.until(id, NUM_TOKENS)
    before = [ranks.runs[0].requests[id].num_tokens for id in ids]
    assert ranks.move("g") == "released"
    ranks.run()
    assert_each_once(ranks, ids_and_lengths(ids, lengths))
    num_after = sum(len(PROMPT) + length for length in lengths) - sum(before)
    return ranks.cores[1].kv.num_computed - num_after


def test_only_the_last_part_of_a_block_is_computed_again(new_ranks):
    ranks = new_ranks()
    num_computed = moved(ranks, 1)
    moves = [run.scheduler.part(GroupMoves).kv for run in ranks.runs]
    num_blocks = moves[1].arrived.num_blocks
    assert num_blocks >= (len(PROMPT) + NUM_TOKENS - 1) // BLOCK_SIZE
    assert 0 <= num_computed < BLOCK_SIZE + 2
    assert [each.arrived.num_fallbacks for each in moves] == [0, 0]
    assert [each.arrived.num_groups for each in moves] == [0, 1]
    assert all(run.scheduler.part(GroupMoves).seconds > 0 for run in ranks.runs)


def test_what_came_says_what_the_next_one_costs(new_ranks):
    ranks = new_ranks()
    assumed, other = (run.scheduler.part(GroupMoves).kv.arrived.transfer for run in ranks.runs)
    assert assumed == other
    assert (assumed.block_size, assumed.s_per_token > 0) == (BLOCK_SIZE, True)
    moved(ranks, 1)
    states = [run.scheduler.part(GroupMoves).state() for run in ranks.runs]
    source, target = (its.kv for its in states)
    assert (source.transfer, source.num_groups) == (assumed, 0)
    assert target.transfer.s_per_token not in (0, assumed.s_per_token)
    assert RANK_STATE.decode_result(RANK_STATE.encode_result(states[1])) == states[1]


def test_a_transfer_that_fails_has_no_price_until_one_succeeds(new_ranks):
    ranks = new_ranks()
    first, second = (
        add_group(ranks.runs[0], name, [200], group_size=1, prompt_token_ids=[token] * 100)[0]
        for name, token in (("g", 5), ("h", 6))
    )
    ranks.until(first, NUM_TOKENS)
    ranks.until(second, NUM_TOKENS)
    released = ranks.release("g", 0)
    (segment,) = Parcel.decode(released.parcel).kv.segments
    ranks.cores[0].kv.rollout_drop_kv([segment])
    ranks.cores[1].adopt("g", released.parcel)
    ranks.cores[0].confirm("g")
    target = ranks.runs[1].scheduler.part(GroupMoves).kv
    assert (target.arrived.transfer, target.arrived.num_fallbacks) == (None, 1)
    assert ranks.move("h", epoch=2) == "released"
    assert target.arrived.transfer is not None
    ranks.run()
    assert_each_once(ranks, {first: 200, second: 200})


def test_without_its_blocks_a_group_is_computed_again(new_ranks):
    ranks = new_ranks(options=MovingOptions(moves_kv=False))
    assert moved(ranks, 1) >= len(PROMPT) + NUM_TOKENS - 1
    arrived = ranks.runs[1].scheduler.part(GroupMoves).kv.arrived
    assert (arrived.num_blocks, arrived.num_groups, arrived.transfer) == (0, 0, None)


def test_what_siblings_share_travels_once(new_ranks):
    ranks = new_ranks()
    ids = add_group(ranks.runs[0], "g", [100] * 4, group_size=4, prompt_token_ids=PROMPT)
    for id in ids:
        ranks.until(id, NUM_TOKENS)
    kv = Parcel.decode(ranks.release("g", 0).parcel).kv
    num_shared = len(PROMPT) // BLOCK_SIZE
    own = [slot for slots in kv.slots for slot in slots[num_shared:]]
    assert all(slots[:num_shared] == list(range(num_shared)) for slots in kv.slots)
    assert sorted(own) == list(range(num_shared, kv.segments[0].num_blocks))
    assert len(own) >= 4 * ((len(PROMPT) + NUM_TOKENS - 1) // BLOCK_SIZE - num_shared)
    ranks.cores[0].keep("g")
    ranks.run()


def test_siblings_compute_no_more_than_the_last_part_of_a_block_each(new_ranks):
    ranks = new_ranks()
    assert moved(ranks, 4) < 4 * (BLOCK_SIZE + 2)


def test_blocks_that_the_target_has_do_not_travel_again(new_ranks):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [200], group_size=1, prompt_token_ids=PROMPT)
    ranks.until(id, NUM_TOKENS)
    ranks.move("g")
    ranks.until(id, NUM_TOKENS + 40)
    first = ranks.runs[1].scheduler.part(GroupMoves).kv.arrived.num_blocks
    ranks.move("g", source=1, epoch=2)
    assert 1 <= ranks.runs[0].scheduler.part(GroupMoves).kv.arrived.num_blocks <= 4
    ranks.until(id, NUM_TOKENS + 80)
    ranks.move("g", epoch=3)
    ranks.run()
    assert first < ranks.runs[1].scheduler.part(GroupMoves).kv.arrived.num_blocks <= first + 6
    assert_each_once(ranks, {id: 200})


def test_seeds_of_the_hashes_may_differ(new_ranks, monkeypatch):
    """Each engine core has its own with the xxhash algorithms."""
    from vllm.v1.core import kv_cache_utils

    ranks = new_ranks()
    preprocess = ranks.cores[1].preprocess_add_request

    def with_another_seed(request):
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache_utils, "NONE_HASH", b"another seed")
            return preprocess(request)

    ranks.cores[1].preprocess_add_request = with_another_seed
    assert moved(ranks, 2) < 2 * (BLOCK_SIZE + 2)


def test_a_segment_that_is_gone_is_computed_again(new_ranks):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [200], group_size=1, prompt_token_ids=PROMPT)
    ranks.until(id, NUM_TOKENS)
    released = ranks.release("g", 0)
    (segment,) = Parcel.decode(released.parcel).kv.segments
    ranks.cores[0].kv.rollout_drop_kv([segment])
    assert not path_of(segment).exists()
    ranks.cores[1].adopt("g", released.parcel)
    ranks.cores[0].confirm("g")
    ranks.run()
    assert ranks.runs[1].scheduler.part(GroupMoves).kv.arrived.num_fallbacks == 1
    assert_each_once(ranks, {id: 200})


def test_another_file_at_its_place_is_not_read(new_ranks, tmp_path):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [200], group_size=1, prompt_token_ids=PROMPT)
    ranks.until(id, NUM_TOKENS)
    released = ranks.release("g", 0)
    (segment,) = Parcel.decode(released.parcel).kv.segments
    number = int(path_of(segment).name)
    other = os.memfd_create("other")
    os.dup2(other, number)
    os.close(other)
    ranks.cores[1].adopt("g", released.parcel)
    ranks.cores[0].confirm("g")
    ranks.run()
    assert ranks.runs[1].scheduler.part(GroupMoves).kv.arrived.num_fallbacks == 1
    assert_each_once(ranks, {id: 200})


@pytest.mark.parametrize("resets", [(1,), (0, 1)])
def test_blocks_of_before_a_reset_do_not_come_after_it(new_ranks, resets):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [200], group_size=1, prompt_token_ids=PROMPT)
    ranks.until(id, NUM_TOKENS)
    released = ranks.release("g", 0)
    for rank in resets:
        assert ranks.runs[rank].scheduler.reset_prefix_cache()
    ranks.cores[1].adopt("g", released.parcel)
    ranks.cores[0].confirm("g")
    ranks.run()
    assert ranks.runs[1].scheduler.part(GroupMoves).kv.arrived.num_blocks == 0
    assert_each_once(ranks, {id: 200})


def test_no_room_in_memory(new_ranks, monkeypatch):
    monkeypatch.setattr(shared_kv, "free_bytes", lambda: 1000)
    ranks = new_ranks()
    assert moved(ranks, 1) >= len(PROMPT) + NUM_TOKENS - 1
    assert ranks.runs[0].scheduler.part(GroupMoves).kv.arrived.num_fallbacks == 1


def test_no_room_in_the_cache(new_ranks):
    ranks = new_ranks(num_blocks=50)
    add_group(ranks.runs[1], "other", [700], group_size=1)
    while ranks.runs[1].num_free_blocks > 8:
        ranks.runs[1].step()
    assert moved(ranks, 2) > 2 * NUM_TOKENS
    assert ranks.runs[1].scheduler.part(GroupMoves).kv.arrived.num_fallbacks == 1


def test_a_group_that_comes_back_leaves_nothing_shared(new_ranks):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [200], group_size=1, prompt_token_ids=PROMPT)
    ranks.until(id, NUM_TOKENS)
    released = ranks.release("g", 0)
    (segment,) = Parcel.decode(released.parcel).kv.segments
    assert path_of(segment).exists()
    ranks.cores[0].keep("g")
    assert not path_of(segment).exists()
    computed = ranks.cores[0].kv.num_computed
    ranks.run()
    assert ranks.cores[0].kv.num_computed - computed < 200 - NUM_TOKENS + BLOCK_SIZE + 2
    assert_each_once(ranks, {id: 200})


def test_workers_that_fail_leave_no_block_behind(new_ranks):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [200], group_size=1, prompt_token_ids=PROMPT)
    ranks.until(id, NUM_TOKENS)
    released = ranks.release("g", 0)
    fetch, ranks.cores[1].kv.rollout_fetch_kv = ranks.cores[1].kv.rollout_fetch_kv, None
    with pytest.raises(TypeError):
        ranks.cores[1].adopt("g", released.parcel)
    assert ranks.runs[1].num_free_blocks == ranks.runs[1].num_blocks_at_rest
    ranks.cores[1].kv.rollout_fetch_kv = fetch
    ranks.cores[0].keep("g")
    ranks.run()
    assert_each_once(ranks, {id: 200})


def test_where_blocks_do_not_move(new_run):
    assert refusal(new_run().scheduler) is None
    assert refusal(new_run(options=MovingOptions(moves_kv=False)).scheduler) == "--no-enable-rollout-move-kv was given"
    scheduler = new_run().scheduler
    scheduler.kv_cache_manager.enable_caching = False
    assert refusal(scheduler) == "prefix caching is off"
    scheduler = new_run().scheduler
    scheduler.aux_output_connector = object()
    assert refusal(scheduler) == "the experts of their tokens, which vLLM returns, stay in the worker"
    scheduler = new_run().scheduler
    scheduler.kv_cache_config.kv_cache_groups *= 2
    assert refusal(scheduler) == "not all layers keep every token"
