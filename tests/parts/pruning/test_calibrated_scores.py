"""Calibrated scores are right: across versions of a head, where success is rare, and whatever their distribution."""

import math
import random

import pytest

from vllm_rollout.parts.pruning.rules.calibration import MIN_RECENT_LABELS, Calibrator
from vllm_rollout.parts.pruning.rules.report import Prediction, auc

DISTANCE = 1.4656
"""Between the means of both labels' scores, in deviations: an AUC of 0.85."""


def candidate(rng: random.Random, rate: float) -> tuple[float, bool]:
    """A logit that is right, and whether it succeeds."""
    positive = rng.random() < rate
    return DISTANCE * rng.gauss(DISTANCE * (positive - 0.5), 1) + math.log(rate / (1 - rate)), positive


def taught(rate: float, seed: int = 0, num_labels: int = 2048) -> Calibrator:
    calibrator, rng = Calibrator(), random.Random(seed)
    for _ in range(num_labels):
        score, positive = candidate(rng, rate)
        calibrator.observe(score, 1)
        calibrator.add(score, positive, 1.0, 1)
    return calibrator


def auc_of(values: list[float], positives: list[bool]) -> float:
    return auc([Prediction(v, None, y, 1.0, "") for v, y in zip(values, positives, strict=True)])


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5])
@pytest.mark.parametrize(("factor", "shift"), [(2.0, 0.0), (3.0, 0.0), (1.0, 2.0), (1 / 3, 0.0), (3.0, 2.0)])
def test_another_head_is_calibrated_at_once(rate, factor, shift):
    """After one group the order is the score's; after some more the mean of q is the success rate again, but for the
    chance in 512 scores and 2,048 labels."""
    calibrator, rng = taught(rate), random.Random(1)
    probes = [candidate(rng, rate) for _ in range(2000)]
    scores, positives = [score for score, _ in probes], [positive for _, positive in probes]

    def qs() -> list[float]:
        return [calibrator.success_probability(factor * score + shift, 2) for score in scores]

    for count in (16, 496):
        for _ in range(count):
            calibrator.observe(factor * candidate(rng, rate)[0] + shift, 2)
        assert auc_of(qs(), positives) == pytest.approx(auc_of(scores, positives), abs=0.01)
    told = sum(qs()) / len(scores)
    assert told == pytest.approx(rate, abs=0.05)


def test_versions_of_a_head_in_training_share_what_was_learned():
    """Every 16 labels a version whose logits are sharper by 5 %: 20 times as sharp in the end."""
    calibrator, rng, rate = Calibrator(), random.Random(2), 0.3
    told: list[tuple[float, float, bool]] = []
    for version in range(1, 61):
        group = [candidate(rng, rate) for _ in range(16)]
        for score, _ in group:
            calibrator.observe(1.05**version * score, version)
        told += [(calibrator.success_probability(1.05**version * x, version), x, y) for x, y in group if version > 20]
        for score, positive in group:
            calibrator.add(1.05**version * score, positive, 1.0, version)
    qs, scores, positives = (list(each) for each in zip(*told, strict=True))
    assert auc_of(qs, positives) == pytest.approx(auc_of(scores, positives), abs=0.03)
    assert sum(qs) / len(qs) == pytest.approx(sum(positives) / len(positives), abs=0.08)


def test_a_head_with_the_number_of_another_one_is_told_apart_when_it_is_announced():
    calibrator, rng = taught(0.3), random.Random(3)
    before = calibrator.success_probability(0.0, 1)
    calibrator.begin_version(1)
    for _ in range(256):
        calibrator.observe(5 * candidate(rng, 0.3)[0] + 40, 1)
    assert calibrator.success_probability(40.0, 1) == pytest.approx(before, abs=0.1)


def test_labels_that_come_late_keep_the_scale_of_their_version():
    calibrator, rng = taught(0.3), random.Random(4)
    table = calibrator.table()
    for _ in range(300):
        calibrator.observe(3 * candidate(rng, 0.3)[0] + 9, 2)
    for _ in range(1000):
        calibrator.add(*candidate(rng, 0.3), 1.0, 1)
    assert max(abs(a - b) for a, b in zip(calibrator.table(), table, strict=True)) < 0.2
    calibrator.add(1.0, True, 1.0, 77)  # of a version that has not scored here
    assert calibrator.num_positive + calibrator.num_negative == 2048


def test_scales_of_old_versions_are_forgotten():
    calibrator = Calibrator(window=20, num_recent=20)
    for version in range(500):
        calibrator.observe(float(version), version)
        calibrator.add(float(version), version % 2 == 0, 1.0, version)
    state = calibrator.to_state()
    assert state["num_versions"] <= 64
    assert len(state["scales"]) <= 64 + 20 + 20


def labels_at(rate: float, count: int) -> list[bool]:
    """Evenly spread successes, without chance."""
    return [int((i + 1) * rate) > int(i * rate) for i in range(count)]


@pytest.mark.parametrize(("rate", "num_labels"), [(0.01, 6400), (0.02, 3200), (0.03, 2134), (0.5, 128), (0.98, 3200)])
def test_rare_success_gets_there_and_stays(rate, num_labels):
    calibrator = Calibrator()
    warm = []
    for positive in labels_at(rate, 10_000):
        calibrator.add(0.0, positive)
        warm.append(calibrator.is_warm(64))
    first = warm.index(True) + 1
    assert first == pytest.approx(num_labels, abs=101)
    assert all(warm[first:])


def test_too_few_labels_in_the_window_make_it_cold_and_all_have_to_come_again():
    calibrator = Calibrator(window=200)
    for positive in labels_at(0.5, 200):
        calibrator.add(0.0, positive)
    assert calibrator.is_warm(64)
    while calibrator.num_positive > MIN_RECENT_LABELS:
        calibrator.add(0.0, False)
        assert calibrator.is_warm(64)
    while calibrator.num_positive >= MIN_RECENT_LABELS:
        calibrator.add(0.0, False)
    assert not calibrator.is_warm(MIN_RECENT_LABELS)
    assert calibrator.is_warm(MIN_RECENT_LABELS - 1)
    for _ in range(64 - MIN_RECENT_LABELS):
        calibrator.add(0.0, True)
    assert not calibrator.is_warm(64)
    calibrator.add(0.0, True)
    assert calibrator.is_warm(64)


SHAPES = {
    "normal": (lambda rng: rng.gauss(0, 1), lambda x: 1 / (1 + math.exp(0.8 - 1.7 * x)), 0.8),
    "bimodal": (lambda rng: rng.gauss(-2 if rng.random() < 0.6 else 2, 0.5), lambda x: 0.1 if x < 0 else 0.7, 1.6),
    "heavy tails": (
        lambda rng: rng.gauss(0, 1) / math.sqrt(rng.expovariate(1)), lambda x: 0.1 + 0.6 / (1 + math.exp(-x)), 1.6,
    ),
    "hump": (lambda rng: rng.gauss(0, 1), lambda x: 0.05 + 0.6 * math.exp(-2 * x * x), 1.6),
    "valley": (lambda rng: rng.gauss(0, 1), lambda x: min(0.9, 0.1 + 0.25 * x * x), 1.6),
}  # fmt: skip


@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_curve_helps_where_it_is_right_and_does_no_harm_where_it_is_wrong(shape):
    """Squared error over four streams of 2,048 labels, against bins alone."""
    draw, truth, most = SHAPES[shape]
    errors = {"combined": 0.0, "paper": 0.0}
    for seed in range(4):
        for method in errors:
            rng, calibrator = random.Random(seed), Calibrator("confidence", method=method)  # both with the same scale
            for _ in range(2048):
                score = draw(rng)
                calibrator.observe(score)
                calibrator.add(score, rng.random() < truth(score))
            errors[method] += sum(
                (calibrator.success_probability(score) - truth(score)) ** 2 for score in (draw(rng) for _ in range(500))
            )
    assert math.sqrt(errors["combined"] / errors["paper"]) < most
