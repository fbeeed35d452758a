"""Every bad field of pruning in a body is a 400 that names field, value, what is allowed and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_errors import JSON, body, check_error, post_beside_another, raw
from vllm_rollout.config import MAX_DETECTION_LENGTH
from vllm_rollout.kernel.rules.fields import MAX_MIN_LABELS


def pruning(**fields: Any) -> dict[str, Any]:
    return body(pruning={"detection_length": 8, **fields}, redundancy=2)


BAD_PRUNING = {
    # name: body, param, words of the message
    "number": (body(pruning=8), "pruning", ["got 8", "detection_length"]),
    "empty": (body(pruning={}), "pruning.detection_length", ["required", f"1 to {MAX_DETECTION_LENGTH}"]),
    "detection_length_0": (pruning(detection_length=0), "pruning.detection_length", ["got 0", "from 1 to"]),
    "detection_length_huge": (
        pruning(detection_length=MAX_DETECTION_LENGTH + 1), "pruning.detection_length",
        [f"got {MAX_DETECTION_LENGTH + 1}", f"1 to {MAX_DETECTION_LENGTH}"],
    ),
    "keep_ratio_0": (pruning(keep_ratio=0), "pruning.keep_ratio", ["got 0", "(0, 1]"]),
    "keep_ratio_string": (pruning(keep_ratio="half"), "pruning.keep_ratio", ["got half", "(0, 1]"]),
    "target_1": (pruning(target_positive_ratio=1), "pruning.target_positive_ratio", ["got 1", "(0, 1)"]),
    "strength_negative": (pruning(strength=-1), "pruning.strength", ["got -1", "[0, 1000]"]),
    "max_survival_above_1": (pruning(max_survival=1.1), "pruning.max_survival", ["got 1.1", "(0, 1]"]),
    "survival_crossed": (
        pruning(min_survival=0.6, max_survival=0.4), "pruning.min_survival",
        ["at most pruning.max_survival", "0.6 and 0.4"],
    ),
    "max_survival_below_default": (
        pruning(max_survival=0.01), "pruning.max_survival", ["pruning.min_survival", "0.05 and 0.01"],
    ),
    "keep_ratio_beyond_the_bounds": (
        pruning(keep_ratio=0.5, min_survival=0.3, max_survival=0.3), "pruning.keep_ratio",
        ["between pruning.min_survival and pruning.max_survival", "got 0.5", "0.3 and 0.3"],
    ),
    "rule_unknown": (pruning(rule="best"), "pruning.rule", ["got best", "'gradient' or 'paper'"]),
    "min_labels_beyond_memory": (
        pruning(min_labels=MAX_MIN_LABELS + 1), "pruning.min_labels", [f"1 to {MAX_MIN_LABELS}"],
    ),
    "unknown_field": (pruning(keep=0.5), "pruning.keep", ["not a field", "keep_ratio"]),
    "lengths_twice": (pruning(detection_length=[8, 8], mode="shadow"), "pruning.detection_length", ["different ones"]),
    "lengths_that_would_prune": (
        pruning(detection_length=[8, 4], mode="active"), "pruning.detection_length",
        ["several lengths are compared in shadow mode only"],
    ),
    "no_lengths": (pruning(detection_length=[]), "pruning.detection_length", ["at least 1 item"]),
    "many_lengths": (pruning(detection_length=[1] * 7), "pruning.detection_length", ["at most 6 items"]),
    "lengths_0": (pruning(detection_length=[0]), "pruning.detection_length.0", ["greater than or equal to 1"]),
    "length_word": (pruning(detection_length="best"), "pruning.detection_length", ["'auto'"]),
    "nothing_to_spare": (
        body(pruning={"detection_length": 8}), "pruning.allow_fewer",
        ["nothing could ever be pruned", "all 2 candidates", "(redundancy)", "pruning.allow_fewer to true"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PRUNING)
async def test_bad_pruning_is_explained(http, engine: FakeEngine, name):
    bad, param, words = BAD_PRUNING[name]
    check_error(await post_beside_another(http, engine, json=bad), 400, param, words)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-Infinity"])
@pytest.mark.parametrize("field", ["keep_ratio", "target_positive_ratio", "strength", "min_survival", "max_survival"])
async def test_numbers_that_are_not_finite_are_explained(http, engine: FakeEngine, field, number):
    fields = f'{{"pruning": {{"detection_length": 8, "{field}": {number}}}}}'.encode()
    response = await post_beside_another(http, engine, content=raw(fields), headers=JSON)
    check_error(response, 400, f"pruning.{field}", [])
