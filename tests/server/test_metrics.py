"""`/metrics` counts what the answers say; what is read from the engine is up to date there, without a wait for it."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_rollout.group.types import HeldGroups
from vllm_rollout.server import gauges
from vllm_rollout.server.answers import RolloutAnswer, Usage
from vllm_rollout.server.gauges import FreshGauges

from .fake_engine import FakeEngine


async def samples(http: httpx.AsyncClient) -> dict[str, float]:
    """By name and labels; an empty label is none, as for Prometheus."""
    text = (await http.get("/metrics")).text
    return {
        ".".join(filter(None, [sample.name.removeprefix("vllm_rollout:"), *sample.labels.values()])): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def roll(http: httpx.AsyncClient, **fields: object) -> Usage:
    body = {"prompts": [{"prompt": "a"}, {"prompt": "b"}], "group_size": 4, "redundancy": 4, **fields}
    return RolloutAnswer.model_validate_json((await http.post("/v1/rollouts", json=body)).content).usage


async def test_every_series_is_there_before_the_first_rollout(http):
    values = await samples(http)
    names = ["groups_total.complete", "groups_total.incomplete", "tokens_total.wasted", "candidates_total.surplus"]
    names += ["candidates_total.pruned", "rewards_total.conflict", "labels_total.positive", "score_count.head"]
    for name in [*names, "survival_probability_count"]:
        assert values[name] == 0


async def test_counters_add_up_over_rollouts_and_streams(http, engine: FakeEngine):
    first = await roll(http)
    engine.failures = {0: 0, 1: 0}
    second = await roll(http, redundancy=0)
    values = await samples(http)
    for kind in ("generated", "returned", "wasted"):
        assert values[f"tokens_total.{kind}"] == getattr(first, f"{kind}_tokens") + getattr(second, f"{kind}_tokens")
    for state in ("finished", "pruned", "surplus", "failed"):
        assert values[f"candidates_total.{state}"] == getattr(first, f"num_{state}") + getattr(second, f"num_{state}")
    assert (values["groups_total.complete"], values["groups_total.incomplete"]) == (2, 2)
    assert values["group_latency_seconds_count"] == values["group_wasted_share_count"] == 4
    engine.failures = {}
    await http.post("/v1/rollouts", json={"prompts": [{"prompt": "c"}], "group_size": 1, "stream": True})
    assert (await samples(http))["groups_total.complete"] == 3


@pytest.fixture
def fresh(app) -> None:
    app.add_middleware(FreshGauges)


async def held(numbers: HeldGroups) -> HeldGroups:
    return numbers


@pytest.mark.usefixtures("fresh")
async def test_groups_that_wait_for_requests_are_seen_without_a_rollout(http, monkeypatch):
    monkeypatch.setattr(FakeEngine, "held_groups", lambda _: held(HeldGroups(2, 3, 0, 4)))
    values = await samples(http)
    assert (values["groups_held.running"], values["groups_held.idle"]) == (2, 3)
    assert values["joined_groups_unmet"] == 4


@pytest.mark.usefixtures("fresh")
async def test_an_engine_that_does_not_answer_holds_nobody_up(http, monkeypatch):
    monkeypatch.setattr(gauges, "PATIENCE_S", 0.01)
    monkeypatch.setattr(FakeEngine, "held_groups", lambda _: asyncio.Event().wait())
    for _ in range(2):
        assert (await http.get("/metrics")).status_code == 200


@pytest.mark.usefixtures("fresh")
async def test_other_paths_ask_nothing_of_the_engine(http: httpx.AsyncClient, monkeypatch):
    monkeypatch.setattr(FakeEngine, "held_groups", None)
    assert (await http.get("/health")).status_code == 200
