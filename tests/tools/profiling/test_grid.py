"""Points that a profile measures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.shaping.profile_file import EngineFacts
from vllm_rollout.profiling.grid import (
    PROFILE_QUICK_BATCH_SIZE,
    GridPoint,
    Wanted,
    default_batch_sizes,
    make_plan,
)

ROOMY = EngineFacts(
    tensor_parallel_size=1, max_num_seqs=256, max_model_len=8192, max_num_batched_tokens=8192, block_size=32,
    kv_capacity_tokens=10**8, kv_bytes_per_token=1.0,
)  # fmt: skip


def limits(**changes):
    return ROOMY.model_copy(update=changes)


def test_batch_sizes_are_two_per_doubling_and_the_largest():
    assert default_batch_sizes(64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert default_batch_sizes(100)[-3:] == (64, 96, 100)
    assert default_batch_sizes(1) == (1,)


@given(st.integers(1, 2000))
def test_batch_sizes_ascend_to_the_largest(largest):
    sizes = default_batch_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, largest)


def test_contexts_are_a_short_one_the_longest_and_one_half_way():
    plan = make_plan(Wanted(), ROOMY)
    longest = 8192 - sum(Wanted().steps)
    assert sorted({point.context_tokens for point in plan.points}) == [128, longest // 2, longest]
    assert plan.left_out == ()
    assert len(plan.points) == 3 * len(default_batch_sizes(256))


def test_contexts_ascend_and_the_largest_batch_comes_first():
    plan = make_plan(Wanted(batch_sizes=(1, 2, 8), contexts=(64, 512)), ROOMY)
    assert plan.points == tuple(GridPoint(size, context) for context in (64, 512) for size in (8, 2, 1))


def test_a_quick_profile_is_small():
    plan = make_plan(Wanted(quick=True), ROOMY)
    assert max(point.batch_size for point in plan.points) == PROFILE_QUICK_BATCH_SIZE
    assert len({point.context_tokens for point in plan.points}) == 2
    assert sum(Wanted(quick=True).steps) < sum(Wanted().steps)
    assert max(plan.chunks) <= 512


@given(st.integers(600, 100_000), st.integers(1, 64), st.integers(200, 4000))
def test_every_point_of_a_plan_fits_and_every_other_is_named(capacity, max_num_seqs, max_model_len):
    here = limits(kv_capacity_tokens=capacity, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    plan = make_plan(Wanted(), here)
    room = sum(Wanted().steps)
    for point in (*plan.points, *plan.left_out):
        blocks = point.batch_size * -(-(point.context_tokens + room) // 32)
        assert (blocks * 32 <= capacity) == (point in plan.points)
        assert point.context_tokens + room <= max_model_len
    assert len(plan.points) + len(plan.left_out) == len({*plan.points, *plan.left_out})


def test_a_short_model_gets_the_contexts_it_has():
    plan = make_plan(Wanted(), limits(max_model_len=128))
    assert max(point.context_tokens for point in plan.points) == 128 - sum(Wanted().steps)


@pytest.mark.parametrize(
    ("wanted", "changes", "complaint"),
    [
        (Wanted(batch_sizes=(1, 300)), {}, r"--batch-sizes: 300 must be in \[1, 256\].*--max-num-seqs 300"),
        (Wanted(contexts=(9000,)), {}, r"--contexts: 9000 must be in \[1, 8152\]: max_model_len \(8192\)"),
        (Wanted(), {"kv_capacity_tokens": 64}, "no point fits into the KV cache of 64 tokens"),
    ],
)
def test_what_the_engine_cannot_do_is_said(wanted, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_plan(wanted, limits(**changes))


def test_prefill_chunks_fit_into_a_step():
    assert max(make_plan(Wanted(), limits(max_num_batched_tokens=512)).chunks) == 256
    assert max(make_plan(Wanted(), limits(max_model_len=300)).chunks) == 256
