"""Runs, rounds and feeds return whole groups, so they refuse pruning that leaves fewer trajectories."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine

PRUNING = {"pruning": {"detection_length": 8, "allow_fewer": True}}
RUN = {"group_size": 2, "prompts_per_round": 2}
FEED = {"group_size": 2, "batch": 2}
IN_RUNS, IN_FEEDS = "pruning.allow_fewer: cannot be true in a run", "pruning.allow_fewer: groups of a feed are whole"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/runs", {**RUN, **PRUNING}, IN_RUNS),
        ("/v1/runs", {**RUN, "sessions": PRUNING}, f"sessions.{IN_RUNS}"),
        ("/v1/runs/a/rounds", {"prompts": [{"id": "a", "prompt": "a"}], **PRUNING}, IN_RUNS),
        ("/v1/feeds", {**FEED, **PRUNING}, IN_FEEDS),
        ("/v1/feeds", {**FEED, "sessions": PRUNING}, f"sessions.{IN_FEEDS}"),
    ],
)
async def test_pruning_that_leaves_fewer_is_refused(
    engine: FakeEngine, path: str, body: dict[str, Any], words: str
) -> None:
    async with http_of(make_app(engine)) as http:
        response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, words.partition(":")[0])
    assert error["message"].startswith(words)
