"""Rollouts that are audited, as a whole or group by group."""

from __future__ import annotations

from typing import Any

import httpx

from tests.kernel.http.conftest import events_of, http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_rollouts import PROMPTS, body, post
from vllm_rollout.kernel import parts

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
    assert f"vllm_rollout:audit_groups_total {len(PROMPTS)}.0" in (await http.get("/metrics")).text


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
    whole = [await audits_of(http, sampling_params={"seed": 1}, **settings) for _ in range(6)]
    assert [set(marks) for marks in whole] == [{True}, {False}, {True}, {False}, {True}, {True}]
    assert set(await audits_of(http, sampling_params={"seed": 1}, audit_unit="group", **settings)) == {True, False}
    streamed = body(audit_ratio=0.5, prompts=[{"prompt": f"number {n}"} for n in range(40)])
    events = await events_of(http, "/v1/rollouts", **streamed)
    assert {event["audit"] for event in events if event["type"] == "group"} == {True, False}


async def test_a_run_with_one_seed_and_one_batch_has_its_share_of_audits(http):
    """The first, then by their number; what does not race, or has no audits, is not counted with them."""
    pruning = {**PRUNING, "mode": "shadow"}
    settings = {"sampling_params": {"seed": 1}, "pruning": pruning, "group_size": 1, "prompts": PROMPTS[:1]}
    marks = []
    for _ in range(36):
        await post(http, audit_ratio=0.0, redundancy=1, **settings)
        await post(http, audit_ratio=0.3, redundancy=0, **settings)
        marks.append((await post(http, audit_ratio=0.05, redundancy=1, **settings)).groups[0].audit)
    assert [number for number, audit in enumerate(marks) if audit] == [0, 13, 34]


async def test_only_what_learns_is_audited_unless_a_request_says_so():
    async with http_of(make_app(FakeEngine(), audit_ratio=1.0)) as http:
        assert not (await post(http)).groups[0].audit
        assert (await post(http, pruning=PRUNING)).groups[0].audit
        if parts.has("shaping"):
            assert (await post(http, redundancy="auto")).groups[0].audit
        assert not (await post(http, pruning=PRUNING, audit_ratio=0.0)).groups[0].audit
        assert (await post(http, audit_ratio=1.0)).groups[0].audit
