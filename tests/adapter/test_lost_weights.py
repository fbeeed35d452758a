"""A rollout does not run on the model's own weights where a trainer's were before."""

from __future__ import annotations

import asyncio

import pytest

from vllm_rollout.adapter.api.engine import lost_weights
from vllm_rollout.adapter.api.engine.lost_weights import LostWeights
from vllm_rollout.server.engine import RequestError


def versions(*said: str | None):
    """Answers these, one after the other; the last one for ever."""
    left = list(said)

    async def current_version() -> str | None:
        return left.pop(0) if len(left) > 1 else left[0]

    return current_version


def test_where_none_were_lost_nothing_is_asked():
    async def ask() -> str | None:
        raise AssertionError("asked")

    asyncio.run(LostWeights().found(ask))


def test_a_rollout_waits_for_weights_and_the_next_one_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost_weights, "LOOK_S", 0.0)
    lost = LostWeights()
    lost.version = "step-7"
    asyncio.run(lost.found(versions(None, None, "step-8")))
    assert lost.version is None


def test_without_them_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost_weights, "PATIENCE_S", 0.0)
    lost = LostWeights()
    lost.version = "step-7"
    with pytest.raises(RequestError, match="in place of version 'step-7'") as error:
        asyncio.run(lost.found(versions(None)))
    assert error.value.status == 409
    assert lost.version == "step-7"
