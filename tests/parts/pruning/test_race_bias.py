"""Bias of labels by races, and its correction by audit groups."""

from __future__ import annotations

import json
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import audits
from vllm_rollout.parts.pruning.rules.calibration import Calibrator
from vllm_rollout.parts.pruning.rules.learning import Learning
from vllm_rollout.parts.pruning.rules.logistic import shifted
from vllm_rollout.parts.pruning.rules.race_bias import MAX_INTERCEPT, ORIGINS, Intercept


def bias(**settings) -> dict[str, float]:
    found = audits.errors(num_seeds=3, num_groups=900, **settings)
    return {name: fmean(errors) for name, errors in found.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(("plan", "longer"), [(audits.RACED, 0.0), (audits.RACED, 1.0), (audits.PRUNED, 0.5)])
def test_with_audits_nothing_is_believed_that_the_race_made(plan, longer):
    """If length says nothing about success, there is no bias to correct."""
    if longer:
        without = bias(plan=plan, audit_ratio=0.0, longer=longer)
        assert min(without["calibrated"], without["report"]) > 0.035, without
    audited = bias(plan=plan, audit_ratio=0.1, longer=longer)
    assert max(map(abs, audited.values())) < 0.02, audited


def test_the_intercept_is_the_most_likely_one():
    """Against a search, of labels that are foretold from 0.02 to 0.9."""
    rng, intercept, labels = Random(1), Intercept(), []
    for _ in range(1500):
        q = rng.uniform(0.02, 0.9)
        labels.append((q, rng.random() < shifted(q, -0.8)))
        intercept.learn(labels[-1][0], 1.0, labels[-1][1])

    def miss(value):
        return abs(sum(positive - shifted(q, value) for q, positive in labels))

    best = min((number / 500 for number in range(-800, 1)), key=miss)
    assert intercept.value == pytest.approx(best, abs=0.03)
    assert best == pytest.approx(-0.8, abs=0.15)


def raced(rate: float = 0.5, num: int = 1000, origin: str = "race") -> Calibrator:
    """A calibrator of scores that tell nothing; of such labels so many succeed."""
    calibrator = Calibrator()
    for number in range(num):
        calibrator.add(0.0, number % round(1 / rate) == 0, origin=origin)
    return calibrator


def q_of(calibrator: Calibrator) -> float:
    return calibrator.success_probability(0.0)


def test_few_audits_are_believed_a_little():
    calibrator = raced()
    calibrator.add(0.0, False, origin="audit")
    assert -0.3 < calibrator.offset < 0


def test_audits_do_not_teach_the_table_that_they_correct():
    """A whole rollout of audits, a quarter of the window, says a rate of 1/4; what was 1/2 is not corrected twice."""
    calibrator = raced()
    for number in range(512):
        calibrator.add(0.0, number % 4 == 0, origin="audit")
    assert q_of(calibrator) == pytest.approx(0.25, abs=0.01)
    assert (calibrator.num_positive, calibrator.num_negative) == (500, 500)


def test_audits_that_come_first_teach_until_races_do_and_are_foretold_then():
    calibrator = raced(0.25, 512, "audit")
    assert calibrator.is_warm(64)
    assert q_of(calibrator) == pytest.approx(0.25, abs=0.01)
    for number in range(1024):
        calibrator.add(0.0, number % 2 == 0, origin="race")
        assert calibrator.is_warm(64)
        assert 0.24 < q_of(calibrator) < 0.4
    assert q_of(calibrator) == pytest.approx(0.25, abs=0.015)
    assert calibrator.num_positive == 512, "of races alone"


def test_a_rate_that_rises_is_no_bias():
    """Audits come in batches, and the rate is another one each time; races are as right as audits."""
    rng, calibrator = Random(3), Calibrator()
    for rollout in range(40):
        rate = 0.2 + 0.015 * rollout
        for _ in range(256):
            calibrator.add(0.0, rng.random() < rate, origin="audit" if rollout % 10 == 0 else "race")
    assert abs(calibrator.offset) < 0.3
    assert q_of(calibrator) == pytest.approx(0.75, abs=0.04)


def test_where_nobody_races_audits_are_no_other_labels():
    calibrator = raced(0.25, 1000, "plain")
    for number in range(50):
        calibrator.add(0.0, number % 2 == 0, origin="plain_audit")  # by chance
    assert calibrator.offset == 0
    assert calibrator.num_positive + calibrator.num_negative == 1050


def test_labels_are_corrected_in_the_share_that_is_raced_and_no_longer_when_races_end():
    calibrator = Calibrator()
    for number in range(4000):
        calibrator.add(0.0, number % 4 == 0, origin="plain")
        calibrator.add(0.0, number % 2 == 0, origin="race")
        if number % 5 == 0:
            calibrator.add(0.0, number % 20 == 0, origin="audit")
    assert shifted(3 / 8, calibrator.offset) == pytest.approx(0.25, abs=0.015)
    assert calibrator.offset == pytest.approx(calibrator.intercept.value / 2, rel=0.01)
    for number in range(4000):
        calibrator.add(0.0, number % 4 == 0, origin="plain")
    assert calibrator.offset == 0


def test_a_signal_without_audits_believes_those_of_another():
    learning, scores = Learning(16), Random(2)
    for number in range(800):
        for origin, positive in (("race", number % 2 == 0), ("audit", number % 4 == 0)):
            # the head is trained when nobody is audited any more
            if origin == "race" or number < 400:
                observation = audits.observation(None if number < 400 else scores.gauss(0, 1), 5.0)
                learning.reward(observation, learning.value(observation, 1.0), 9, positive, "g", False, origin)
    head, confidence = learning.calibrators["head"], learning.calibrators["confidence"]
    assert head.offset == pytest.approx(confidence.offset, abs=0.05)
    assert head.offset < -0.5
    assert fmean(head.table()) == pytest.approx(0.25, abs=0.06)


@given(st.lists(st.tuples(st.booleans(), st.floats(1, 20), st.sampled_from(ORIGINS), st.floats(-4, 4)), max_size=120))
def test_offsets_are_bounded_and_a_restored_calibrator_goes_on(labels):
    calibrator = Calibrator()
    for positive, weight, origin, score in labels:
        calibrator.add(score, positive, weight, 0, origin)
    assert abs(calibrator.offset) <= MAX_INTERCEPT
    restored = Calibrator.from_state(json.loads(json.dumps(calibrator.to_state())))
    for each in (calibrator, restored):
        for number in range(20):
            each.add(0.5, number % 2 == 0, 2.0, 0, "race")
        each.add(0.5, True, 1.0, 0, "audit")
    assert restored.table() == calibrator.table()
    assert restored.to_state() == calibrator.to_state()


@given(st.floats(0.001, 0.999), st.floats(-MAX_INTERCEPT, MAX_INTERCEPT))
def test_a_shifted_probability_is_one(q, offset):
    assert 0 < shifted(q, offset) < 1
    assert shifted(shifted(q, offset), -offset) == pytest.approx(q)


def test_audits_by_the_answer_cost_what_they_say():
    """Ten requests of 64 prompts: one audited group of each holds it up, or all of one request hold up that one."""
    by_group, by_rollout = (audits.cost(64, unit, num_requests=200) for unit in ("group", "rollout"))
    assert by_group["wait"]["raced"] == by_rollout["wait"]["raced"] < 0.6
    assert by_rollout["wait"]["audited"] < by_group["wait"]["audited"] < 1
    assert by_rollout["tokens"]["audited"] == pytest.approx(by_group["tokens"]["audited"], abs=0.05)
