"""Choice of groups to move: hand-computed examples, and invariants of every plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.moving.rank_loads import FLAT, PER_CANDIDATE, costs, moved, rank, ranks_with_groups, straggler
from vllm_rollout.parts.moving.rules.load import GroupLoad, TransferCost, end_s, price_s
from vllm_rollout.parts.moving.rules.migration import (
    Consolidation,
    PlannedMove,
    plan_consolidation,
    plan_drain,
    plan_spread,
)
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve

WITH_PREFILL = CostModel(FLAT.curves, prefill_s_per_token=0.01, step_prefill_s=0.5)


def test_a_move_costs_the_prefill_of_the_prompt_once_and_of_all_that_was_generated_unless_kv_comes_along():
    group = straggler("a", 10, num_candidates=4, prompt=100, generated=800)
    assert price_s(WITH_PREFILL, group) == pytest.approx(9.5)
    # 32 tokens at 0.01 s, 868 at 0.001 s, and a step that prefills
    assert price_s(WITH_PREFILL, group, TransferCost(0.001, 16)) == pytest.approx(0.5 + 0.32 + 0.868)
    assert price_s(WITH_PREFILL, group, TransferCost(0.001, 10_000)) == price_s(WITH_PREFILL, group)


def test_a_rank_ends_with_its_longest_candidate_after_the_price_of_what_arrives():
    group = GroupLoad("a", 3, 0, 0, longest_remaining=9, total_remaining=13)  # 9, 2, 2
    assert end_s(PER_CANDIDATE, rank(0, group)) == pytest.approx(2 * 0.3 + 7 * 0.1)
    late = straggler("b", 20, prompt=50)
    assert end_s(WITH_PREFILL, rank(0, group, late), [late]) == pytest.approx(1.0 + 20)
    assert end_s(WITH_PREFILL, rank(0)) == 0


def test_a_rank_with_one_straggler_is_emptied_where_steps_cost_the_same():
    loads = [rank(0, straggler("a", 100)), rank(1, straggler("b", 90))]
    assert plan_consolidation(FLAT, loads).moves == (PlannedMove("b", 1, 0),)
    assert plan_consolidation(PER_CANDIDATE, loads) == Consolidation()
    assert plan_consolidation(FLAT, [rank(0, *loads[0].groups, *loads[1].groups), rank(1)]) == Consolidation()


def test_as_many_ranks_are_emptied_as_free_the_most():
    loads = [rank(number, straggler(str(number), 100 + number)) for number in range(8)]
    moves = plan_consolidation(FLAT, loads).moves
    assert {(move.source, move.target) for move in moves} == {(source, 7) for source in range(7)}
    assert sorted(move.group_id for move in moves) == list("0123456")


def test_a_price_that_exceeds_what_is_freed_keeps_groups_where_they_are_unless_kv_comes_along():
    # It would free 20 s, but computing 2,000 tokens again takes 20.5 s on the target; they are sent in 2 s.
    source = rank(1, straggler("b", 20, generated=2000))
    loads = [rank(0, straggler("a", 300)), source]
    assert plan_consolidation(WITH_PREFILL, loads, max_delay=1, min_freed=0) == Consolidation()
    loads = [rank(0, straggler("a", 300), transfer=TransferCost(0.001, 16)), source]
    plan = plan_consolidation(WITH_PREFILL, loads, max_delay=1, min_freed=0)
    assert plan.moves == (PlannedMove("b", 1, 0),)
    assert plan.freed_s == pytest.approx(20 - 0.5 - 8 * 0.01 - 1992 * 0.001)


@pytest.mark.parametrize(
    ("late", "delay", "delay_after"),
    [
        (0, 0.0, 0.05),  # 100 steps of one at 1 s; with two, 1.1 s for the first 50. It frees 50 s and takes 5 s
        (0, 0.02, 0.071),  # an earlier one of the step took 2 %: 1.02 * 1.05 - 1
        (1000, 0.0, 0.1),  # if both go on for 1,000 steps, all of them are a tenth longer
    ],
)
def test_a_step_may_end_later_by_max_delay_only(late, delay, delay_after):
    cost = CostModel(((0, PTLCurve((1, 2), (1.0, 1.1))),))
    loads = [rank(0, straggler("a", 100, late=late)), rank(1, straggler("b", 50, late=late))]
    plan = plan_consolidation(cost, loads, delay, max_delay=delay_after + 0.001)
    assert (plan.ranks, plan.freed_s, plan.delay) == ({1}, pytest.approx(45), pytest.approx(delay_after))
    assert plan_consolidation(cost, loads, delay, max_delay=delay_after - 0.001) == Consolidation(delay=delay)


def test_a_third_of_what_a_target_may_be_later_itself_counts_too():
    # Rank 0 ends last by far, but it may be rank 1 that does, which then takes 1.3 s a step instead of 1.
    cost = CostModel(((0, PTLCurve((1, 2), (1.0, 1.3))),))
    loads = [
        rank(0, straggler("a", 100, late=3000), max_num_seqs=1),
        rank(1, straggler("b", 70, late=90)),
        rank(2, straggler("c", 60, late=90)),
    ]
    assert plan_consolidation(cost, loads, max_delay=0.09) == Consolidation()
    assert plan_consolidation(cost, loads, max_delay=0.11, min_freed=0.1).moves == (PlannedMove("c", 2, 1),)


def test_little_that_is_freed_is_not_worth_a_move():
    loads = [rank(0, straggler("a", 100)), rank(1, straggler("b", 20))]  # 20 of 120 rank-seconds
    assert plan_consolidation(FLAT, loads) == Consolidation()
    assert plan_consolidation(FLAT, loads, min_freed=0.16).moves == (PlannedMove("b", 1, 0),)


def test_a_rank_moves_whole_or_not_at_all():
    loads = [rank(0, straggler("a", 100), kv_capacity_tokens=170), rank(1, straggler("b", 60), straggler("c", 30))]
    assert plan_consolidation(FLAT, loads) == Consolidation()  # only one of its groups would fit
    roomy = [rank(0, straggler("a", 100), kv_capacity_tokens=190), loads[1]]
    assert {move.group_id for move in plan_consolidation(FLAT, roomy).moves} == {"b", "c"}


def test_the_latest_rank_gives_a_group_to_an_idle_one_when_its_steps_become_much_shorter():
    long, short = straggler("long", 1000), [straggler(f"s{i}", 1000, num_candidates=5) for i in range(2)]
    moves = plan_spread(PER_CANDIDATE, [rank(0, long, *short), rank(1)])
    assert len(moves) == 1  # 11 steps' tenths become 6 and 5; the idle rank is not nearly empty any more
    assert (moves[0].source, moves[0].target) == (0, 1)
    assert moves[0].group_id in ("s0", "s1")
    assert plan_spread(FLAT, [rank(0, long, *short), rank(1)]) == []


def test_no_group_is_spread_when_the_price_eats_the_gain():
    cost = CostModel(PER_CANDIDATE.curves, prefill_s_per_token=1.0)
    cheap, dear = (
        [rank(0, *(straggler(str(i), 100, num_candidates=2, generated=generated) for i in range(2))), rank(1)]
        for generated in (5, 30)
    )
    # 100 steps of 0.4 s against 100 steps of 0.2 s and a price of 5 or 30 s
    assert len(plan_spread(cost, cheap)) == 1
    assert plan_spread(cost, dear) == []


def test_nothing_is_spread_when_no_rank_lags():
    loads = [rank(number, straggler(str(number), 100, num_candidates=4)) for number in range(3)]
    assert plan_spread(PER_CANDIDATE, [*loads, rank(3)]) == []


def test_a_drain_fills_the_least_loaded_first():
    loads = [
        rank(0, straggler("a", 30), straggler("b", 50), straggler("c", 5)),
        rank(1, straggler("d", 20)),
        rank(2, straggler("e", 45)),
    ]
    # the longest first: b to 1 (20 -> 70), a to 2 (45 -> 75), c to 1
    assert plan_drain(loads, 0) == [PlannedMove("b", 0, 1), PlannedMove("a", 0, 2), PlannedMove("c", 0, 1)]


def test_a_drain_prefers_room_and_where_there_is_none_takes_the_least_full():
    group = straggler("a", 100)
    full, roomy = rank(1, kv_capacity_tokens=99), rank(2, straggler("b", 300), kv_capacity_tokens=400)
    assert plan_drain([rank(0, group), full, roomy], 0) == [PlannedMove("a", 0, 2)]
    assert plan_drain([rank(0, group), full, rank(2, straggler("b", 300), kv_capacity_tokens=350)], 0) == [
        PlannedMove("a", 0, 1)
    ]


def test_a_drain_has_nowhere_to_go_when_all_others_are_held():
    assert plan_drain([rank(0, straggler("a", 1)), rank(1, is_held=True)], 0) == []
    with pytest.raises(ValueError, match=r"rank must be one of \[0\], got 7"):
        plan_drain([rank(0)], 7)


def check_moves(loads, moves):
    """Check the invariants of a plan that has a choice."""
    assert len({move.group_id for move in moves}) == len(moves)
    where = {group.group_id: load.rank for load in loads for group in load.groups}
    held = {load.rank for load in loads if load.is_held}
    for move in moves:
        assert where[move.group_id] == move.source != move.target
        assert move.target not in held
    ranks, arrived = moved(loads, moves)
    for number, groups in arrived.items():
        if groups:
            room = ranks[number].room
            assert room.kv_tokens >= 0
            assert room.candidates >= 0
    return ranks, arrived


@pytest.mark.thorough
@given(costs(), ranks_with_groups(), st.floats(0, 0.1), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_consolidation_frees_whole_ranks_in_time(cost, loads, delay, max_delay, min_freed):
    plan = plan_consolidation(cost, loads, delay, max_delay=max_delay, min_freed=min_freed)
    ranks, arrived = check_moves(loads, plan.moves)
    if not plan.moves:
        assert plan == Consolidation(delay=delay)
        return
    before = {load.rank: end_s(cost, load) for load in loads}
    after = {number: end_s(cost, load, arrived[number]) for number, load in ranks.items()}
    assert plan.delay <= max_delay
    assert max(after.values()) * (1 + delay) <= max(before.values()) * (1 + plan.delay) * (1 + 1e-9)
    late = [end_s(cost, load.late, [group.late for group in arrived[number]]) for number, load in ranks.items()]
    assert max(late) * (1 + delay) <= max(end_s(cost, load.late) for load in loads) * (1 + plan.delay) * (1 + 1e-9)
    own = [load.rank for load in loads if not load.is_held]
    busy_s = sum(before[number] for number in own)
    assert sum(after[number] for number in own) == pytest.approx(busy_s - plan.freed_s)
    assert plan.freed_s > min_freed * busy_s
    for source in plan.ranks:
        assert not ranks[source].groups
        assert not arrived[source]
        assert not ranks[source].other_requests


@pytest.mark.thorough
@given(costs(), ranks_with_groups(), st.floats(0, 0.5))
def test_a_spread_never_makes_the_end_later(cost, loads, min_sooner):
    moves = plan_spread(cost, loads, min_sooner=min_sooner)
    ranks, arrived = check_moves(loads, moves)
    before = max(end_s(cost, load) for load in loads)
    assert max(end_s(cost, load, arrived[number]) for number, load in ranks.items()) <= before


@pytest.mark.thorough
@given(ranks_with_groups(), st.data())
def test_a_drain_empties_its_rank_unless_there_is_nowhere_to_go(loads, data):
    drained = data.draw(st.sampled_from(loads))
    moves = plan_drain(loads, drained.rank)
    others = [load for load in loads if not load.is_held and load.rank != drained.rank]
    assert {move.group_id for move in moves} == {group.group_id for group in drained.groups if others}
    assert {move.target for move in moves} <= {load.rank for load in others}
    group = max(drained.groups, key=lambda group: group.total_remaining, default=None)
    if any(group is not None and load.room.holds(group) for load in others):
        assert next(load for load in others if load.rank == moves[0].target).room.holds(group)
