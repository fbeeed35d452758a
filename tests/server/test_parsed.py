"""Large bodies are read beside the event loop, and nobody can tell."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.server import parsed

pytestmark = pytest.mark.anyio

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
PROMPT = {"prompt": "a"}


@given(JSON, st.booleans())
def test_reading_is_what_the_standard_library_reads(value: Any, ascii: bool):
    body = json.dumps(value, ensure_ascii=ascii).encode(errors="surrogatepass")
    assert parsed.read_json(body) == json.loads(body)


@pytest.mark.parametrize("body", [b"NaN", b'{"a": [NaN, 1e400]}', b'{"a": "\\ud800"}', b"\xef\xbb\xbf{}", b"[1]"])
def test_reading_also_takes_what_only_the_standard_library_takes(body: bytes):
    assert repr(parsed.read_json(body)) == repr(json.loads(body))


BODIES: tuple[Any, ...] = (
    {"prompts": [PROMPT], "group_size": 2},
    {"prompts": [PROMPT], "group_size": "2"},
    {"prompts": [PROMPT, {"promt": "a"}], "group_size": 2},
    {"prompts": [{"prompt_token_ids": [1, 2, 2**70]}], "group_size": 2},
    {"prompts": [{"id": "q", "prompt": "a"}, {"id": "q", "prompt": "b"}], "group_size": 2},
    {"prompts": [PROMPT], "group_size": 2, "sampling": {"temperature": float("nan")}},
    {"prompts": [PROMPT], "group_size": 2, "selection": {"dual_end": {"num_longest": -1}}},
    [PROMPT],
    "text",
)


@pytest.mark.parametrize("body", [*(json.dumps(body).encode() for body in BODIES), b"{", b"\xff", b"[" * 100_000])
async def test_a_large_body_is_answered_as_a_small_one(http: httpx.AsyncClient, monkeypatch, body: bytes):
    headers = {"content-type": "application/json"}
    small = await http.post("/v1/rollouts", content=body, headers=headers)
    monkeypatch.setattr(parsed, "LARGE_BODY_BYTES", 0)
    large = await http.post("/v1/rollouts", content=body, headers=headers)
    assert large.status_code == small.status_code
    if small.status_code != 200:
        assert large.json() == small.json()


async def test_a_large_body_is_checked_on_another_thread(http: httpx.AsyncClient, monkeypatch):
    threads = []
    read_json = parsed.read_json

    def watched(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return read_json(body)

    monkeypatch.setattr(parsed, "read_json", watched)
    prompts = [{"prompt_token_ids": [7] * 500} for _ in range(400)]
    for few in (prompts[:1], prompts):
        answer = await http.post("/v1/rollouts", json={"prompts": few, "group_size": 1})
        assert answer.status_code == 200, answer.text
    assert len(threads) == 1
    assert threads[0].startswith("vllm_rollout-bodies")
