import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.pruning.rules.calibration import Calibrator
from vllm_rollout.parts.pruning.rules.success_bins import paper_table


def test_the_papers_method_is_a4_over_the_window():
    """Weights count in likelihoods and prior."""
    calibrator = Calibrator(num_bins=2, spread=0, window=6, method="paper")
    for score, positive in [(9, False), (2, True), (3, True), (0.5, True), (-1, True), (-1, False), (-2, False)]:
        calibrator.observe(100.0)  # it takes logits as they are, whatever their scale
        calibrator.add(score, positive, weight=1.0 if positive else 3.0)
    assert calibrator.table() == paper_table([6, 0], [1, 3], 0, 1.0)
    assert calibrator.success_probability(-0.1) == calibrator.table()[0]
    assert calibrator.success_probability(0.1) == calibrator.table()[1]
    assert (calibrator.num_positive, calibrator.num_negative) == (4, 2)


def test_weighted_labels_say_what_as_many_labels_would():
    """A weight says whom a label stands for, not how sure it is: all weights doubled change nothing."""
    tables = []
    for weight in (1.0, 2.0):
        calibrator, rng = Calibrator(), random.Random(1)
        for _ in range(300):
            calibrator.add(rng.gauss(0, 1), rng.random() < 0.3, weight * rng.choice([1.0, 4.0]))
        tables.append(calibrator.table())
    assert tables[0] == tables[1]


label_lists = st.lists(
    st.tuples(st.floats(-4, 4), st.booleans(), st.integers(1, 20).map(float)), min_size=1, max_size=60
)


@settings(max_examples=50, deadline=None)
@given(label_lists, label_lists, st.randoms(use_true_random=False), st.sampled_from(["combined", "paper"]))
def test_a_table_depends_on_the_labels_in_the_window_and_not_on_their_order(old, new, rng, method):
    tables = []
    for labels in (new, rng.sample(new, len(new)), [*old, *new]):
        calibrator = Calibrator(window=len(new), method=method)
        for score in (-1.0, 0.0, 0.5, 2.0):
            calibrator.observe(score)
        for score, positive, weight in labels:
            calibrator.add(score, positive, weight)
        tables.append(calibrator.table())
        assert calibrator.num_positive == sum(y for _, y, _ in new)
        assert method == "paper" or all(0 < q < 1 for q in tables[-1])
    assert tables[0] == tables[1] == tables[2]


def test_prior_follows_the_stream_when_the_window_is_full():
    """Two buffers of a fixed size each would say 1/2 here."""
    calibrator = Calibrator(window=100)
    for i in range(1000):
        calibrator.add(0.0, i % 10 == 0)
    assert calibrator.num_positive == 10
    assert calibrator.success_probability(0.0) < 0.2


def test_confidence_has_no_scale_of_its_own():
    """Scores in other units, or shifted scores, give the same probabilities."""
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
    calibrator = Calibrator("confidence", num_bins=8, num_recent=64, spread=0, method="paper")
    for i in range(64):
        calibrator.observe(10 + i % 2)
        calibrator.add(10 + i % 2, i % 2 == 1)
    assert calibrator.standardize(10.5, 0) == pytest.approx(0, abs=0.04)
    for i in range(96):
        calibrator.observe(20 + 4 * (i % 2))
    assert calibrator.standardize(22.0, 0) == pytest.approx(0, abs=0.04)
    assert calibrator.standardize(24.0, 0) == pytest.approx(1, abs=0.05)
    negatives, positives = [0] * 8, [0] * 8
    for i in range(64):
        normalized = 1 / (1 + math.exp(-calibrator.standardize(10 + i % 2, 0)))
        (positives if i % 2 else negatives)[int(8 * normalized)] += 1
    assert calibrator.table() == paper_table(negatives, positives, 0, 1.0)
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


@pytest.mark.parametrize(
    ("score", "weight", "message"),
    [(math.nan, 1.0, "finite"), (math.inf, 1.0, "finite")]
    + [(0.0, weight, "weight") for weight in (0.0, -1.0, math.nan, math.inf)],
)
def test_scores_that_are_no_numbers_and_weights_that_are_not_positive_are_refused(score, weight, message):
    with pytest.raises(ValueError, match=message):
        Calibrator().add(score, True, weight)
    if message == "finite":
        with pytest.raises(ValueError, match=message):
            Calibrator().observe(score)


@pytest.mark.parametrize("signal", ["head", "confidence"])
def test_restored_calibrator_goes_on_as_the_saved_one(signal):
    rng = random.Random(3)
    saved = Calibrator(signal, window=50, num_recent=40)

    def feed(calibrator: Calibrator, stream: list[tuple[float, bool, float, int]]) -> None:
        for i, (score, positive, weight, version) in enumerate(stream):
            calibrator.observe(score, version)
            calibrator.add(score, positive, weight, version - (i % 7 == 0))  # some rewards come late

    feed(saved, [(rng.gauss(5, 2), rng.random() < 0.5, rng.uniform(1, 20), 1 + i // 30) for i in range(130)])
    state = json.loads(json.dumps(saved.to_state()))
    restored = Calibrator.from_state(state, window=50, num_recent=40)
    assert restored.to_state() == saved.to_state()
    assert restored.table() == saved.table()
    more = [(rng.gauss(9, 4), rng.random() < 0.5, rng.uniform(1, 20), 4 + i // 30) for i in range(77)]
    feed(saved, more)
    feed(restored, more)
    assert restored.table() == saved.table()
    assert restored.points() == saved.points()
    assert [restored.is_warm(n) for n in range(130)] == [saved.is_warm(n) for n in range(130)]


def test_restoring_into_smaller_windows_keeps_the_newest():
    saved = Calibrator()
    for i in range(20):
        saved.observe(float(i))
        saved.add(float(i), i >= 15)
    restored = Calibrator.from_state(saved.to_state(), window=5, num_recent=4)
    assert (restored.num_positive, restored.num_negative) == (5, 0)
    assert [score for score, _ in restored.to_state()["recent"]] == [16.0, 17.0, 18.0, 19.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": []}, "num_versions"),
        ({"scales": [[0, 0, 1, 0, 0, 0.0, 0, 0, 0]]}, "width of a scale"),
        ({"scales": [[0, 0, 1, 0, math.nan, 1.0, 0, 0, 0]]}, "center of a scale"),
        ({"scales": [[0, 0, 1, 0, 0, 1.0, 0, 0]]}, "list of 9"),
        ({"scales": [[3, 0, 1, 0, 0, 1, 0, 0, 0]] * 2, "num_versions": 2}, "different versions"),
        ({"present": 1}, "present scale"),
        ({"labels": [[0.0, 1, -1.0, 0, "race"]]}, "weight of a label"),
        ({"labels": [[0.0, 1, 1.0, 1, "race"]]}, "scale of a label"),
        ({"recent": [[0.0, -1]]}, "scale of a recent score"),
        ({"recent": [0.0]}, "must be a list"),
        ({"num_seen": [1]}, "num_seen"),
        ({"more": 1}, "has the fields"),
        ({"labels": [[0.0, 1, 1.0, 0, "rally"]]}, "origin of a label"),
        ({"intercepts": [[0.0, 2.0]]}, "intercepts of a calibrator"),
        ({"intercepts": [[4.0, 2.0], [0.0, 2.0]]}, "an intercept"),
        ({"intercepts": [[0.0, 2.0], [0.0, 1.0]]}, "precision of an intercept"),
    ],
)
def test_states_that_were_never_saved_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Calibrator.from_state({**Calibrator().to_state(), **change})
