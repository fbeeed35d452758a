"""Whatever is sent, the server answers as its OpenAPI says, and never with a 5xx."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

from tests.kernel.http.conftest import DEADLINE_S, make_app
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.http.protocol import RolloutRequest

APP = make_app(FakeEngine(max_num_seqs=16, max_model_len=200))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(scope="module", autouse=True)
def nothing_runs_on():
    """Schemathesis' loop outlives these tests, and would tick as long as a group of sessions is open."""
    yield
    forget()


def forget() -> None:
    for part in APP.state.engine.parts.values():
        part.forget()


QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def status_is_described(_, response, case) -> None:
    """By its number: `default` would do for any status. 405 is for methods that the document does not have."""
    assert str(response.status_code) in {*case.operation.definition.raw["responses"], "405"}


@pytest.mark.thorough
@SCHEMA.exclude(path="/v1/rollouts/watch").parametrize()  # which has no end
@QUICK
def test_answers_conform_to_openapi(case):
    forget()  # else there may be no room for a group of thousands of sessions
    case.call_and_validate(
        checks=[not_a_server_error, response_schema_conformance, content_type_conformance, status_is_described],
        timeout=DEADLINE_S,
    )


VALID = {
    "model": "fake-model",
    "prompts": [
        {"id": "a", "messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "text"},
        {"prompt_token_ids": [1, 2, 3]},
    ],
    "group_size": 2,
    "redundancy": 2,
    "early_stop": False,
    "selection": {"dual_end": {"num_longest": 1}},
    "sampling_params": {"temperature": 1.0, "max_tokens": 8, "seed": 7, "stop": ["x"]},
    "include": ["text", "logprobs"],
    "stream": True,
    "stream_tokens": 4,
}
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-5, 5)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from(["first", "shortest", "fake-model", "auto", "n", "\ud800", 2**64, 10**40, -0.0, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, item in items for path in paths(item, (*here, key)))]


@st.composite
def mutated(draw: st.DrawFn, valid: Any = VALID) -> Any:
    """A valid body in which a few places are replaced, removed or added to."""
    root: dict[str, Any] = {"body": copy.deepcopy(valid)}
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(paths(root)[1:]))
        holder: Any = root
        for key in way:
            holder = holder[key]
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove" and way:
            del holder[last]
        elif action == "add" and isinstance(holder, dict) and way:
            holder[draw(st.text(max_size=5))] = draw(JUNK)
        else:
            holder[last] = draw(JUNK)
    return root["body"]


@st.composite
def mutated_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        content[start : start + draw(st.integers(0, 5))] = draw(st.binary(max_size=5))
    return bytes(content)


def check_answer(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["code"] == response.status_code


@pytest.fixture(scope="module")
def local_client():
    with TestClient(APP) as client:
        yield client


@pytest.mark.thorough
@given(data=st.data())
@settings(QUICK, max_examples=200)
def test_mutated_bodies_are_never_the_servers_fault(local_client, data):
    content = json.dumps(data.draw(mutated(VALID))).encode()
    headers = {"content-type": "application/json"}
    check_answer(local_client.post("/v1/rollouts", content=content, headers=headers))


@given(data=st.data())
@settings(QUICK, max_examples=150)
def test_mutated_bytes_are_never_the_servers_fault(local_client, data):
    content = data.draw(mutated_bytes(json.dumps(VALID).encode()))
    headers = {"content-type": data.draw(st.sampled_from(["application/json", "text/plain", "application/a+json"]))}
    check_answer(local_client.post("/v1/rollouts", content=content, headers=headers))


@pytest.mark.parametrize("name", ["RolloutRequest", "RewardsRequest", "RewardEntry"])
def test_openapi_says_what_every_field_takes(name):
    schema = APP.openapi()["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    assert all(field.get("description") or "$ref" in field for field in schema["properties"].values())


def test_openapi_describes_rollouts():
    openapi = APP.openapi()
    operation = openapi["paths"]["/v1/rollouts"]["post"]
    assert operation["responses"].keys() == {"200", "400", "404", "409", "413", "429", "500", "503", "default"}
    content = operation["responses"]["200"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith("/RolloutAnswer")
    events = content["text/event-stream"]
    assert events["example"].startswith("event: ")
    item = events["itemSchema"]["properties"]
    assert item["event"]["enum"] == [
        "trajectory", "reward", "candidate", "tokens", "group", "restarted", "ranks_free", "done", "error"
    ]  # fmt: skip
    assert len(item["data"]["contentSchema"]["anyOf"]) == 9
    assert "$ref" not in json.dumps(item)
    request = openapi["components"]["schemas"]["RolloutRequest"]
    assert len([RolloutRequest.model_validate(example) for example in request["examples"]]) == 3
