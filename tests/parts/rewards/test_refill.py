"""Spares that take the place of candidates that do not count."""

from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.rules.test_selection import few_examples, pools
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.parts.rewards.rules.refill import SpareRanking

PLANS = st.one_of(
    st.builds(GroupPlan, st.integers(1, 4), st.integers(0, 3), st.just(False), st.sampled_from(["first", "shortest"])),
    st.integers(2, 5).flatmap(
        lambda size: st.builds(
            GroupPlan,
            st.just(size),
            st.just(2),
            st.just(False),
            st.just("dual_end"),
            num_longest=st.integers(1, size - 1),
        )
    ),
)


@few_examples
@given(PLANS, pools(truncated=st.booleans()), st.randoms())
def test_who_takes_the_place_of_one_that_does_not_count_is_who_is_selected_without_it(plan, endings, chance):
    ranking, void = SpareRanking(plan), set()
    for ending in chance.sample(endings, len(endings)):
        ranking.add(ending)
    for ending in chance.sample(endings, len(endings)):
        before = set(conclude(plan, endings, void=void).selected)
        heir = ranking.drop(ending)
        void.add(ending.index)
        selected = set(conclude(plan, endings, void=void).selected)
        assert selected == set(ranking.selected) == (before - {ending.index}) | ({heir} - {None})
        assert len(selected) == ranking.num_selected
        assert ranking.drop(ending) is None
