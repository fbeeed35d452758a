"""Audit groups over HTTP: nobody is stopped in them, the client is told, and what it gets is what it asked for."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .conftest import make_app
from .fake_engine import FakeEngine
from .test_rollouts import PROMPTS, body, post

pytestmark = pytest.mark.anyio

PRUNING = {"detection_length": 2, "keep_ratio": 0.5, "min_labels": 1}


async def test_an_audited_rollout_returns_group_size_trajectories_and_stops_none(http):
    answer = await post(http, audit_ratio=1.0, pruning=PRUNING)
    for group in answer.groups:
        assert group.audit
        assert (group.status, len(group.trajectories), group.candidates) == ("complete", 4, [])
        assert [t.index for t in group.trajectories] == [0, 1, 2, 3]
        assert [t.inclusion_probability for t in group.trajectories] == [1.0] * 4
        assert {t.survival_probability for t in group.trajectories} == {1.0}
        assert group.allocation.num_candidates == 4
    assert answer.usage.num_surplus == answer.usage.num_pruned == answer.usage.wasted_tokens == 0


async def test_in_a_race_nobody_knows_the_chance_to_be_returned(http):
    answer = await post(http, audit_ratio=0.0, pruning=PRUNING)
    assert not any(group.audit for group in answer.groups)
    assert {t.inclusion_probability for group in answer.groups for t in group.trajectories} == {None}
    plain = await post(http, redundancy=0)
    assert {t.inclusion_probability for group in plain.groups for t in group.trajectories} == {1.0}


async def audits_of(http: httpx.AsyncClient, **fields: Any) -> list[bool]:
    prompts = [{"prompt": f"number {number}"} for number in range(40)]
    return [group.audit for group in (await post(http, prompts=prompts, group_size=1, **fields)).groups]


async def test_an_answer_is_audited_as_a_whole_and_a_stream_group_by_group(http):
    settings = {"redundancy": 1, "audit_ratio": 0.5}
    whole = [await audits_of(http, sampling={"seed": 1}, **settings) for _ in range(6)]
    assert [set(marks) for marks in whole] == [{True}, {False}, {True}, {False}, {True}, {True}]
    assert set(await audits_of(http, sampling={"seed": 1}, audit_unit="group", **settings)) == {True, False}
    streamed = body(stream=True, audit_ratio=0.5, prompts=[{"prompt": f"number {n}"} for n in range(40)])
    lines = (await http.post("/v1/rollouts", json=streamed)).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {event["audit"] for event in events if event["type"] == "group"} == {True, False}


async def test_a_run_with_one_seed_and_one_batch_has_its_share_of_audits(http):
    """The first, then by their number; what does not race, or has no audits, is not counted with them."""
    pruning = {**PRUNING, "mode": "shadow"}
    settings = {"sampling": {"seed": 1}, "pruning": pruning, "group_size": 1, "prompts": PROMPTS[:1]}
    marks = []
    for _ in range(36):
        await post(http, audit_ratio=0.0, redundancy=1, **settings)
        await post(http, audit_ratio=0.3, redundancy=0, **settings)
        marks.append((await post(http, audit_ratio=0.05, redundancy=1, **settings)).groups[0].audit)
    assert [number for number, audit in enumerate(marks) if audit] == [0, 13, 34]


async def test_only_what_learns_is_audited_unless_a_request_says_so():
    transport = httpx.ASGITransport(make_app(FakeEngine(), audit_ratio=1.0))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        assert not (await post(http)).groups[0].audit
        assert (await post(http, pruning=PRUNING)).groups[0].audit
        assert (await post(http, redundancy="auto")).groups[0].audit
        assert not (await post(http, pruning=PRUNING, audit_ratio=0.0)).groups[0].audit
        assert (await post(http, audit_ratio=1.0)).groups[0].audit


@pytest.mark.parametrize("value", [-0.1, 1.5, "half", True])
async def test_a_ratio_is_a_number_from_0_to_1(http, value):
    response = await http.post("/v1/rollouts", json=body(audit_ratio=value))
    assert response.status_code == 422
    assert "audit_ratio" in response.text


async def test_audits_are_counted(http):
    await post(http, audit_ratio=1.0)
    metrics = (await http.get("/metrics")).text
    assert f"vllm_rollout:audit_groups_total {len(PROMPTS)}.0" in metrics
