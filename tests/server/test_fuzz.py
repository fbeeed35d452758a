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
    status_code_conformance,
)

from vllm_rollout.server.protocol import RolloutRequest

from .conftest import make_app
from .fake_engine import FakeEngine

APP = make_app(FakeEngine(max_num_seqs=16, max_model_len=200))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@SCHEMA.parametrize()
@QUICK
def test_answers_conform_to_openapi(case):
    case.call_and_validate(
        checks=[not_a_server_error, response_schema_conformance, content_type_conformance, status_code_conformance]
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
    "sampling": {"temperature": 1.0, "max_tokens": 8, "seed": 7, "stop": ["x"]},
    "return": {"text": True, "logprobs": True, "unselected": False},
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
def mutated(draw: st.DrawFn) -> Any:
    """A valid body in which a few places are replaced, removed or added to."""
    root: dict[str, Any] = {"body": copy.deepcopy(VALID)}
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


@given(body=mutated())
@settings(QUICK, max_examples=300)
def test_mutated_bodies_are_never_the_servers_fault(local_client, body):
    content = json.dumps(body).encode()
    check_answer(local_client.post("/v1/rollouts", content=content, headers={"content-type": "application/json"}))


@given(data=st.data())
@settings(QUICK, max_examples=150)
def test_mutated_bytes_are_never_the_servers_fault(local_client, data):
    content = bytearray(json.dumps(VALID).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    headers = {"content-type": data.draw(st.sampled_from(["application/json", "text/plain", "application/a+json"]))}
    check_answer(local_client.post("/v1/rollouts", content=bytes(content), headers=headers))


def test_openapi_describes_the_endpoint():
    openapi = APP.openapi()
    operation = openapi["paths"]["/v1/rollouts"]["post"]
    assert operation["responses"].keys() == {"200", "400", "404", "413", "422", "500", "503"}
    content = operation["responses"]["200"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith("/RolloutAnswer")
    events = content["text/event-stream"]
    assert events["example"].startswith("event: ")
    item = events["itemSchema"]["properties"]
    assert item["event"]["enum"] == ["trajectory", "candidate", "tokens", "group", "done", "error"]
    assert len(item["data"]["contentSchema"]["anyOf"]) == 6
    assert "$ref" not in json.dumps(item)
    for status, answer in operation["responses"].items():
        if status != "200":
            assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
    request = openapi["components"]["schemas"]["RolloutRequest"]
    assert request["additionalProperties"] is False
    assert all(field.get("description") or "$ref" in field for field in request["properties"].values())
    assert len([RolloutRequest.model_validate(example) for example in request["examples"]]) == 2
