"""Selection against brute force over all subsets of small pools."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.terms_port import PartTerms
from vllm_rollout.kernel.rules.types import Ending

never = st.just(False)
few_examples = settings(max_examples=60, deadline=None, database=None)


def ended(*num_tokens: int) -> list[Ending]:
    """Candidates that ended by themselves, one step after the other."""
    return [Ending(index, "finished", length, end_step=index) for index, length in enumerate(num_tokens)]


@st.composite
def pools(draw, states=("finished",), truncated=never):
    endings = draw(
        st.lists(
            st.tuples(st.sampled_from(states), st.integers(1, 4), truncated, st.integers(0, 3)), min_size=1, max_size=7
        )
    )
    return [Ending(i, state, tokens, cut, step) for i, (state, tokens, cut, step) in enumerate(endings)]


mixed_pools = pools(states=("finished", "finished", "surplus", "failed", "pruned"), truncated=st.booleans())


def best_subset(pool: list[Ending], size: int, key) -> set[int]:
    """The subset of that size whose ranks are lowest, among all subsets."""
    return {e.index for e in min(itertools.combinations(pool, size), key=lambda subset: sorted(map(key, subset)))}


def by_length(ending: Ending) -> tuple[int, int]:
    return ending.num_tokens, ending.index


def by_finish(ending: Ending) -> tuple[int, int, int]:
    return ending.end_step, ending.num_tokens, ending.index


def test_an_incomplete_group_returns_what_there_is_and_says_why():
    endings = [Ending(0, "finished", 5), Ending(1, "failed", 2), Ending(2, "surplus", 3), Ending(3, "failed", 0)]
    result = conclude(GroupPlan(2, 2), endings)
    assert result.status == "incomplete"
    assert result.selected == (0,)
    assert result.reason == "1 of 4 candidates finished, group_size is 2 (2 failed, 1 surplus)"


@pytest.mark.parametrize("allow_fewer", [False, True])
def test_a_group_without_any_ending_is_incomplete(allow_fewer):
    assert conclude(pruned(GroupPlan(2), allow_fewer), []).reason == "0 of 0 candidates finished, group_size is 2"


@pytest.mark.parametrize("selection", ["first", "shortest", "dual_end"])
def test_of_truncated_candidates_the_shortest_fills_the_gap(selection):
    plan = GroupPlan(2, 2, False, selection)
    cut = [Ending(index, "finished", num_tokens, truncated=True) for index, num_tokens in [(1, 9), (2, 7), (3, 8)]]
    assert conclude(plan, [*ended(5), *cut]).selected == (0, 2)


@pytest.mark.parametrize(("selection", "key"), [("first", by_finish), ("shortest", by_length)])
@few_examples
@given(pools(), st.data())
def test_first_and_shortest_agree_with_brute_force(selection, key, pool, data):
    size = data.draw(st.integers(1, len(pool)))
    plan = GroupPlan(size, len(pool) - size, selection=selection)
    assert set(conclude(plan, pool).selected) == best_subset(pool, size, key)


@few_examples
@given(pools(truncated=st.booleans()), st.data())
def test_dual_end_agrees_with_brute_force(pool, data):
    valid = [ending for ending in pool if ending.valid]
    assume(valid)
    size = data.draw(st.integers(1, len(valid)))
    num_longest = data.draw(st.integers(0, size))
    shortest = best_subset(valid, size - num_longest, by_length)
    rest = [ending for ending in valid if ending.index not in shortest]
    longest = best_subset(rest, num_longest, lambda ending: [-part for part in by_length(ending)])
    plan = GroupPlan(size, len(pool) - size, False, "dual_end", num_longest)
    assert set(conclude(plan, pool).selected) == shortest | longest


plans = st.builds(
    lambda size, redundancy, selection, part: GroupPlan(
        size, redundancy, selection != "dual_end", selection, min(part, size) if selection == "dual_end" else 0
    ),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from(["first", "shortest", "dual_end"]),
    st.integers(0, 5),
)


@few_examples
@given(plans, mixed_pools)
def test_a_group_is_complete_exactly_when_enough_finished(plan, pool):
    result = conclude(plan, pool)
    finished = {ending.index for ending in pool if ending.state == "finished"}
    valid = {ending.index for ending in pool if ending.valid}
    assert set(result.selected) <= finished
    assert len(set(result.selected)) == len(result.selected) == min(plan.group_size, len(finished))
    assert len(valid.intersection(result.selected)) == min(plan.group_size, len(valid))
    assert (result.status == "complete") == (len(finished) >= plan.group_size)
    assert (result.reason is None) == (result.status == "complete")
    assert list(result.selected) == sorted(result.selected)


class PruningTerms(PartTerms):
    """Terms of a part that prunes."""

    def __init__(self, allow_fewer: bool) -> None:
        self.fields = SimpleNamespace(allow_fewer=allow_fewer)

    @property
    def pruning(self):
        return self.fields


def pruned(plan: GroupPlan, allow_fewer: bool = True) -> GroupPlan:
    return replace(plan, parts={"a part": PruningTerms(allow_fewer)})


def test_a_group_that_pruning_left_smaller_is_complete_when_fewer_are_allowed():
    endings = [*ended(5, 6), Ending(2, "pruned", 8), Ending(3, "pruned", 8)]
    result = conclude(pruned(GroupPlan(4)), endings)
    assert (result.status, result.reason, result.selected) == ("complete", None, (0, 1))
    result = conclude(pruned(GroupPlan(4), allow_fewer=False), endings)
    assert (result.status, result.selected) == ("incomplete", (0, 1))
    assert result.reason == "2 of 4 candidates finished, group_size is 4 (2 pruned)"


def test_a_group_that_lost_what_pruning_left_is_incomplete():
    endings = [*ended(5), Ending(1, "pruned", 8), Ending(2, "failed", 3)]
    result = conclude(pruned(GroupPlan(3)), endings)
    assert (result.status, result.selected) == ("incomplete", (0,))
    assert result.reason == "1 of 3 candidates finished, group_size is 3, of which pruning left 2 (1 failed, 1 pruned)"


@few_examples
@given(plans, st.booleans(), st.data())
def test_with_fewer_allowed_a_group_is_complete_when_all_that_pruning_left_finished(plan, allow_fewer, data):
    states = st.lists(
        st.sampled_from(["finished", "pruned", "surplus", "failed"]),
        min_size=plan.num_candidates,
        max_size=plan.num_candidates,
    )
    pool = [Ending(i, state, 3) for i, state in enumerate(data.draw(states))]
    result = conclude(pruned(plan, allow_fewer), pool)
    num_finished = sum(ending.state == "finished" for ending in pool)
    num_left = sum(ending.state != "pruned" for ending in pool)
    wanted = min(plan.group_size, num_left) if allow_fewer else plan.group_size
    assert len(result.selected) == min(num_finished, plan.group_size)
    assert (result.status == "complete") == (num_finished > 0 and num_finished >= wanted)
    assert (result.reason is None) == (result.status == "complete")


@few_examples
@given(plans, mixed_pools, st.integers(0, 1000))
def test_the_order_in_which_endings_arrive_does_not_matter(plan, pool, seed):
    shuffled = random.Random(seed).sample(pool, len(pool))
    assert conclude(plan, shuffled) == conclude(plan, pool)
    assert conclude(plan, shuffled).endings == tuple(pool)
