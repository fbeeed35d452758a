"""A server with all parts: its endpoints, their statuses and the fields that ask parts."""

from __future__ import annotations

import pytest

from tests.kernel.http.conftest import make_app
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel import parts
from vllm_rollout.kernel.http.plan_port import ASKS_A_PART

APP = make_app(FakeEngine())


ENDPOINTS = {
    ("/v1/rollouts", "post"), ("/v1/rollouts/{rollout_id}/rewards", "post"), ("/v1/rewards", "post"),
    ("/v1/votes", "post"),
    ("/v1/quality_head", "get"), ("/v1/quality_head", "put"), ("/v1/quality_head/report", "get"),
    ("/v1/quality_head/detection_lengths", "get"),
    ("/v1/rollouts/prompts", "get"), ("/v1/rollouts/state", "get"), ("/v1/rollouts/state", "put"),
    ("/v1/runs", "get"), ("/v1/runs", "post"), ("/v1/runs/{run_id}", "get"), ("/v1/runs/{run_id}", "delete"),
    ("/v1/runs/{run_id}/rounds", "post"), ("/v1/runs/{run_id}/rounds/{number}", "delete"),
    ("/v1/engines", "get"), ("/v1/engines/advice", "get"), ("/v1/engines/{rank}/drain", "post"),
    ("/v1/engines/{rank}/restore", "post"), ("/v1/weights/recompute", "post"),
    ("/v1/weights/adapter_version", "post"),
    ("/v1/groups", "post"), ("/v1/groups/{group_id}", "get"), ("/v1/groups/{group_id}", "delete"),
    ("/v1/sessions/events", "get"), ("/v1/sessions/{session_id}", "get"), ("/v1/sessions/{session_id}/finish", "post"),
    ("/v1/feeds", "get"), ("/v1/feeds", "post"), ("/v1/feeds/{feed_id}", "get"), ("/v1/feeds/{feed_id}", "delete"),
    ("/v1/feeds/{feed_id}/prompts", "post"), ("/v1/feeds/{feed_id}/batches", "post"),
    ("/v1/feeds/{feed_id}/events", "get"),
    ("/v1/rollouts/watch", "get"), ("/v1/rollouts/watch/{rollout_id}/{position}", "get"),
}  # fmt: skip


def test_openapi_describes_every_endpoint_with_its_errors():
    paths = APP.openapi()["paths"]
    operations = {(path, method): operation for path, methods in paths.items() for method, operation in methods.items()}
    assert operations.keys() == ENDPOINTS
    for operation in operations.values():
        assert operation["summary"]
        assert "422" not in operation["responses"]
        assert operation["responses"].keys() >= {"400", "404", "413", "500", "503", "default"}
        for status, answer in operation["responses"].items():
            if status >= "400":
                assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")


@pytest.mark.parametrize(
    ("path", "method", "statuses"),
    [
        ("/v1/rollouts", "post", {"409", "429"}),
        ("/v1/runs", "post", {"409", "429", "507"}),
        ("/v1/runs/{run_id}/rounds", "post", {"409", "410", "429", "504", "507"}),
        ("/v1/groups", "post", {"409", "429"}),
        ("/v1/quality_head", "put", {"401", "409", "507"}),
        ("/v1/rollouts/state", "put", {"401", "409", "507"}),
    ],
)
def test_openapi_has_the_statuses_that_the_page_names(path, method, statuses):
    assert APP.openapi()["paths"][path][method]["responses"].keys() >= statuses


def test_openapi_describes_bytes_as_bytes():
    paths = APP.openapi()["paths"]
    for path in ("/v1/quality_head", "/v1/rollouts/state"):
        assert paths[path]["get"]["responses"]["200"]["content"].keys() == {"application/octet-stream"}
        assert paths[path]["put"]["requestBody"]["content"].keys() == {"application/octet-stream"}
        assert "409" in paths[path]["put"]["responses"]
    assert "quality-head" in paths["/v1/quality_head"]["get"]["responses"]["200"]["headers"]


def test_each_field_that_asks_a_part_has_one():
    plans = [plan for _, plan in parts.faces("plan")]
    assert {field for plan in plans for field in plan.fields} == ASKS_A_PART.keys()
