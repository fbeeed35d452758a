"""The metric `clients_left` where a feed stops its groups by itself."""

from __future__ import annotations

import pytest

from tests.kernel.http.test_metrics import samples
from tests.parts.feeds.test_feeds import make, put, update
from tests.support.waiting import eventually

LEFT = "clients_left_total.rollout"


@pytest.mark.parametrize("ends", ["deleted", "too old"])
async def test_a_group_that_its_feed_stops_has_no_client_that_left(app, http, engine, ends) -> None:
    engine.weight_version, engine.step_s, engine.lengths = "step-0", 0.02, {0: 400, 1: 400}
    await make(http, max_staleness=0, on_stale="drop")
    await put(http, 0, 3)
    await eventually(lambda: engine.num_running > 0)
    if ends == "deleted":
        await http.delete("/v1/feeds/a")
    else:
        await update(app, engine, "step-1")
        await update(app, engine, "step-2")
    await eventually(lambda: engine.num_running == 0)
    assert engine.num_aborted >= 2
    assert (await samples(http)).get(LEFT, 0.0) == 0.0
