"""Whatever is sent of pruning, rewards, votes, heads and states, the server never fails."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.http.test_fuzz import APP, QUICK, VALID, check_answer, mutated, mutated_bytes
from tests.parts.pruning.fakes import FakeLearning
from vllm_rollout.parts.pruning.rules.report import HeadInfo

PRUNED = {**VALID, "pruning": {"detection_length": 4, "keep_ratio": 0.5, "mode": "shadow", "min_labels": 1}}
REWARDS = {
    "rewards": [{"prompt_id": "0", "index": 0, "reward": 1.0}, {"prompt_id": "0", "index": 1, "reward": -1}],
    "threshold": 0.5,
}
VOTE = {
    "texts": ["Answer: 1", None, "Answer: 2"],
    "answer_pattern": r"Answer: (\d)",
    "method": "quality",
    "weights": [0.5, None, 1],
    "correct": "1",
    "k": 2,
}


@pytest.fixture(scope="module")
def local_client():
    with TestClient(APP) as client:
        yield client


@pytest.fixture(scope="module")
def rewards_path(local_client) -> str:
    rollout = {"prompts": [{"prompt": "p"}], "group_size": 2, "pruning": {"detection_length": 2, "keep_ratio": 1}}
    answer = local_client.post("/v1/rollouts", json={**rollout, "sampling_params": {"min_tokens": 4}}).json()
    return f"/v1/rollouts/{answer['id']}/rewards"


@pytest.fixture(scope="module")
def files(local_client, rewards_path) -> dict[str, bytes]:
    local_client.post(rewards_path, json=REWARDS)
    state = local_client.get("/v1/rollouts/state").content
    return {"/v1/quality_head": FakeLearning.head_file(HeadInfo(4, 16, 1, 1, 1)), "/v1/rollouts/state": state}


@given(data=st.data(), path=st.sampled_from(["/v1/quality_head", "/v1/rollouts/state"]))
@settings(QUICK, max_examples=100)
def test_mutated_heads_and_states_are_never_the_servers_fault(local_client, files, data, path):
    response = local_client.put(path, content=data.draw(mutated_bytes(files[path])))
    if response.status_code != 204:
        check_answer(response)


@pytest.mark.thorough
@pytest.mark.parametrize(("path", "valid"), [("/v1/rollouts", PRUNED), (None, REWARDS), ("/v1/votes", VOTE)])
@given(data=st.data())
@settings(QUICK, max_examples=200)
def test_mutated_bodies_of_what_learns_are_never_the_servers_fault(local_client, rewards_path, path, valid, data):
    content = json.dumps(data.draw(mutated(valid))).encode()
    headers = {"content-type": "application/json"}
    check_answer(local_client.post(path or rewards_path, content=content, headers=headers))


def test_openapi_says_what_every_field_of_a_vote_takes():
    schema = APP.openapi()["components"]["schemas"]["VoteRequest"]
    assert schema["additionalProperties"] is False
    assert all(field.get("description") or "$ref" in field for field in schema["properties"].values())


def test_openapi_says_what_every_field_of_pruning_takes():
    schema = APP.openapi()["components"]["schemas"]["Pruning"]
    assert schema["additionalProperties"] is False
    assert all(field.get("description") for field in schema["properties"].values())
