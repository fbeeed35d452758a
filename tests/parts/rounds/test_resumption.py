"""Choice of candidates to continue, and the use of their parts."""

from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.kernel.http.ended import is_off_policy
from vllm_rollout.kernel.rules.types import CandidateState, Ending, GroupResult
from vllm_rollout.parts.rounds.rules.resumption import (
    VersionSpan,
    choose_resumed,
    is_whole,
    joined_ending,
    joined_moments,
    joined_spans,
)


def endings(*states: CandidateState) -> list[Ending]:
    return [Ending(index, state, 10 - index) for index, state in enumerate(states)]


def test_lost_and_pruned_candidates_do_not_go_on():
    assert choose_resumed(endings("failed", "pruned", "surplus", "deferred", "failed", "finished"), 4) == (2, 3, 5)


@settings(derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["finished", "deferred", "surplus"]), st.integers(0, 100)), min_size=1))
def test_the_choice_does_not_depend_on_lengths_and_on_who_is_over(group):
    ends = [Ending(index, state, length) for index, (state, length) in enumerate(group)]
    assert choose_resumed(ends, 3) == tuple(range(min(3, len(group))))


def test_what_ended_too_late_to_count_is_whole_all_the_same():
    assert is_whole(Ending(0, "surplus", 5, ended_by_itself=True))
    assert is_whole(Ending(0, "finished", 5, truncated=True))
    assert not is_whole(Ending(0, "surplus", 5))
    assert not is_whole(Ending(0, "deferred", 5))


@pytest.mark.parametrize(("versions", "num_resumed", "current", "expected"), [
    ([], 0, None, False),
    (["a"], 0, None, False),
    (["a"], 0, "b", False),  # the version changed after it had ended
    (["a", "b"], 0, "a", True),
    (["a"], 3, "a", False),
    (["a", "a"], 3, "a", False),
    (["a"], 3, "b", True),  # whole since an earlier round
    (["a", "b"], 3, "b", True),
    (["default"], 3, None, True),  # nobody names versions: they may have changed
    ([], 3, None, True),
    ([], 3, "a", True),
])  # fmt: skip
def test_off_policy_is_said_unless_versions_say_otherwise(versions, num_resumed, current, expected):
    assert is_off_policy(versions, num_resumed, current) is expected


@settings(derandomize=True)
@given(
    st.lists(st.floats(0, 50, width=32), min_size=1, max_size=20),
    st.lists(st.floats(0, 50, width=32), min_size=1, max_size=20),
)
def test_joined_moments_are_those_of_all_numbers(first, rest):
    parts = [(fmean(part), pstdev(part)) for part in (first, rest)]
    mean, std = joined_moments(parts[0], len(first), parts[1], len(rest))
    assert mean == pytest.approx(fmean(first + rest))
    assert std == pytest.approx(pstdev(first + rest), abs=1e-5)


def test_moments_of_a_part_that_nobody_saw_are_moments_of_nothing():
    assert joined_moments(None, 2, (1.0, 0.5), 3) is None
    assert joined_moments((1.0, 0.5), 2, None, 3) is None
    assert joined_moments(None, 0, (1.0, 0.5), 3) == (1.0, 0.5)
    assert joined_moments((1.0, 0.5), 2, None, 0) == (1.0, 0.5)


def test_spans_go_on_behind_each_other():
    before = [VersionSpan("a", 0, 2), VersionSpan("b", 2, 5)]
    assert joined_spans(before, 5, [VersionSpan("b", 0, 3), VersionSpan("c", 3, 4)]) == [
        VersionSpan("a", 0, 2), VersionSpan("b", 2, 8), VersionSpan("c", 8, 9),
    ]  # fmt: skip
    assert joined_spans(before, 5, [VersionSpan("a", 0, 1)]) == [*before, VersionSpan("a", 5, 6)]
    assert joined_spans([], 0, [VersionSpan("a", 0, 1)]) == [VersionSpan("a", 0, 1)]
    assert joined_spans(before, 5, []) == before


def test_tokens_of_earlier_rounds_are_not_generated_again():
    ends = (
        joined_ending(Ending(0, "finished", 4), 6),
        Ending(1, "failed", 2),
        joined_ending(Ending(2, "failed", 1), 3),
    )
    result = GroupResult("incomplete", "lost", (0,), ends)
    assert (result.generated_tokens, result.resumed_tokens, result.returned_tokens) == (7, 9, 10)
    assert result.generated_tokens + result.resumed_tokens == result.returned_tokens + result.wasted_tokens
