"""The name of new weights, asked of the engine and told to those who want to hear it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_rollout.kernel.api import engine as module
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.call_table import NAME_ADAPTER, WEIGHT_VERSION, Operation
from vllm_rollout.kernel.http.engine import RequestError


def engine_of(*answers: list[str]) -> VLLMEngine:
    """An engine whose ranks give these answers, one after the other."""
    answers_left = iter(answers)

    async def call_all(operation: Operation[str, str], adapter: str) -> list[str]:
        assert (operation, adapter) == (WEIGHT_VERSION, "sql")
        return next(answers_left)

    engine = VLLMEngine.__new__(VLLMEngine)
    engine.calls = SimpleNamespace(call_all=call_all)
    return engine


async def test_a_name_that_only_some_ranks_have_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    differ = ["step-0", "step-1"]
    assert await engine_of(differ, differ, ["step-1", "step-1"]).current_weight_version("sql") == "step-1"
    assert await engine_of(["default"]).current_weight_version("sql") is None
    with pytest.raises(RequestError, match="Name their weights again") as raised:
        await engine_of(*[differ] * module.NUM_LOOKS).current_weight_version("sql")
    assert raised.value.status == 409


async def test_a_new_name_is_told_once_the_engine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    heard: list[str] = []

    async def update_weight_version(self: AsyncLLM, new_version: str) -> None:
        assert heard == []
        named.append(new_version)

    async def hear() -> None:
        heard.extend(named)

    monkeypatch.setattr(AsyncLLM, "update_weight_version", update_weight_version)
    monkeypatch.setattr(RolloutAsyncLLM, "shutdown", lambda self: None)
    client = RolloutAsyncLLM.__new__(RolloutAsyncLLM)
    client.after_version = [hear]
    await client.update_weight_version("step-1")
    assert named == heard == ["step-1"]


async def test_an_adapters_name_is_told_once_the_engine_has_it() -> None:
    told: list[object] = []

    async def call_all(operation: Operation[tuple[str, str], None], named: tuple[str, str]) -> None:
        told.append((operation, named))

    async def hear() -> None:
        told.append("heard")

    engine = VLLMEngine.__new__(VLLMEngine)
    engine.calls = SimpleNamespace(call_all=call_all)
    engine.client = RolloutAsyncLLM.__new__(RolloutAsyncLLM)
    engine.client.after_version = [hear]
    engine.client.shutdown = lambda: None
    await engine.name_adapter("sql", "step-3")
    assert told == [(NAME_ADAPTER, ("sql", "step-3")), "heard"]
