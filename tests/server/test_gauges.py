"""What is read from the engine is up to date at /metrics, without a rollout, and without a wait for an engine."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from vllm_rollout.group.types import HeldGroups
from vllm_rollout.server import gauges
from vllm_rollout.server.gauges import FreshGauges

from .fake_engine import FakeEngine
from .test_metrics import samples

pytestmark = pytest.mark.anyio


@pytest.fixture
def fresh(app) -> None:
    app.add_middleware(FreshGauges)


async def held(numbers: HeldGroups) -> HeldGroups:
    return numbers


@pytest.mark.usefixtures("fresh")
async def test_groups_that_wait_for_requests_are_seen_without_a_rollout(http, monkeypatch):
    monkeypatch.setattr(FakeEngine, "held_groups", lambda _: held(HeldGroups(2, 3, 0)))
    values = await samples(http)
    assert (values["groups_held.running"], values["groups_held.idle"]) == (2, 3)


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
