"""A trainer that plays rounds of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.engine.conftest import LAST_TOKEN, Server

VARIED = {
    "seed": 4,
    "min_tokens": 150,
    "max_tokens": 600,
    "stop_token_ids": [LAST_TOKEN],
    "logit_bias": {str(LAST_TOKEN): 4.0},
}  # fmt: skip
"""Candidates that end by themselves, sooner or later, and not before all have begun."""


def make_run(server: Server, id: str, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/runs", json={"id": id, **fields})
    assert response.status_code == 201, response.text
    return response.json()


def play(server: Server, run: dict[str, Any], first: int = 0, **fields: Any) -> dict[str, Any]:
    """Run the next round of a run."""
    now = server.http.get(f"/v1/runs/{run['id']}").json()
    numbers = range(first, first + now["num_fresh_prompts"])
    prompts = [{"id": f"{run['id']}-{i}", "prompt": f"question {i}"} for i in numbers]
    response = server.http.post(f"/v1/runs/{run['id']}/rounds", json={"prompts": prompts, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def num_idle_groups(server: Server) -> float:
    """Groups that wait for siblings. Tests of joined requests leave some, which the engine keeps for ten minutes."""
    body = {"prompts": [{"prompt": "hello"}], "group_size": 1, "sampling_params": {"max_tokens": 1}}
    server.http.post("/v1/rollouts", json=body).raise_for_status()  # the gauges are set when a rollout ends
    return server.counter("vllm_rollout:groups_held", state="idle")


def assert_nothing_left(server: Server, num_idle: float = 0) -> None:
    """No candidate, no race, and no group but `num_idle` that waited before."""
    server.wait_until_idle()

    def is_empty() -> bool:
        return (
            num_idle_groups(server) <= num_idle
            and server.counter("vllm_rollout:groups_held", state="running") == 0
            and server.counter("vllm_rollout:races_held") == 0
        )

    server.wait_until(is_empty)


def play_out(
    server: Server, run: dict[str, Any], num_short: int, after: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """So many short rounds, long ones when they are due, then what waits. `after`: of each answer but the last ones."""
    answers: list[dict[str, Any]] = []
    num_prompts = 0
    while sum(answer["kind"] == "short" for answer in answers) < num_short:
        now = server.http.get(f"/v1/runs/{run['id']}").json()
        answers.append(play(server, run, first=num_prompts))
        num_prompts += now["num_fresh_prompts"]
        if after is not None:
            after(answers[-1])
    while answers[-1]["num_waiting"]:
        response = server.http.post(f"/v1/runs/{run['id']}/rounds", json={"kind": "long"})
        assert response.status_code == 200, response.text
        answers.append(response.json())
    returned = Counter(group["prompt_id"] for answer in answers for group in answer["groups"])
    assert returned == Counter(f"{run['id']}-{i}" for i in range(num_prompts))
    return answers


def assert_groups_whole(answers: list[dict[str, Any]], group_size: int) -> None:
    for answer in answers:
        for group in answer["groups"]:
            assert group["status"] == "complete"
            assert len(group["trajectories"]) == group_size
        usage = answer["usage"]
        assert usage["generated_tokens"] + usage["resumed_tokens"] == usage["returned_tokens"] + usage["wasted_tokens"]
