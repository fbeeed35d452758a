"""Our fields where nobody reads them are refused; what is written where it belongs, and all else, passes untouched."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.http.misplaced import FIELDS, PLACES, MisplacedFields, refusal_of
from vllm_rollout.kernel.xargs import ALL_ROWS, NAMES

pytestmark = pytest.mark.anyio


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()

    async def complete(body: dict[str, Any]) -> dict[str, Any]:
        return body

    for path in (*PLACES, "/tokenize"):
        app.post(path)(complete)
    app.add_middleware(MisplacedFields)
    return app


@pytest.fixture
async def http(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def within(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(place.split(".") if place else []):
        fields = {name: fields}
    return fields


PROMPT = {"prompt": 'say "rollout_redundancy": 8', "n": 8}
HERE = ("", "vllm_xargs", "extra_args", "extra_body", "sampling_params", "sampling_params.extra_args")


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("found", HERE)
async def test_a_field_that_would_be_ignored_is_a_400_that_says_where_it_is_read(http, path, found):
    body = PROMPT | within(found, {"rollout_redundancy": 8})
    answer = await http.post(path, json=body)
    if found == PLACES[path]:
        assert (answer.status_code, answer.json()) == (200, body)
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, ".".join(filter(None, [found, "rollout_redundancy"])))
    assert (PLACES[path] or "/v1/rollouts") in error["message"]


@pytest.mark.parametrize("field", sorted(FIELDS))
async def test_all_fields_of_ours_are_known(http, field):
    assert (await http.post("/v1/completions", json={field: 1})).status_code == 400


def test_no_field_is_left_out():
    assert {NAMES[field] for field in ALL_ROWS} < FIELDS


@pytest.mark.parametrize("body", [PROMPT, {"metadata": {"rollout_redundancy": 1}}, {"rollout_step": 3}, {}])
async def test_what_is_not_ours_passes_untouched(http, body):
    answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()) == (200, body)
    assert (await http.post("/tokenize", json={"rollout_redundancy": 1})).status_code == 200


async def test_a_name_that_is_parted_between_messages_is_found(app):
    body = b'{"prompt": "a", "rollout_redundancy": 2}'
    two = [[body[:at], body[at:]] for at in range(len(body))]
    more = [[body[at : at + size] for at in range(0, len(body), size)] for size in range(1, 9)]
    for pieces in [*two, *more]:
        parts = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        parts[-1]["more_body"] = False
        sent: list[Any] = []

        async def receive(parts=parts) -> Any:
            return parts.pop(0)

        async def send(message, sent=sent) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        await app(scope, receive, send)
        assert [message["status"] for message in sent if "status" in message] == [400]


def test_what_is_nested_too_deeply_is_left_to_whoever_reads_it():
    assert refusal_of(b'{"rollout_redundancy": ' + b"[" * 100_000, "vllm_xargs") is None


@given(st.binary(max_size=40))
def test_what_is_no_json_is_left_to_whoever_reads_it(noise):
    assert refusal_of(noise + b'"rollout_redundancy', "vllm_xargs") is None
