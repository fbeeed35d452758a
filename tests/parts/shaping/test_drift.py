"""Drift: decode steps against a cost model, judged range by range."""

from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.parts.shaping.rules.drift import DRIFT_SAMPLES, Drift

COST = CostModel(((0, PTLCurve((1, 64), (0.010, 0.073))),))
"""9 ms, and one more per candidate."""


def test_each_range_of_batch_sizes_is_judged_by_itself():
    drift = Drift(COST, model="m", profile="p", batch_sizes=(4, 6, 16))
    for _ in range(DRIFT_SAMPLES):
        assert drift.add(16, 0, COST.ptl(16, 0)) is None
    messages = [drift.add(size, 0, 2 * COST.ptl(size, 0)) for size in (4, 5, 6, 7) * (DRIFT_SAMPLES // 4)]
    assert [message is not None for message in messages] == [False] * (DRIFT_SAMPLES - 1) + [True]
    assert "batch sizes 4 to 7" in messages[-1]
    assert "16" not in messages[-1].partition("ms in the profile")[0]
    assert messages[-1].endswith("--batch-sizes 4,6")
    assert [(found.smallest, found.largest, round(found.ratio, 6)) for found in drift.ranges()] == [
        (4, 7, 2.0),
        (16, 31, 1.0),
    ]


def test_a_range_without_a_measured_batch_size_names_its_smallest():
    drift = Drift(COST, model="m", profile="p", batch_sizes=(1, 64))
    messages = [drift.add(9, 0, 1.0) for _ in range(DRIFT_SAMPLES)]
    assert messages[-1].endswith("--batch-sizes 8")
