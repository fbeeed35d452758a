"""A server that runs without pruning: rollouts that it serves, and fields that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.left_out import parts_left_out
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.kernel.xargs import plan_from_xargs

REFUSAL = "this server runs without the part 'pruning'. Leave it out, or start the server with the part."
BODY: dict[str, Any] = {"prompts": [{"prompt": "a"}], "group_size": 2, "redundancy": 2}


@pytest.fixture(autouse=True)
def without_pruning() -> Iterator[None]:
    with parts_left_out(["pruning"]):
        yield


async def test_rollouts_run_and_have_no_scores(engine: FakeEngine):
    async with http_of(make_app(engine, audit_ratio=1.0)) as http:
        answer = (await http.post("/v1/rollouts", json={**BODY, "audit_ratio": 0.0})).json()
    (group,) = answer["groups"]
    assert (group["status"], group["audit"], answer["detection_length"]) == ("complete", False, None)
    assert [trajectory["survival_probability"] for trajectory in group["trajectories"]] == [None, None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pruning": {"detection_length": 8}}, "pruning"),
        ({"audit_ratio": 0.5}, "audit_ratio"),
        ({"redundancy": "auto", "audit_ratio": 0.5}, "audit_ratio"),
    ],
)
async def test_a_field_of_pruning_in_a_body_is_refused(engine: FakeEngine, fields: dict[str, Any], param: str):
    async with http_of(make_app(engine)) as http:
        response = await http.post("/v1/rollouts", json={**BODY, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (400, param, f"{param}: {REFUSAL}")


@pytest.mark.parametrize("group", [{}, {"rollout_group_size": 2, "rollout_num_candidates": 4}])
@pytest.mark.parametrize("field", ["rollout_detection_length", "rollout_keep_ratio"])
def test_a_field_of_pruning_in_an_openai_request_is_refused(group: dict[str, object], field: str):
    with pytest.raises(PlanError) as error:
        plan_from_xargs({**group, field: 0.5}, 1, max_candidates=8)
    assert (error.value.field, str(error.value)) == (field, f"{field}: {REFUSAL}")


async def test_a_group_of_sessions_with_pruning_is_refused(engine: FakeEngine):
    async with http_of(make_app(engine)) as http:
        response = await http.post("/v1/groups", json={"group_size": 2, "pruning": {"detection_length": 8}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "pruning.detection_length")
    assert REFUSAL in response.json()["error"]["message"]
