"""Every bad request is a 4xx in OpenAI's error form that names field, value, what is allowed and what to do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import eventually
from vllm_rollout.config import MAX_BODY_BYTES
from vllm_rollout.kernel.http.answers import RolloutAnswer
from vllm_rollout.kernel.http.boundary import HeldBodies, RolloutRoute

MEGABYTE = 2**20
JSON = {"content-type": "application/json"}


def body(**fields: Any) -> dict[str, Any]:
    return {"prompts": [{"id": "q", "prompt": "text"}], "group_size": 2, **fields}


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in body().items() if name != field}


def prompts(*prompts: Any) -> dict[str, Any]:
    return body(prompts=list(prompts))


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


BAD = {
    # name: body, status, param, words of the message
    "group_size_missing": (without("group_size"), 400, "group_size", ["required", "1 to 4096"]),
    "group_size_beyond_server": (body(group_size=65), 400, "group_size", ["max_num_seqs (64)", "--max-num-seqs 65"]),
    "unknown_field_of_auto": (body(redundancy={"auto": {"tradeof": 1}}), 400, "redundancy.auto.tradeof", ["tradeoff"]),
    "too_many_candidates": (
        body(group_size=40, redundancy=40), 400, "redundancy",
        ["40 + 40 = 80", "max_num_seqs (64)", "--max-num-seqs 80"],
    ),
    "prompts_missing": (without("prompts"), 400, "prompts", ["required", "1 to 16384"]),
    "prompts_empty": (prompts(), 400, "prompts", ["1 to 16384", "list of 0"]),
    "prompts_too_many": (prompts(*[{"prompt": "p"}] * 16385), 400, "prompts", ["16385", "16384"]),
    "prompt_empty": (prompts({"prompt": ""}), 400, "prompts.0.prompt", ["got ''.", "at least one character"]),
    "prompt_text": (
        prompts("hi"), 400, "prompts.0", ["should be an object, got 'hi'. Write {\"prompt\": \"hi\"}"]
    ),
    "token_ids_empty": (prompts({"prompt_token_ids": []}), 400, "prompts.0.prompt_token_ids", ["At least one"]),
    "token_id_negative": (
        prompts({"prompt": "p"}, {"prompt_token_ids": [1, -2]}), 400, "prompts.1.prompt_token_ids.1", ["got -2"]
    ),
    "token_id_huge": (prompts({"prompt_token_ids": [2**63]}), 400, "prompts.0.prompt_token_ids.0", [str(2**63)]),
    "token_id_beyond_vocabulary": (
        prompts({"id": "q", "prompt_token_ids": [10**6]}), 400, "prompts.q.prompt_token_ids", ["vocabulary"]
    ),
    "messages_empty": (prompts({"messages": []}), 400, "prompts.0.messages", ["at least one"]),
    "message_without_role": (prompts({"id": "q", "messages": [{}]}), 400, "prompts.q.messages", ["cannot be rendered"]),
    "two_forms": (prompts({"prompt": "a", "messages": [{"x": 1}]}), 400, "prompts.0", ["exactly one", "messages and"]),
    "no_form": (prompts({"id": "q"}), 400, "prompts.0", ["exactly one", "none of them"]),
    "prompt_too_long": (
        prompts({"id": "q", "prompt_token_ids": [1] * 5000}), 400, "prompts.q.prompt_token_ids",
        ["5000 tokens", "max_model_len (4096)", "--max-model-len"],
    ),
    "id_empty": (prompts({"id": "", "prompt": "p"}), 400, "prompts.0.id", ["at least 1 character"]),
    "id_long": (prompts({"id": "x" * 257, "prompt": "p"}), 400, "prompts.0.id", ["256", "xxx…"]),
    "id_twice": (
        prompts({"id": "q", "prompt": "p"}, {"id": "q", "prompt": "p"}), 400, "prompts.1.id", ["'q'", "twice", "unique"]
    ),
    "id_of_a_position": (
        prompts({"prompt": "p"}, {"id": "0", "prompt": "p"}), 400, "prompts.1.id", ["'0'", "takes its position"]
    ),
    "unknown_field": (body(groupsize=4), 400, "groupsize", ["not a field", "group_size"]),
    "field_of_openai_n": (body(n=4), 400, "n", ["not a field", "group_size instead"]),
    "field_of_openai_max_tokens": (body(max_tokens=9), 400, "max_tokens", ["Write sampling_params.max_tokens instead"]),
    "field_of_openai_temperature": (body(temperature=0), 400, "temperature", ["Write sampling_params.temperature"]),
    "field_of_xargs": (body(rollout_redundancy=1), 400, "rollout_redundancy", ["Write redundancy instead"]),
    "unknown_field_of_a_prompt": (prompts({"text": "p"}), 400, "prompts.0.text", ["not a field", "prompt_token_ids"]),
    "include_unknown_word": (
        body(include=["text", "unselected"]), 400, "include.1", ["'text', 'logprobs' or 'stopped'", "got 'unselected'"]
    ),
    "include_many_unknown_words": (body(include=["x"] * 100_000), 400, "include.0", ["got 'x'"]),
    "include_twice": (body(include=["text"] * 2), 400, "include", ["each of text, logprobs, stopped at most once"]),
    "include_word": (body(include="text"), 400, "include", ["list", "got 'text'"]),
    "include_null": (body(include=None), 400, "include", ["got null"]),
    "include_of_openai": (body(logprobs=True), 400, "logprobs", ["Write include instead"]),
    "selection_empty": (body(selection={}), 400, "selection.dual_end", ["required"]),
    "num_longest_beyond_group": (
        body(selection={"dual_end": {"num_longest": 3}}), 400, "selection.dual_end.num_longest",
        ["got 3", "below group_size (2)"],
    ),
    "early_stop_with_dual_end": (
        body(selection={"dual_end": {}}, early_stop=True), 400, "early_stop", ["dual_end", "to false", '"auto"']
    ),
    **{f"{field}_of_one_rank": (body(**{field: "auto"}), 400, field, []) for field in ("migration", "scale_down")},
    "stream_tokens_without_stream": (body(stream_tokens=4), 400, "stream_tokens", ["needs stream", "leave it out"]),
    "sampling_n": (body(sampling_params={"n": 4}), 400, "sampling_params.n", ["group_size"]),
    "sampling_unknown": (
        body(sampling_params={"temprature": 1}), 400, "sampling_params.temprature", ["allowed", "temperature"]
    ),
    "sampling_invalid": (body(sampling_params={"temperature": -1}), 400, "sampling_params.temperature", ["-1"]),
    "sampling_huge_negative_integer": (
        body(sampling_params={"logit_bias": {"5": [1, -(2**63) - 1]}}), 400, "sampling_params.logit_bias.5.1",
        [f"got {-(2**63) - 1}", f"from {-(2**63)} to {2**63 - 1}"],
    ),
    "message_huge_integer": (
        prompts({"messages": [{"role": "user", "content": 10**4000}]}), 400, "prompts.0.messages.0.content",
        [f"from {-(2**63)} to {2**63 - 1}", "got 1000"],
    ),
    "model_unknown": (body(model="other"), 404, "model", ["'other'", "fake-model", "Leave the field out"]),
    "message_deep": (prompts({"messages": [{"content": deep(40)}]}), 400, None, ["nested more than 32 levels"]),
}  # fmt: skip


RAW = {
    "nan_sampling": (b'{"sampling_params": {"temperature": NaN}}', "sampling_params.temperature", ["finite", "nan"]),
    "overflowing_number": (b'{"sampling_params": {"temperature": 1e999}}', "sampling_params.temperature", ["finite"]),
    "infinity_message": (
        b'{"prompts": [{"messages": [{"role": "user", "content": Infinity}]}]}',
        "prompts.0.messages.0.content", ["finite"],
    ),
    "nan_unknown_field": (b'{"else": NaN}', "else", ["not a field"]),
    "surrogate_prompt": (rb'{"prompts": [{"prompt": "\ud800"}]}', "prompts.0.prompt", ["unicode"]),
    "surrogate_sampling_field": (rb'{"sampling_params": {"\ud800": 1}}', "sampling_params", ["Unicode"]),
    "surrogate_field": (rb'{"\ud800": 1}', "\\ud800", ["not a field"]),
    "surrogate_model": (rb'{"model": "\ud800"}', "model", ["unicode"]),
}  # fmt: skip


def raw(fields: bytes) -> bytes:
    """A valid body with these fields written over it."""
    names = json.loads(fields)
    rest = json.dumps({name: value for name, value in body().items() if name not in names}).encode()
    return rest[:-1] + b", " + fields[1:] if rest != b"{}" else fields


def check_error(response: httpx.Response, status: int, param: str | None, words: list[str]) -> str:
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 5000
    answer = response.json()
    assert answer.keys() == {"error"}
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (status, httpx.codes(status).name.title().replace("_", ""))
    assert error["param"] == param or param is None
    for word in words:
        assert word in error["message"], error["message"]
    if param is not None and not param.startswith("prompts.q."):
        assert param in error["message"]
    return error["message"]


async def post_beside_another(http: httpx.AsyncClient, engine: FakeEngine, **request: Any) -> httpx.Response:
    """Send a bad request while a good one runs, and check that the good one does not notice."""
    num_launched = engine.num_launched
    long = body(sampling_params={"min_tokens": 50, "seed": 1}, group_size=4)
    good = asyncio.create_task(http.post("/v1/rollouts", json=long))
    await eventually(lambda: engine.num_launched != num_launched)
    response = await http.post("/v1/rollouts", **request)
    answer = RolloutAnswer.model_validate_json((await good).content)
    assert answer.groups[0].status == "complete"
    assert engine.num_launched == num_launched + 4
    assert (engine.num_running, engine.num_aborted) == (0, 0)
    return response


@pytest.mark.parametrize("name", BAD)
async def test_bad_body_is_explained(http, engine: FakeEngine, name):
    bad, status, param, words = BAD[name]
    response = await post_beside_another(http, engine, json=bad)
    check_error(response, status, param, words)


@pytest.mark.parametrize("name", RAW)
async def test_what_python_reads_and_json_forbids_is_explained(http, engine: FakeEngine, name):
    fields, param, words = RAW[name]
    response = await post_beside_another(http, engine, content=raw(fields), headers=JSON)
    check_error(response, 400, param, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["body is empty", "JSON object"]),
        (b"{", ["not JSON", "character 1"]),
        (b'{"group_size": 1,}', ["not JSON"]),
        (b'{"prompts": "\xe4"}', ["not JSON", "UTF-8"]),
        (b"[]", ["JSON object", "list of 0"]),
        (b"null", ["body is empty"]),
        (b'"text"', ["JSON object", "got 'text'"]),
        (b"[" * 100_000, ["nested too deeply"]),
        (b'{"group_size": ' + b"9" * 10_000 + b"}", ["not JSON", "digits"]),
    ],
)
async def test_body_that_is_no_json_object_is_explained(http, engine: FakeEngine, content, words):
    response = await post_beside_another(http, engine, content=content, headers=JSON)
    check_error(response, 400, None, words)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "nonsense"])
async def test_body_without_json_content_type_is_explained(http, engine: FakeEngine, kind):
    headers = {} if kind is None else {"content-type": kind}
    response = await post_beside_another(http, engine, content=json.dumps(body()).encode(), headers=headers)
    check_error(response, 400, None, ["content-type: application/json"])


async def test_all_problems_are_named_up_to_a_few(http):
    bad = {"prompts": [{"prompt": ""}] * 9, "group_size": 0}
    message = check_error(
        await http.post("/v1/rollouts", json=bad), 400, "group_size", ["prompts.0.prompt", "and 5 more"]
    )
    assert message.count("; ") == 5


@pytest.mark.thorough
@pytest.mark.parametrize(
    "bad",
    [
        lambda: body(model="m" * 10 * MEGABYTE),
        lambda: body(**{"f" * 10 * MEGABYTE: 1}),
        lambda: body(group_size="g" * 10 * MEGABYTE),
        lambda: prompts({"id": "i" * 10 * MEGABYTE, "prompt": "p"}),
        lambda: prompts({"prompt": "p" * 10 * MEGABYTE}),
        lambda: prompts({"prompt_token_ids": ["t"] * MEGABYTE}),
        lambda: prompts(*["p"] * MEGABYTE),
        lambda: body(**{f"f{i}": 1 for i in range(MEGABYTE // 2)}),
    ],
)
async def test_large_bad_bodies_are_refused_in_few_words(http, engine: FakeEngine, bad):
    response = await http.post("/v1/rollouts", json=bad())
    assert 400 <= response.status_code < 500
    check_error(response, response.status_code, None, [])
    assert engine.num_launched == 0


@pytest.mark.parametrize("content", [b"x" * 10 * MEGABYTE, b'{"' * 5 * MEGABYTE, b"\x00" * 10 * MEGABYTE])
async def test_large_garbage_is_refused_in_few_words(http, engine: FakeEngine, content):
    response = await post_beside_another(http, engine, content=content, headers=JSON)
    check_error(response, 400, None, ["not JSON"])
    response = await http.post("/v1/rollouts", content=content)
    check_error(response, 400, None, ["content-type"])


@pytest.mark.thorough
async def test_large_valid_bodies_are_served(http, engine: FakeEngine):
    engine.max_model_len = 2**30
    many = [{"prompt_token_ids": [7] * 3000} for _ in range(1000)]
    answer = await http.post("/v1/rollouts", json=body(prompts=many, sampling_params={"max_tokens": 2}))
    assert answer.status_code == 200
    assert answer.json()["usage"]["num_candidates"] == 2000


@pytest.mark.parametrize("integer", [2**63 - 1, -(2**63)])
async def test_integers_of_64_bit_are_served(http, integer):
    prompt = {"messages": [{"role": "user", "content": "hi", "number": integer}]}
    answer = await http.post("/v1/rollouts", json=body(prompts=[prompt], sampling_params={"seed": integer}))
    assert answer.status_code == 200, answer.text


async def test_body_over_the_limit_is_a_413(http, engine: FakeEngine):
    over = b" " * (MAX_BODY_BYTES + 1)
    response = await post_beside_another(http, engine, content=over, headers=JSON)
    check_error(response, 413, None, [str(MAX_BODY_BYTES), "fewer prompts"])


async def test_body_that_hides_its_length_is_cut_off_at_the_limit(http):
    num_sent = 0

    async def pieces():
        nonlocal num_sent
        while num_sent < 3 * MAX_BODY_BYTES:
            num_sent += 8 * MEGABYTE
            yield b" " * 8 * MEGABYTE

    response = await http.post("/v1/rollouts", content=pieces(), headers=JSON)
    check_error(response, 413, None, [str(MAX_BODY_BYTES), "fewer prompts"])
    assert num_sent <= MAX_BODY_BYTES + 8 * MEGABYTE


async def test_bad_bodies_are_refused_before_a_stream_begins(http):
    response = await http.post("/v1/rollouts", json=body(stream=True, group_size=65))
    check_error(response, 400, "group_size", ["--max-num-seqs"])


async def test_requests_on_their_way_hold_a_bounded_number_of_bytes(http, engine: FakeEngine, monkeypatch) -> None:
    held = HeldBodies(3000)
    monkeypatch.setattr(RolloutRoute, "held", held)
    engine.step_s = 0.005
    large = body(prompts=[{"id": "q", "prompt": "t" * 2000}])
    first = asyncio.create_task(http.post("/v1/rollouts", json=large))
    leaves = asyncio.create_task(http.post("/v1/rollouts", json=body()))
    await eventually(lambda: engine.num_running >= 2 and held.num_bytes >= 2000, every_s=0.005)
    response = await http.post("/v1/rollouts", json=large)
    check_error(response, 503, None, ["at most 3000 are held", "Try again when others are answered"])
    assert response.headers["retry-after"] == "1"
    assert (await http.post("/v1/rollouts", json=body())).status_code == 200
    leaves.cancel()
    assert (await first).status_code == 200
    await asyncio.gather(leaves, return_exceptions=True)
    assert held.num_bytes == 0
    alone = body(prompts=[{"id": "q", "prompt": "t" * 4000}])
    assert (await http.post("/v1/rollouts", json=alone)).status_code == 200, "one alone may be larger"
