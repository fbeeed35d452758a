"""Bodies and events that are encoded beside the event loop: the same JSON, and nobody waits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.server import serialised
from vllm_rollout.server.answers import (
    Allocation,
    Candidate,
    CandidateEvent,
    ConfidenceAnswer,
    GroupAnswer,
    GroupEvent,
    GroupLengths,
    RolloutAnswer,
    Timing,
    Trajectory,
    TrajectoryEvent,
    UnselectedCandidate,
    Usage,
)
from vllm_rollout.server.learning.body import RewardCounts, RewardResult, RewardsAnswer
from vllm_rollout.server.slices import each

from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

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
CONTENT: dict[str, Any] = {"token_ids": LISTS, "logprobs": st.none() | st.lists(FLOATS, max_size=5), "text": TEXTS}
TRAJECTORIES = st.builds(
    Trajectory,
    **ENDED,
    **CONTENT,
    finish_reason=TEXTS,
    stop_reason=st.none() | st.integers(0, 9) | st.text(max_size=3),
    weight_versions=st.lists(st.fixed_dictionaries({"version": st.text(max_size=3), "start": st.integers(0, 9)})),
)
STATES = st.sampled_from(["finished", "pruned", "surplus", "failed"])
CANDIDATES = st.builds(Candidate, **ENDED, state=STATES) | st.builds(
    UnselectedCandidate, **ENDED, **CONTENT, state=STATES
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


def test_a_body_has_the_fields_of_the_model_in_its_order():
    trajectory = Trajectory(index=1, token_ids=[1], logprobs=[-0.25], num_tokens=1, finish_reason="stop")
    dropped = Candidate(index=0, num_tokens=1, state="surplus")
    group = GroupAnswer(
        prompt_id="é", group_id="g", status="complete", prompt_token_ids=[3], trajectories=[trajectory],
        candidates=[dropped], lengths=GroupLengths(mean=1, std=0, max=1),
        allocation=Allocation(num_candidates=2, selection="first"),
    )  # fmt: skip
    answer = RolloutAnswer(id="r", created=1, model="m", groups=[group, group], usage=Usage(), timing=Timing())
    answer.groups[1] = group.model_copy(update={"prompt_id": "b"})
    assert asyncio.run(body_of(answer)).decode() == answer.model_dump_json()


@pytest.mark.parametrize("num_parts", [0, 1, 7])
def test_merged_parts_are_the_same_bytes_in_fewer_pieces(num_parts: int):
    parts = [bytes([i]) * (serialised.PART_BYTES // 2) for i in range(num_parts)]
    merged = serialised.merged(parts)
    assert b"".join(merged) == b"".join(parts)
    assert len(merged) == max(1, -(-num_parts // 2))


async def test_large_trajectories_are_encoded_on_another_thread(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
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
