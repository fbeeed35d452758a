"""The benchmark of audit groups: its streams are biased without them, and what they cost is counted."""

from statistics import fmean

import pytest

from benchmarks import audits


def test_races_bias_what_is_believed_and_audits_take_it_back():
    """Two streams of 600 groups, fixed seeds; wrong answers longer by one in log length."""
    found = {
        ratio: audits.errors(plan=audits.RACED, longer=1.0, audit_ratio=ratio, num_seeds=2, num_groups=600)
        for ratio in (0.0, 0.2)
    }
    for measure in ("calibrated", "report"):
        assert fmean(found[0.0][measure]) > 0.1
        assert abs(fmean(found[0.2][measure])) < 0.05
    assert "estimate" not in found[0.0]
    assert abs(fmean(found[0.2]["estimate"])) < 0.05
    fair = audits.errors(plan=audits.RACED, longer=0.0, audit_ratio=0.0, num_seeds=2, num_groups=600)
    assert abs(fmean(fair["report"])) < 0.05


def test_an_audited_request_waits_as_long_as_one_without_spares():
    every = audits.cost(4, "group", ratio=1.0, num_requests=50)
    assert every["wait"]["audited"] == every["tokens"]["audited"] == pytest.approx(1.0)
    assert every["wait"]["raced"] < 0.5 < 1.0 < every["tokens"]["raced"]
    none = audits.cost(4, "rollout", ratio=0.0, num_requests=50)
    assert none["wait"]["audited"] == none["wait"]["raced"]
    by_unit = {
        unit: audits.cost(16, unit, ratio=0.1, num_requests=200)["wait"]["audited"] for unit in ("group", "rollout")
    }
    assert by_unit["rollout"] < by_unit["group"]
