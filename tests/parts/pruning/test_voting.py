"""Votes by hand, by properties, and maj@k against the enumeration of all subsets."""

import itertools
import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.pruning.rules import voting
from vllm_rollout.parts.pruning.rules.voting import (
    MAX_CONFIDENCE,
    VOTING_METHODS,
    AnsweredGroup,
    accuracy_at_k,
    normalise_answer,
    vote,
)

few_examples = settings(max_examples=60, deadline=None, database=None)

answers_lists = st.lists(st.sampled_from([None, "a", "b", "c", "1,000", "1000.0", " "]), max_size=8)
confidences = st.one_of(st.none(), st.integers(0, 8).map(float))


@st.composite
def ballots(draw, weights=confidences):
    answers = draw(answers_lists)
    return answers, draw(st.lists(weights, min_size=len(answers), max_size=len(answers)))


def by_answer(result) -> dict[str, float]:
    return {answer: pytest.approx(weight) for answer, weight in result.tally.items()}


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("1,000", "1000"),
        ("42.0", "42"),
        ("42.", "42"),
        ("+042.50", "42.5"),
        ("-0.0", "0"),
        ("-.50", "-0.5"),
        (" the \n cat\t", "the cat"),
        ("10,00", "10,00"),
        ("1e3", "1e3"),
        ("50%", "50%"),
        ("Yes", "Yes"),
        ("000", "0"),
        (".", "."),
        ("", None),
        (" \n ", None),
        (None, None),
    ],
)
def test_answers_are_compared_in_a_normal_form(written, normal):
    assert normalise_answer(written) == normalise_answer(normal) == normal


@few_examples
@given(st.integers(-(10**9), 10**9), st.integers(0, 3))
def test_every_way_to_write_a_number_is_the_same_answer(number, num_zeros):
    fraction = "." + "0" * num_zeros if num_zeros else ""
    assert normalise_answer(f"{number:,}{fraction}") == normalise_answer(f" {number:+}") == str(number)


@pytest.mark.parametrize(
    ("method", "answers", "weights", "tally", "num_without"),
    [
        ("majority", ["42", "7", "42.0", None, " "], [0.0, math.nan, None, 1.0, 1.0], {"42": 2.0, "7": 1.0}, 0),
        ("confidence", ["a", "a", "b"], [1.0, 1.5, 4.0], {"b": 4.0, "a": 2.5}, 0),
        ("confidence", ["a", "b", "b"], [0.0, 0.0, 0.0], {"b": 2.0, "a": 1.0}, 0),
        ("quality", ["a", "b", "b"], [0.0, 0.0, 0.0], {"b": 2.0, "a": 1.0}, 0),
        # Ranks 1, 3.5, 5, 3.5, 2 of 5: ties share theirs, the best weigh 1.
        ("quality", [*"abcde"], [-30.0, 2.0, 900.0, 2.0, 0.1], {"c": 1.0, "b": 0.7, "d": 0.7, "e": 0.4, "a": 0.2}, 0),
        ("quality", [*"abc"], [5.0, 5.0, 1.0], {"a": 1.0, "b": 1.0, "c": 0.4}, 0),
        # Three that tie for the lowest outvote one that is better.
        ("quality", [*"aaab"], [1.0, 1.0, 1.0, 2.0], {"a": 1.5, "b": 1.0}, 0),
        # Who misses a weight abstains, and moves no rank.
        ("quality", ["a", "b", "c", None], [1.0, None, 2.0, 3.0], {"c": 1.0, "a": 0.5}, 1),
        *((method, [*"bacab"], [1.0] * 5, {"b": 2.0, "a": 2.0, "c": 1.0}, 0) for method in VOTING_METHODS),
    ],
)
def test_votes_by_hand(method, answers, weights, tally, num_without):
    """The tally has the heaviest answer first. Ties are in order of first appearance."""
    result = vote(answers, method, weights)
    assert list(result.tally.items()) == list(tally.items())
    assert result.winner == next(iter(tally))
    assert result.share == pytest.approx(tally[result.winner] / sum(tally.values()))
    num_unanswered = sum(normalise_answer(answer) is None for answer in answers)
    assert (result.num_abstained, result.num_without_weight) == (num_unanswered + num_without, num_without)
    assert result.num_votes == len(answers) - result.num_abstained


@pytest.mark.parametrize("method", VOTING_METHODS)
@pytest.mark.parametrize("answers", [[], [None, " "]])
def test_nobody_voting_means_no_winner(method, answers):
    result = vote(answers, method, [1.0] * len(answers))
    assert (result.winner, result.share, dict(result.tally), result.num_votes) == (None, 0.0, {}, 0)
    assert result.num_abstained == len(answers)


@pytest.mark.parametrize(
    ("method", "weights", "words"),
    [
        ("confidence", None, "needs weights"),
        ("confidence", [1.0], r"as many as answers \(2\), got 1"),
        ("confidence", [1.0, -0.5], r"weights\[1\] must be in \[0, 1e\+12\].*got -0.5.*quality"),
        ("confidence", [2 * MAX_CONFIDENCE, 1.0], r"weights\[0\]"),
        ("quality", [math.nan, 1.0], r"weights\[0\] must be finite, got nan"),
        ("quality", [1.0, -math.inf], r"weights\[1\] must be finite"),
        ("median", None, "must be one of majority, confidence, quality, got 'median'"),
    ],
)
def test_a_wrong_weight_is_named(method, weights, words):
    with pytest.raises(ValueError, match=words):
        vote(["a", "b"], method, weights)


@few_examples
@given(ballots(), st.sampled_from(VOTING_METHODS), st.randoms())
def test_the_order_of_candidates_only_breaks_ties(ballot, method, random):
    result = vote(*ballot[:1], method, ballot[1])
    pairs = list(zip(*ballot, strict=True))
    random.shuffle(pairs)
    shuffled = vote([answer for answer, _ in pairs], method, [weight for _, weight in pairs])
    assert dict(shuffled.tally) == by_answer(result)
    assert shuffled.num_abstained == result.num_abstained
    if [*result.tally.values()].count(max(result.tally.values(), default=0.0)) == 1:
        assert shuffled.winner == result.winner


@few_examples
@given(ballots(), st.sampled_from(VOTING_METHODS))
def test_every_candidate_votes_or_abstains_and_the_winner_is_heaviest(ballot, method):
    result = vote(*ballot[:1], method, ballot[1])
    assert result.num_votes + result.num_abstained == len(ballot[0])
    assert (result.winner is None) == (result.num_votes == 0)
    assert list(result.tally.values()) == sorted(result.tally.values(), reverse=True)
    if result.winner is not None:
        assert result.winner == next(iter(result.tally))
        assert result.tally[result.winner] > 0
        assert result.share == pytest.approx(result.tally[result.winner] / sum(result.tally.values()))


@few_examples
@given(ballots(), st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_scaling_confidence_changes_no_share(ballot, factor):
    answers, weights = ballot
    result = vote(answers, "confidence", weights)
    scaled = vote(answers, "confidence", [None if weight is None else weight * factor for weight in weights])
    assert (list(scaled.tally), scaled.winner) == (list(result.tally), result.winner)
    assert scaled.share == pytest.approx(result.share)


@few_examples
@given(ballots(weights=st.one_of(st.none(), st.integers(-6, 6).map(float))))
def test_quality_sees_only_the_order_of_scores(ballot):
    answers, scores = ballot
    bent = [None if score is None else math.exp(score) - 100 for score in scores]
    assert vote(answers, "quality", bent) == vote(answers, "quality", scores)


GROUPS = [
    AnsweredGroup("p1", ["1", "2", "1", None, "3", "1.0"], "1", [0.1, 0.9, 0.2, 5.0, 0.3, None]),
    AnsweredGroup("p2", ["a", "b", "b", "b", "a", "c"], "a", [3.0, 1.0, 1.0, 0.5, 3.0, 0.0]),
]


@pytest.mark.parametrize("method", VOTING_METHODS)
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_accuracy_at_k_is_the_mean_over_all_subsets(method, k):
    def rate(group: AnsweredGroup) -> float:
        subsets = itertools.combinations(range(6), k)
        votes = [vote([group.answers[i] for i in s], method, [group.weights[i] for i in s]) for s in subsets]
        return fmean(result.winner == group.correct for result in votes)

    result = accuracy_at_k(GROUPS, k, method, num_draws=20)
    assert result.accuracy == pytest.approx(fmean(map(rate, GROUPS)))
    assert (result.k, result.num_groups, result.num_exact) == (k, 2, 2)
    assert result.standard_error == pytest.approx(abs(rate(GROUPS[0]) - rate(GROUPS[1])) / 2)


def test_drawn_subsets_come_close_to_all_of_them_and_depend_on_the_seed_only():
    groups = [AnsweredGroup(f"p{i}", ["x"] * 9 + ["y"] * 7, "x") for i in range(2)]
    # 4,368 subsets of 5; x wins with three or more x, and never ties.
    exact = sum(math.comb(9, x) * math.comb(7, 5 - x) for x in (3, 4, 5)) / math.comb(16, 5)
    drawn = accuracy_at_k(groups, 5, "majority", num_draws=1000, seed=7)
    assert drawn.num_exact == 0
    # Five standard errors of 2,000 draws; the seed is fixed.
    assert drawn.accuracy == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / 2000))
    assert drawn == accuracy_at_k(groups, 5, "majority", num_draws=1000, seed=7)
    assert drawn.accuracy != accuracy_at_k(groups, 5, "majority", num_draws=1000, seed=8).accuracy


def test_the_vote_of_one_is_the_mean_accuracy():
    groups = [AnsweredGroup("p", ["1", "2", None, "1"], "1.0")]
    result = accuracy_at_k(groups, 1, "majority")
    assert (result.accuracy, result.standard_error) == (0.5, None)


@pytest.mark.parametrize(
    ("groups", "k", "num_draws", "words"),
    [
        ([], 1, 1, "at least one group"),
        (GROUPS, 7, 1, r"k must be in \[1, 6\], the size of group 'p1', got 7"),
        (GROUPS, 0, 1, "got 0"),
        (GROUPS, 1, 0, "num_draws must be at least 1"),
    ],
)
def test_an_accuracy_that_cannot_be_computed_is_refused(groups, k, num_draws, words):
    with pytest.raises(ValueError, match=words):
        accuracy_at_k(groups, k, "majority", num_draws)


def test_long_answers_are_read_once_and_not_in_every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(voting, "normalise_answer", lambda answer: read.append(answer) or normalise_answer(answer))
    answers = ["x" * 4096, "y" * 4096, "x" * 4096, None] * 4
    accuracy_at_k([AnsweredGroup("q", answers, "x" * 4096)], 5, "majority", num_draws=50)
    assert sum(answer is not None and len(answer) > 100 for answer in read) == 13
