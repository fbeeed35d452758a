"""In which order groups start, and what it brings where lengths are as they are said to be."""

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.shaping.rules.launch_order import (
    MIN_GAIN,
    LaunchOrder,
    WaitingGroup,
    launch_order,
    steps,
    uniforms,
)
from vllm_rollout.parts.shaping.rules.moments import LengthMoments

PLAN = GroupPlan(4)


def waiting(mean: float, std: float = 0.0, plan: GroupPlan = PLAN, max_tokens: int | None = None) -> WaitingGroup:
    return WaitingGroup(plan, LengthMoments(mean, std**2, 1), max_tokens)


def spread(num_groups: int, between: float, within: float, seed: int, plan: GroupPlan = PLAN) -> list[WaitingGroup]:
    """Log-normal between prompts and within them: `within` is a standard deviation over its mean."""
    chance = Random(seed)
    means = [1000 * chance.lognormvariate(0, between) for _ in range(num_groups)]
    return [waiting(mean, within * mean, plan) for mean in means]


def saved(groups: list[WaitingGroup], num_places: int, order: LaunchOrder, seed: int) -> float:
    """Share of the steps, with lengths that were drawn anew."""
    uniform = uniforms(seed)
    drawn = [group.draw(uniform) for group in groups]

    def taken(positions) -> float:
        return steps((length for position in positions for length in drawn[position]), num_places)

    return 1 - taken(order.positions) / taken(range(len(groups)))


def test_each_candidate_takes_the_place_that_is_free_first():
    assert steps([5, 3, 4, 1], 2) == 7  # 5 and 3, then 4 at 3, then 1 at 5
    assert steps([1, 3, 4, 5], 2) == 8
    assert steps([], 2) == 0


def test_the_longest_start_first_where_prompts_differ():
    groups = [waiting(mean) for mean in (10, 20, 10, 20, 100, 50)]
    assert launch_order(groups, 4).name == "prompts", "one after the other, each order is as good"
    order = launch_order(groups, 8)
    assert (order.name, order.positions) == ("longest", [4, 5, 1, 3, 0, 2])
    assert order.gain == pytest.approx(0.09, abs=0.02)


def test_the_shortest_start_first_where_nobody_knows_which_answer_will_be_long():
    groups = [group._replace(max_tokens=16_384) for group in spread(256, 1.4, 3.0, seed=1)]
    order = launch_order(groups, 128)
    assert order.name == "shortest"
    means = [group.mean_tokens for group in groups]
    assert [means[position] for position in order.positions] == sorted(means)


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([waiting(mean) for mean in (10, 20, 30, 40)], id="all have places"),
        pytest.param([waiting(70, 30)] * 40, id="all alike"),
        pytest.param([waiting(10), WaitingGroup(PLAN, None, 100)] * 20, id="nothing is known"),
        pytest.param([waiting(1000 + i, 1000) for i in range(40)], id="no gain that is expected"),
    ],
)
def test_groups_start_in_the_order_of_their_prompts(groups):
    order = launch_order(groups, 16)
    assert (list(order.positions), order.name, order.gain) == (list(range(len(groups))), "prompts", 0.0)


def test_it_pays_on_average_and_costs_nothing_where_it_cannot():
    def mean_saved(between: float, within: float, num_places: int) -> float:
        worlds = [spread(64, between, within, seed) for seed in range(12)]
        each = [saved(groups, num_places, launch_order(groups, num_places), 100 + i) for i, groups in enumerate(worlds)]
        return fmean(each)

    assert mean_saved(0.5, 0.5, 64) > 0.1
    assert mean_saved(1.0, 0.5, 16) > 0.1
    for between, within in ((0.5, 2.5), (0.1, 1.0), (1.4, 2.5)):
        assert mean_saved(between, within, 64) > -0.01
    alike = [launch_order(spread(64, 0.1, 1.0, seed), 64) for seed in range(20)]
    assert {order.name for order in alike} == {"prompts"}, "what is luck of the draws is no gain"


def test_a_race_is_as_long_as_its_winners_and_what_is_cut_as_its_limit():
    raced = GroupPlan(1, 3)
    chance = uniforms(1)
    for _ in range(20):
        assert len(set(waiting(100, 80, raced).draw(chance))) == 1
        assert len(set(waiting(100, 80, replace(raced, early_stop=False)).draw(chance))) == 4
        assert max(waiting(100, 80, max_tokens=40).draw(chance)) <= 40
    means = (30, 300, 30, 30, 300, 300)
    assert launch_order([waiting(mean, max_tokens=30) for mean in means], 8).name == "prompts"


def test_a_length_counts_as_far_as_it_may_go():
    groups = [waiting(100), waiting(100), waiting(3000, max_tokens=50), waiting(1000), waiting(90), waiting(90)]
    assert launch_order(groups, 8).positions == [3, 0, 1, 4, 5, 2]


def test_a_rollout_of_very_many_candidates_is_played_all_the_same():
    groups = [waiting(mean, plan=GroupPlan(20_000)) for mean in (10, 10, 1000, 1000)]
    assert sorted(launch_order(groups, 50_000).positions) == [0, 1, 2, 3]


@given(st.lists(st.builds(waiting, st.floats(1, 1e6), st.floats(0, 1e6)), max_size=12), st.integers(1, 40))
def test_every_group_starts_once_and_the_same_knowledge_gives_the_same_order(groups, num_places):
    order = launch_order(groups, num_places)
    assert sorted(order.positions) == list(range(len(groups)))
    assert list(launch_order(groups, num_places).positions) == list(order.positions)
    assert order.gain == 0 or order.gain >= MIN_GAIN
