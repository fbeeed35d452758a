import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.pruning.rules.logistic import Counts, fit
from vllm_rollout.parts.pruning.rules.success_bins import bin_logits, combined_table, paper_table, spread_out


def triangle(counts: list[float], spread: int) -> list[float]:
    return [
        sum(count * max(0.0, 1 - abs(b - own) / (spread + 1)) for own, count in enumerate(counts))
        for b in range(len(counts))
    ]


def a4(negatives: list[float], positives: list[float], spread: int, smoothing: float) -> list[float]:
    """ARRoL A.4, with spread = 0 as it is printed."""
    num_bins = len(negatives)
    prior = sum(positives) / (sum(negatives) + sum(positives))

    def likelihood(counts: list[float], b: int) -> float:
        near = triangle(counts, spread)
        return (near[b] + smoothing) / (sum(near) + smoothing * num_bins)

    return [
        prior * likelihood(positives, b) / (prior * likelihood(positives, b) + (1 - prior) * likelihood(negatives, b))
        for b in range(num_bins)
    ]


counts_lists = st.lists(
    st.tuples(st.integers(0, 40).map(float), st.integers(0, 40).map(float)), min_size=1, max_size=12
).filter(lambda pairs: any(n + y for n, y in pairs))


@settings(max_examples=50, deadline=None)
@given(counts_lists, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0, 1, 3]))
def test_the_papers_table_is_a4(pairs, smoothing, spread):
    negatives, positives = (list(each) for each in zip(*pairs, strict=True))
    assert paper_table(negatives, positives, spread, smoothing) == pytest.approx(
        a4(negatives, positives, spread, smoothing)
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 100).map(float), min_size=1, max_size=30), st.integers(0, 9))
def test_labels_count_in_neighbouring_bins_by_a_triangle(counts, spread):
    assert spread_out(counts, spread) == pytest.approx(triangle(counts, spread), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 127), st.tuples(st.integers(0, 2000), st.integers(0, 2000)), max_size=30))
def test_every_probability_lies_in_between(labels):
    negatives, positives = [0.0] * 128, [0.0] * 128
    for b, (negative, positive) in labels.items():
        negatives[b], positives[b] = float(negative), float(positive)
    assert all(0 < q < 1 for q in combined_table(negatives, positives, 7))


def test_without_labels_everything_is_even():
    assert set(combined_table([0.0] * 4, [0.0] * 4, 1)) == {0.5}


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_bins_without_labels_tend_to_the_prior_where_scores_tell_nothing(rate):
    negatives, positives = [0.0] * 128, [0.0] * 128
    for b in range(44, 84):
        negatives[b], positives[b] = 50 * (1 - rate), 50 * rate
    table = combined_table(negatives, positives, 7)
    assert all(q == pytest.approx(rate, abs=0.01) for q in table)
    old = paper_table(negatives, positives, 7, 1.0)
    assert max(abs(q - rate) for q in old) > 0.08


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 50), st.integers(20, 100), st.tuples(st.integers(40, 62), st.integers(66, 88)), st.booleans())
def test_where_no_labels_are_near_it_rises_or_falls_with_the_curve(few, many, places, rises):
    negatives, positives = [0.0] * 128, [0.0] * 128
    low, high = places if rises else places[::-1]
    negatives[low], positives[low] = float(many), float(few) / 4
    negatives[high], positives[high] = float(few) / 4, float(many)
    table = combined_table(negatives, positives, 0)
    away = [q for b, q in enumerate(table) if b not in places]
    assert away == sorted(away, reverse=not rises)
    assert away[0] != away[-1]


def test_many_labels_win_over_the_curve():
    """Success in the middle only: no curve of one slope can say so."""
    negatives, positives = [0.0] * 128, [0.0] * 128
    for b in range(16, 112):
        rate = 0.8 if 48 <= b < 80 else 0.1
        negatives[b], positives[b] = 40 * (1 - rate), 40 * rate
    table = combined_table(negatives, positives, 7)
    assert table[64] == pytest.approx(0.8, abs=0.02)
    assert table[24] == pytest.approx(0.1, abs=0.02)
    assert table[104] == pytest.approx(0.1, abs=0.02)


def test_a_curve_through_exact_counts_is_found():
    points = [
        Counts(x / 4, 1e4 * (1 - p), 1e4 * p) for x in range(-12, 13) for p in [1 / (1 + math.exp(1.5 - 0.8 * x / 4))]
    ]
    curve = fit(points)
    assert (curve.intercept, curve.slope) == (pytest.approx(-1.5, abs=0.01), pytest.approx(0.8, abs=0.01))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(-20, 20), st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=32))
def test_a_curve_foretells_as_many_successes_as_there_were(labels):
    """The score equation of the intercept, the added labels included: the steps have come to their end."""
    points = [Counts(x / 4, float(n), float(y)) for x, (n, y) in labels.items()]
    curve = fit(points)
    expected = sum((n + y) * curve.at(x) for x, n, y in points) + curve.at(0.0)
    assert expected == pytest.approx(sum(y for _, _, y in points) + 0.5, abs=0.02)


def test_steps_that_go_too_far_become_smaller():
    """Newton's own steps swing to and fro here, for ever."""
    curve = fit([Counts(2.25, 54.0, 0.0), Counts(-4.75, 6.0, 4.0)])
    assert curve.at(-4.75) == pytest.approx(0.4, abs=0.05)
    assert curve.at(2.25) < 0.02


def test_labels_that_the_score_tells_apart_altogether_have_a_curve():
    curve = fit([Counts(-1.0, 500.0, 0.0), Counts(1.0, 0.0, 500.0)])
    assert 2 < curve.slope < 20
    assert curve.at(-1.0) < 0.02 < 0.98 < curve.at(1.0)


def test_bins_are_named_by_the_standardized_score_in_their_middle():
    assert bin_logits(4) == pytest.approx([math.log(s / (1 - s)) for s in (1 / 8, 3 / 8, 5 / 8, 7 / 8)])
