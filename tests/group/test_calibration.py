import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.group.calibration import Calibrator


def logit(s: float) -> float:
    """The score whose s' is `s`."""
    return math.log(s / (1 - s))


def a4(labels: list[tuple[float, bool, float]], num_bins: int, smoothing: float, spread: int = 0) -> list[float]:
    """ARRoL A.4 on (s', positive, weight), with spread = 0 as it is printed."""

    def count(positive: bool, b: int) -> float:
        bins = [(min(num_bins - 1, math.floor(num_bins * s)), w) for s, y, w in labels if y == positive]
        return sum(w * max(0.0, 1 - abs(b - own) / (spread + 1)) for own, w in bins)

    total = {y: sum(count(y, b) for b in range(num_bins)) for y in (True, False)}
    weight = {y: sum(w for _, positive, w in labels if positive == y) for y in (True, False)}
    prior = weight[True] / (weight[True] + weight[False])

    def likelihood(positive: bool, b: int) -> float:
        return (count(positive, b) + smoothing) / (total[positive] + smoothing * num_bins)

    return [
        prior * likelihood(True, b) / (prior * likelihood(True, b) + (1 - prior) * likelihood(False, b))
        for b in range(num_bins)
    ]


def test_success_probability_by_hand():
    """Prior 4/6. Below: likelihoods (1+1)/(4+2) and (2+1)/(2+2). Above: (3+1)/(4+2) and (0+1)/(2+2)."""
    calibrator = Calibrator(num_bins=2, spread=0)
    for score, positive in [(2, True), (3, True), (0.5, True), (-1, True), (-1, False), (-2, False)]:
        calibrator.add(score, positive)
    assert calibrator.table() == pytest.approx((8 / 17, 16 / 19))
    assert calibrator.success_probability(-0.1) == calibrator.table()[0]
    assert calibrator.success_probability(0.1) == calibrator.table()[1]
    assert (calibrator.num_positive, calibrator.num_negative) == (4, 2)


def test_weights_count_in_likelihoods_and_prior():
    """A negative of weight 3: prior 1/4, likelihoods above (1+1)/(1+2) and (0+1)/(3+2)."""
    calibrator = Calibrator(num_bins=2, spread=0)
    calibrator.add(1.0, True)
    calibrator.add(-1.0, False, weight=3.0)
    assert calibrator.success_probability(1.0) == pytest.approx((1 / 4 * 2 / 3) / (1 / 4 * 2 / 3 + 3 / 4 * 1 / 5))
    assert (calibrator.num_positive, calibrator.num_negative) == (1, 1)


def test_neighbours_share_labels_by_a_triangle():
    """A positive in bin 1 of 4 counts 1/2, 1, 1/2, 0; the negative in bin 3 counts 0, 0, 1/2, 1."""
    calibrator = Calibrator(num_bins=4, spread=1)
    calibrator.add(logit(0.3), True)
    calibrator.add(logit(0.8), False)
    positive = [(c + 1) / (2 + 4) for c in (0.5, 1, 0.5, 0)]
    negative = [(c + 1) / (1.5 + 4) for c in (0, 0, 0.5, 1)]
    assert calibrator.table() == pytest.approx([p / (p + n) for p, n in zip(positive, negative, strict=True)])


labels = st.lists(
    st.tuples(st.floats(0.01, 0.99), st.booleans(), st.integers(1, 20).map(float)), min_size=1, max_size=60
)


@settings(max_examples=30, deadline=None)
@given(labels, st.integers(1, 12), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 40), st.sampled_from([0, 1, 3]))
def test_table_is_a4_over_the_window(labels, num_bins, smoothing, window, spread):
    calibrator = Calibrator(num_bins=num_bins, window=window, smoothing=smoothing, spread=spread)
    for s, positive, weight in labels:
        calibrator.add(logit(s), positive, weight)
    newest = [(calibrator.normalize(logit(s)), y, w) for s, y, w in labels[-window:]]
    assert calibrator.table() == pytest.approx(a4(newest, num_bins, smoothing, spread))
    assert calibrator.num_positive == sum(y for _, y, _ in newest)


def test_normalize_is_the_sigmoid_for_logits_of_any_size():
    calibrator = Calibrator()
    assert calibrator.normalize(0.0) == 0.5
    assert calibrator.normalize(1.5) == pytest.approx(1 / (1 + math.exp(-1.5)))
    assert calibrator.normalize(1e9) == 1.0
    assert calibrator.normalize(-1e9) == pytest.approx(0.0)
    calibrator.add(1e9, True)
    calibrator.add(-1e9, False)
    assert calibrator.success_probability(1e9) > 0.5 > calibrator.success_probability(-1e9)


def test_prior_follows_the_stream_when_the_window_is_full():
    """Two buffers of a fixed size each would say 1/2 here."""
    calibrator = Calibrator(window=100)
    for i in range(1000):
        calibrator.add(0.0, i % 10 == 0)
    assert calibrator.num_positive == 10
    assert calibrator.success_probability(0.0) < 0.2


def test_without_labels_everything_is_even():
    assert set(Calibrator(num_bins=4).table()) == {0.5}


def test_confidence_has_no_scale_of_its_own():
    """The same scores in other units, or moved, give the same probabilities."""
    rng = random.Random(0)
    stream = [(rng.gauss(0, 1), rng.random() < 0.4) for _ in range(300)]
    tables = []
    for shift, unit in [(0, 1), (4, 0.0625), (1024, 32)]:
        calibrator = Calibrator("confidence")
        for score, positive in stream:
            calibrator.observe(shift + unit * score)
            calibrator.add(shift + unit * score, positive)
        tables.append([calibrator.success_probability(shift + unit * score) for score, _ in stream])
    assert tables[1] == tables[0]
    assert tables[2] == tables[0]


def test_a_drift_of_the_scale_bins_all_windows_anew():
    calibrator = Calibrator("confidence", num_bins=8, num_recent=64, spread=0)
    for i in range(64):
        calibrator.observe(10 + i % 2)
        calibrator.add(10 + i % 2, i % 2 == 1)
    assert calibrator.normalize(10.5) == 0.5
    for i in range(64):
        calibrator.observe(20 + 4 * (i % 2))
    assert calibrator.normalize(22.0) == 0.5
    assert calibrator.normalize(24.0) == pytest.approx(1 / (1 + math.exp(-1)))
    old = [(calibrator.normalize(10 + i % 2), i % 2 == 1, 1.0) for i in range(64)]
    assert calibrator.table() == pytest.approx(a4(old, 8, 1.0))
    assert sum(n for _, n in calibrator.points()) == 64


def test_equal_confidences_are_calibrated_to_the_prior():
    calibrator = Calibrator("confidence")
    for i in range(40):
        calibrator.observe(7.0)
        calibrator.add(7.0, i % 4 == 0)
    assert calibrator.success_probability(7.0) == pytest.approx(0.25, abs=0.1)


def test_points_are_the_newest_scores_with_or_without_labels():
    calibrator = Calibrator(num_bins=2, num_recent=3)
    for score in (5.0, -1.0, 1.0, 2.0):
        calibrator.observe(score)
    calibrator.add(1.0, True)
    assert calibrator.points() == [(calibrator.table()[0], 1.0), (calibrator.table()[1], 2.0)]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused(score):
    with pytest.raises(ValueError, match="finite"):
        Calibrator().add(score, True)
    with pytest.raises(ValueError, match="finite"):
        Calibrator().observe(score)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_are_positive_numbers(weight):
    with pytest.raises(ValueError, match="weight"):
        Calibrator().add(0.0, True, weight)


@pytest.mark.parametrize("signal", ["head", "confidence"])
def test_restored_calibrator_goes_on_as_the_saved_one(signal):
    rng = random.Random(3)
    saved = Calibrator(signal, window=50, num_recent=40)

    def feed(calibrator: Calibrator, stream: list[tuple[float, bool, float]]) -> None:
        for score, positive, weight in stream:
            calibrator.observe(score)
            calibrator.add(score, positive, weight)

    feed(saved, [(rng.gauss(5, 2), rng.random() < 0.5, rng.uniform(1, 20)) for _ in range(130)])
    state = json.loads(json.dumps(saved.to_state()))
    restored = Calibrator.from_state(state, window=50, num_recent=40)
    assert restored.to_state() == saved.to_state()
    assert restored.table() == saved.table()
    more = [(rng.gauss(9, 4), rng.random() < 0.5, rng.uniform(1, 20)) for _ in range(77)]
    feed(saved, more)
    feed(restored, more)
    assert restored.table() == saved.table()
    assert restored.points() == saved.points()


def test_restoring_into_smaller_windows_keeps_the_newest():
    saved = Calibrator()
    for i in range(20):
        saved.observe(float(i))
        saved.add(float(i), i >= 15)
    restored = Calibrator.from_state(saved.to_state(), window=5, num_recent=4)
    assert (restored.num_positive, restored.num_negative) == (5, 0)
    assert restored.to_state()["recent"] == [16.0, 17.0, 18.0, 19.0]


@pytest.mark.parametrize("change", [{"scale": [0.0, 0.0]}, {"scale": [math.nan, 1.0]}, {"labels": [[0.0, 1, -1.0]]}])
def test_states_that_were_never_saved_are_refused(change):
    with pytest.raises(ValueError, match=r"scale|finite|weight"):
        Calibrator.from_state({**Calibrator().to_state(), **change})
