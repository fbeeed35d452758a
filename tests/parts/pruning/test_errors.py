"""Fields of pruning that do not fit together are a 400 that names field, values and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_errors import body, check_error, post_beside_another
from vllm_rollout.config import MAX_DETECTION_LENGTH


def pruning(**fields: Any) -> dict[str, Any]:
    return body(pruning={"detection_length": 8, **fields}, redundancy=2)


BAD_PRUNING = {
    # name: body, param, words of the message
    "empty": (body(pruning={}), "pruning.detection_length", ["required", f"1 to {MAX_DETECTION_LENGTH}"]),
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
    "unknown_field": (pruning(keep=0.5), "pruning.keep", ["not a field", "keep_ratio"]),
    "lengths_twice": (pruning(detection_length=[8, 8], mode="shadow"), "pruning.detection_length", ["different ones"]),
    "lengths_that_would_prune": (
        pruning(detection_length=[8, 4], mode="active"), "pruning.detection_length",
        ["several lengths are compared in shadow mode only"],
    ),
    "nothing_to_spare": (
        body(pruning={"detection_length": 8}), "pruning.allow_fewer",
        ["nothing could ever be pruned", "all 2 candidates", "(redundancy)", "pruning.allow_fewer to true"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PRUNING)
async def test_bad_pruning_is_explained(http, engine: FakeEngine, name):
    bad, param, words = BAD_PRUNING[name]
    check_error(await post_beside_another(http, engine, json=bad), 400, param, words)
