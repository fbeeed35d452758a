"""Bodies and events that are encoded and read beside the event loop: the same JSON, and nobody waits."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.http import parsed, serialised
from vllm_rollout.kernel.http.answers import (
    Allocation,
    Candidate,
    CandidateEvent,
    ConfidenceAnswer,
    GroupAnswer,
    GroupEvent,
    GroupLengths,
    RolloutAnswer,
    StoppedCandidate,
    Timing,
    Trajectory,
    TrajectoryEvent,
    Usage,
)
from vllm_rollout.kernel.http.rewards import RewardCounts, RewardResult, RewardsAnswer
from vllm_rollout.kernel.http.slices import each

LISTS = st.lists(st.integers(0, 2**40), max_size=5)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ENDED: dict[str, Any] = {
    "index": st.integers(0, 99),
    "num_tokens": st.integers(0, 99),
    "score": st.none() | FLOATS,
    "confidence": st.none() | st.builds(ConfidenceAnswer, mean=FLOATS, lowest_window=FLOATS, bottom_windows=FLOATS),
    "would_prune": st.none() | st.booleans(),
}
CONTENT: dict[str, Any] = {
    "token_ids": LISTS,
    "logprobs": st.none() | st.lists(FLOATS, max_size=5),
    "text": TEXTS,
    "weight_versions": st.lists(st.fixed_dictionaries({"version": st.text(max_size=3), "start": st.integers(0, 9)})),
}
TRAJECTORIES = st.builds(
    Trajectory,
    **ENDED,
    **CONTENT,
    finish_reason=TEXTS,
    stop_reason=st.none() | st.integers(0, 9) | st.text(max_size=3),
)
STATES = st.sampled_from(["finished", "pruned", "surplus", "failed"])
CANDIDATES = st.builds(Candidate, **ENDED, state=STATES) | st.builds(
    StoppedCandidate, **ENDED, **CONTENT, state=STATES, ended_by_itself=st.booleans()
)


@st.composite
def answers(draw: st.DrawFn) -> RolloutAnswer:
    groups = []
    for name in draw(st.lists(st.text(min_size=1, max_size=4), unique=True, max_size=3)):
        ended = draw(st.lists(TRAJECTORIES | CANDIDATES, max_size=4, unique_by=lambda ended: ended.index))
        ended.sort(key=lambda ended: ended.index)
        groups.append(
            GroupAnswer(
                prompt_id=name,
                group_id=f"g-{name}",
                status="complete",
                reason=draw(TEXTS),
                prompt_token_ids=draw(LISTS),
                trajectories=[e for e in ended if isinstance(e, Trajectory)],
                candidates=[e for e in ended if not isinstance(e, Trajectory)],
                lengths=GroupLengths(mean=draw(FLOATS), std=1e-7, max=3),
                allocation=Allocation(num_candidates=4, weight=draw(st.none() | FLOATS), selection="first"),
            )
        )
    return RolloutAnswer(
        id="r", created=1, model='"groups":[]', warnings=draw(st.lists(st.text(max_size=5), max_size=2)),
        groups=groups, usage=Usage(prompt_tokens=3), timing=Timing(latency_s=1e-9),
    )  # fmt: skip


async def body_of(answer: RolloutAnswer) -> bytes:
    """Put together from events, whose order within a group is any."""
    groups = serialised.GroupsInJson()
    for group in answer.groups:
        name = {"prompt_id": group.prompt_id, "group_id": group.group_id}
        for candidate in reversed(group.candidates):
            await groups.add(CandidateEvent(**name, candidate=candidate))
        for trajectory in reversed(group.trajectories):
            await groups.add(TrajectoryEvent(**name, trajectory=trajectory))
        event = {key: getattr(group, key) for key in ("status", "reason", "prompt_token_ids", "lengths", "allocation")}
        await groups.add(GroupEvent(**name, **event, selected=[]))
    envelope = answer.model_copy(update={"groups": []})
    return b"".join(groups.answer(envelope, (group.prompt_id for group in answer.groups)))


@given(answers())
def test_a_body_is_what_pydantic_would_write(answer: RolloutAnswer):
    assert RolloutAnswer.model_validate_json(asyncio.run(body_of(answer))) == answer
    assert RolloutAnswer.model_validate_json(answer.model_dump_json()) == answer


async def test_large_trajectories_are_encoded_on_another_thread(http, engine, monkeypatch):
    monkeypatch.setattr(serialised, "LARGE_TOKENS", 20)
    threads: list[tuple[int, str]] = []
    to_json = serialised.to_json

    def watched(value: Any) -> bytes:
        threads.append((getattr(value, "num_tokens", 0), threading.current_thread().name))
        return to_json(value)

    monkeypatch.setattr(serialised, "to_json", watched)
    engine.lengths = {0: 5, 1: 30}
    body = {"prompts": [{"prompt": "a"}], "group_size": 2}
    answer = RolloutAnswer.model_validate_json((await http.post("/v1/rollouts", json=body)).content)
    assert [t.num_tokens for t in answer.groups[0].trajectories] == [5, 30]
    assert [name.startswith("vllm_rollout-json") for length, name in threads if length] == [False, True]


async def test_a_body_states_its_length(http: httpx.AsyncClient):
    answer = await http.post("/v1/rollouts", json={"prompts": [{"prompt": "a"}], "group_size": 2})
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-type"] == "application/json"


async def test_a_list_that_is_filled_in_is_what_pydantic_would_write():
    results = [RewardResult(prompt_id='"results":[]', index=i, status="accepted") for i in range(3)]
    answer = RewardsAnswer(
        id="r", results=results, counts=RewardCounts(accepted=3), threshold=0.5, num_training=3, head_version=0
    )
    envelope = answer.model_copy(update={"results": []})
    parts = serialised.filled(envelope, "results", await each(answer.results, serialised.to_json))
    assert b"".join(parts).decode() == answer.model_dump_json()
    assert b"".join(serialised.filled(envelope, "results", [])).decode() == envelope.model_dump_json()


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
    {"prompts": [PROMPT], "group_size": 2, "sampling_params": {"temperature": float("nan")}},
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
