import random

import pytest

from vllm_rollout.parts.pruning.rules.report import (
    Prediction,
    auc,
    brier,
    reliability_bins,
    signal_report,
    weighted_mean,
    within_group_auc,
)


def prediction(score=0.0, positive=False, weight=1.0, q=None, group="g") -> Prediction:
    return Prediction(score, q, positive, weight, group)


def test_auc_is_the_weighted_share_of_concordant_pairs():
    rng = random.Random(5)
    for _ in range(20):
        sample = [prediction(rng.randrange(6), rng.random() < 0.4, rng.uniform(0.1, 20)) for _ in range(40)]
        pairs = [(p, n) for p in sample if p.positive for n in sample if not n.positive]
        concordant = sum(p.weight * n.weight * ((p.score > n.score) + (p.score == n.score) / 2) for p, n in pairs)
        assert auc(sample) == pytest.approx(concordant / sum(p.weight * n.weight for p, n in pairs))


def test_auc_needs_both_labels():
    assert auc([]) is None
    assert auc([prediction(1, True), prediction(2, True)]) is None


def test_auc_within_groups_forgets_what_separates_groups():
    easy = [prediction(10 + i, True, group="easy") for i in range(3)] + [prediction(13, False, group="easy")]
    hard = [prediction(i, False, group="hard") for i in range(3)] + [prediction(3, True, group="hard")]
    all_wrong = [prediction(5, False, group="all wrong")]
    assert auc(easy + hard + all_wrong) > 0.5
    assert within_group_auc(hard + easy + all_wrong) == pytest.approx((0 + 1) / 2)
    assert within_group_auc(all_wrong) is None


def test_brier_by_hand():
    """Weights 1 and 3: (0.2^2 + 3 * 0.5^2) / 4; what has no probability does not count."""
    sample = [prediction(positive=True, q=0.8), prediction(weight=3.0, q=0.5), prediction(positive=True)]
    assert brier(sample) == pytest.approx((0.04 + 3 * 0.25) / 4)
    assert brier(sample[2:]) is None


def test_reliability_bins_cover_the_unit_interval():
    sample = [
        prediction(q=0.0),
        prediction(q=0.04, positive=True, weight=3.0),
        prediction(q=1.0, positive=True),
        prediction(q=None),
    ]
    bins = reliability_bins(sample)
    assert [(b.lower, b.upper) for b in bins] == [(i / 10, (i + 1) / 10) for i in range(10)]
    assert [b.num_labels for b in bins] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert bins[0].mean_predicted == pytest.approx(0.03)
    assert bins[0].mean_observed == pytest.approx(0.75)
    assert (bins[9].mean_predicted, bins[9].mean_observed) == (1.0, 1.0)
    assert (bins[4].mean_predicted, bins[4].mean_observed) == (None, None)


def test_signal_report_counts_labels():
    report = signal_report([prediction(1, True, q=0.9), prediction(0, False), prediction(0, False)])
    assert (report.num_positive, report.num_negative) == (1, 2)
    assert report.auc == 1.0
    assert report.within_group_auc == 1.0
    assert report.brier == pytest.approx(0.01)


def test_weighted_mean_of_nothing_is_unknown():
    assert weighted_mean([]) is None
    assert weighted_mean([(0.0, 1.0)]) is None
    assert weighted_mean([(1.0, 2.0), (3.0, 4.0)]) == 3.5
