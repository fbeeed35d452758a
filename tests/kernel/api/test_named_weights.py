"""The name of new weights, asked of the engine and told to those who want to hear it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_rollout.kernel.api import engine as module
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.http.engine import RequestError


class Ranks:
    """Ranks of which the second one hears of a new name later, as vLLM tells it. Overrides nothing."""

    def __init__(self, *answers: str | Exception) -> None:
        self._answers = iter(answers)

    async def get_weight_version(self) -> str:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def engine_of(*answers: str | Exception) -> VLLMEngine:
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.client = Ranks(*answers)
    engine.calls = SimpleNamespace(unless_dead=lambda call: call)
    return engine


async def test_a_name_that_only_some_ranks_have_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    differ = RuntimeError("Engines returned different get_weight_version results: ['a', 'b']")
    assert await engine_of(differ, differ, "step-1").current_weight_version() == "step-1"
    with pytest.raises(RequestError, match="Name their weights again") as raised:
        await engine_of(*[differ] * module.NUM_LOOKS).current_weight_version()
    assert raised.value.status == 409


async def test_a_new_name_is_told_once_the_engine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    heard: list[str] = []

    async def update_weight_version(self: AsyncLLM, new_version: str) -> None:
        assert heard == []
        named.append(new_version)

    monkeypatch.setattr(AsyncLLM, "update_weight_version", update_weight_version)
    monkeypatch.setattr(RolloutAsyncLLM, "shutdown", lambda self: None)
    client = RolloutAsyncLLM.__new__(RolloutAsyncLLM)
    client.after_version = [heard.append]
    await client.update_weight_version("step-1")
    assert named == heard == ["step-1"]
