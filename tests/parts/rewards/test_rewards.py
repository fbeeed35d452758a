"""Time limits that learn, and what a group's rewards are worth."""

import re
from statistics import fmean, median_low, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.rewards.rules.estimates import ESTIMATORS, advantages, summarize
from vllm_rollout.parts.rewards.rules.time_limits import LimitTerms, TimeLimits

SECONDS = st.floats(0, 100)
REWARDS = st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-10, 10), max_size=16)


@given(st.lists(st.tuples(SECONDS, st.booleans()), max_size=20))
def test_a_limit_is_the_papers_formula_over_the_correct_runs(runs):
    limits = TimeLimits(LimitTerms(factor=1.5, shortest_s=2, longest_s=30))
    for seconds, is_correct in runs:
        limits.observe("case", seconds, is_correct=is_correct)
    correct = [seconds for seconds, is_correct in runs if is_correct]
    assert limits.limit_s("case") == (min(max(2, 1.5 * max(correct)), 30) if correct else 30)
    assert limits.limit_s("another") == 30
    again = TimeLimits(limits.terms)
    again.restore(limits.export())
    assert again.limit_s("case") == limits.limit_s("case")


@given(st.lists(SECONDS, min_size=1, max_size=20))
def test_the_summary_is_of_the_limits_and_not_of_the_anchors(anchors):
    limits = TimeLimits(LimitTerms(factor=1.5, shortest_s=2, longest_s=30))
    assert limits.summary() == (0, None, None)
    for case, seconds in enumerate(anchors):
        limits.observe(str(case), seconds, is_correct=True)
    known = [limits.limit_s(str(case)) for case in range(len(anchors))]
    assert limits.summary() == (len(anchors), median_low(known), max(known))


def test_what_was_used_least_recently_is_forgotten_first():
    limits = TimeLimits(max_cases=2)
    for case in ("a", "b"):
        limits.observe(case, 1, is_correct=True)
    limits.limit_s("a")
    limits.observe("c", 1, is_correct=True)
    assert list(limits.export()) == ["a", "c"]


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"factor": 0.5}, "factor must be a finite number in [1,"),
        ({"shortest_s": 0}, "shortest_s must be a finite number in (0,"),
        ({"shortest_s": 9, "longest_s": 3}, "shortest_s (9) must not be above longest_s (3)"),
    ],
)
def test_terms_that_cannot_be_are_refused(terms, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        LimitTerms(**terms)


def test_an_anchor_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match="the anchor of 'case'"):
        TimeLimits().restore({"case": float("nan")})


@given(REWARDS, st.sampled_from(ESTIMATORS))
def test_advantages_are_those_of_the_estimators_papers(rewards, estimator):
    known = [reward for reward in rewards if reward is not None]
    said = summarize(rewards)
    assert (said.teaches, said.num_rewards) == (len(set(known)) > 1, len(known))
    got = advantages(rewards, estimator)
    assert [each is None for each in got] == [reward is None for reward in rewards]
    for index, reward in enumerate(rewards):
        if reward is None:
            continue
        others = [other for at, other in enumerate(rewards) if other is not None and at != index]
        if not said.teaches:
            wanted = 0.0
        elif estimator == "rloo":
            wanted = reward - fmean(others)
        else:
            wanted = (reward - fmean(known)) / (stdev(known) + 1e-6 if estimator == "grpo" else 1)
        assert got[index] == pytest.approx(wanted, abs=1e-9, rel=1e-6)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="estimator must be one of grpo, rloo, mean, got 'gae'"):
        advantages([0.0, 1.0], "gae")
