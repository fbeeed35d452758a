"""A part that another package adds by an entry point: its field, its check and its rule on a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.conftest import LONG, Server, ends_after, paused

TOKENS = "vllm:generation_tokens_total"


def test_a_straggler_stops_as_soon_as_a_sibling_ends(server: Server) -> None:
    group = {"rollout_group_id": "of-others", "rollout_group_size": 2, "rollout_num_candidates": 3}
    xargs = {**group, "rollout_straggler_factor": 1.5}

    def complete(**sampling: Any) -> int:
        body = {"prompt": "hello world", "vllm_xargs": xargs, **sampling}
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["usage"]["completion_tokens"]

    server.wait_until_idle()
    with ThreadPoolExecutor(3) as pool:
        before = server.counter(TOKENS)
        straggler = pool.submit(complete, **LONG)
        server.wait_until(lambda: server.counter(TOKENS) > before + 60 or straggler.done())
        with paused(server):
            ahead = server.counter(TOKENS) - before
            others = [pool.submit(complete, ignore_eos=True, max_tokens=600), pool.submit(complete, **ends_after(20))]
            server.wait_until(lambda: server.num_in_engine == 3 or straggler.done())
        assert [answer.result() for answer in others] == [600, 20]
        assert straggler.result() < ahead + 300  # else it would run until the group of two is complete


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"redundancy": 0, "straggler_factor": 2}, "straggler_factor: only spare candidates stop"),
        ({"redundancy": 1, "straggler_factor": 0}, "straggler_factor: should be greater than or equal to 1, got 0"),
    ],
)
def test_its_field_is_checked_and_described_as_one_of_ours(
    server: Server, fields: dict[str, Any], refusal: str
) -> None:
    body = {"prompts": [{"prompt": "hello"}], "group_size": 1, **fields}
    error = server.http.post("/v1/rollouts", json=body).json()["error"]
    assert (error["param"], error["message"][: len(refusal)]) == ("straggler_factor", refusal)
    schema = server.http.get("/openapi.json").json()["components"]["schemas"]["RolloutRequest"]
    assert "spare siblings" in schema["properties"]["straggler_factor"]["description"]
