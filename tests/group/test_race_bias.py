"""What races make of labels, and what audit groups take back of it."""

from __future__ import annotations

from statistics import NormalDist, fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import audits
from vllm_rollout.group.learning import Learning
from vllm_rollout.group.odds import shifted
from vllm_rollout.group.race_bias import MAX_OFFSET, ORIGINS, RaceBias


def bias(**settings) -> dict[str, float]:
    found = audits.errors(num_seeds=3, num_groups=900, **settings)
    return {name: fmean(errors) for name, errors in found.items()}


@pytest.mark.parametrize(("plan", "longer"), [(audits.RACED, 0.5), (audits.RACED, 1.0), (audits.PRUNED, 0.5)])
def test_with_audits_nothing_is_believed_that_the_race_made(plan, longer):
    without = bias(plan=plan, audit_ratio=0.0, longer=longer)
    assert min(without["calibrated"], without["report"]) > 0.035, without
    audited = bias(plan=plan, audit_ratio=0.1, longer=longer)
    assert max(map(abs, audited.values())) < 0.02, audited


def test_where_length_says_nothing_audits_change_nothing():
    audited = bias(plan=audits.RACED, audit_ratio=0.1, longer=0.0)
    assert max(map(abs, audited.values())) < 0.02, audited


def test_the_offset_is_that_of_the_odds():
    bias = RaceBias()
    assert bias.offset == bias.raced_offset == 0
    for _ in range(4000):
        for positive, origin in (
            (True, "race"),
            (False, "race"),
            (True, "audit"),
            (False, "audit"),
            (False, "audit"),
            (False, "audit"),
        ):
            bias.add(positive, 1.0, origin)
    report = bias.report()
    assert report.positive_ratio == pytest.approx(0.25, abs=0.001)
    assert report.raced_positive_ratio == pytest.approx(0.5, abs=0.001)
    assert shifted(0.5, bias.raced_offset) == pytest.approx(0.25, abs=0.003)
    assert shifted(1 / 3, bias.offset) == pytest.approx(0.25, abs=0.003), "labels of both kinds: a third succeeds"


def test_few_audits_are_believed_a_little():
    bias = RaceBias()
    for number in range(1000):
        bias.add(number % 2 == 0, 1.0, "race")
    bias.add(False, 1.0, "audit")
    assert -0.2 < bias.offset < 0


def test_where_nobody_races_audits_are_no_other_labels():
    bias = RaceBias()
    for number in range(1000):
        bias.add(number % 4 == 0, 1.0, "plain")
    for number in range(50):
        bias.add(number % 2 == 0, 1.0, "plain_audit")  # by chance
    assert bias.offset == bias.raced_offset == 0
    report = bias.report()
    assert report.num_labels == pytest.approx(50, rel=0.01)
    assert report.positive_ratio == pytest.approx(0.5, rel=0.01)
    assert report.raced_positive_ratio == pytest.approx(0.25, rel=0.01)


def test_labels_of_races_are_corrected_beside_plain_ones():
    """A tenth of the labels is of races, where half succeed in place of a quarter."""
    bias = RaceBias()
    for number in range(20_000):
        bias.add(number % 4 == 0, 1.0, "plain")
        if number % 10 == 0:
            bias.add(number % 20 == 0, 1.0, "race")
            bias.add(number % 40 == 0, 1.0, "audit")
    assert shifted(0.5, bias.raced_offset) == pytest.approx(0.25, abs=0.01)
    taught = (20_000 * 0.25 + 2000 * 0.5 + 2000 * 0.25) / 24_000
    assert shifted(taught, bias.offset) == pytest.approx(0.25, abs=0.003)


def test_a_bias_of_before_there_were_plain_labels_is_read():
    assert RaceBias.from_state([[3.0, 1.0], [2.0, 2.0]]).raced_offset < 0


origins = st.sampled_from(ORIGINS)


@given(st.lists(st.tuples(st.booleans(), st.floats(1, 20), origins), max_size=60))
def test_offsets_are_bounded_and_a_restored_bias_goes_on(labels):
    bias = RaceBias()
    for positive, weight, origin in labels:
        bias.add(positive, weight, origin)
    assert abs(bias.offset) <= MAX_OFFSET
    restored = RaceBias.from_state(bias.to_state())
    for each in (bias, restored):
        each.add(True, 2.0, "audit")
    assert (restored.offset, restored.report()) == (bias.offset, bias.report())


@given(st.floats(0.001, 0.999), st.floats(-MAX_OFFSET, MAX_OFFSET))
def test_a_shifted_probability_is_one(q, offset):
    assert 0 < shifted(q, offset) < 1
    assert shifted(shifted(q, offset), -offset) == pytest.approx(q)


def test_the_stream_is_what_it_says():
    """Of the first 8 of 16, more are right than of all, as often as the normal distribution has it."""
    settings = {"plan": audits.RACED, "audit_ratio": 0.0, "longer": 0.5, "num_groups": 2000, "seed": 1}
    seen = audits.stream(Learning(16), **settings)
    found = [each[-1] for each in seen if each[0] == "trajectory"]
    expected = share_of_right_among_first(0.5)
    assert fmean(found) == pytest.approx(expected, abs=0.02)


def share_of_right_among_first(longer: float) -> float:
    """In the limit of large groups: the shorter half."""
    right, wrong = NormalDist(0, audits.SPREAD), NormalDist(longer, audits.SPREAD)
    low, high = -5.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        below = audits.RATE * right.cdf(middle) + (1 - audits.RATE) * wrong.cdf(middle)
        low, high = (middle, high) if below < 0.5 else (low, middle)
    return audits.RATE * right.cdf(low) / 0.5


def test_audits_by_the_answer_cost_what_they_say():
    """Ten requests of 64 prompts: one audited group of each holds it up, or all of one request hold up that one."""
    by_group, by_rollout = (audits.cost(64, unit, num_requests=200) for unit in ("group", "rollout"))
    assert by_group["wait"]["raced"] == by_rollout["wait"]["raced"] < 0.6
    assert by_rollout["wait"]["audited"] < by_group["wait"]["audited"] < 1
    assert by_rollout["tokens"]["audited"] == pytest.approx(by_group["tokens"]["audited"], abs=0.05)
