"""The name of new weights, from a request to the parts of the API process."""

from __future__ import annotations

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.http.ports import ApiPart


class Hearing(ApiPart):
    """Notes names. Overrides: weights_named."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def weights_named(self, version: str) -> None:
        self.names.append(version)


@pytest.mark.parametrize("is_served", [True, False])
async def test_parts_hear_a_name_once_the_engine_has_it(monkeypatch: pytest.MonkeyPatch, is_served: bool) -> None:
    named: list[str] = []

    async def update_weight_version(self: AsyncLLM, new_version: str) -> None:
        assert part.names == []
        named.append(new_version)

    monkeypatch.setattr(AsyncLLM, "update_weight_version", update_weight_version)
    monkeypatch.setattr(RolloutAsyncLLM, "shutdown", lambda self: None)
    client, engine, part = RolloutAsyncLLM.__new__(RolloutAsyncLLM), VLLMEngine.__new__(VLLMEngine), Hearing()
    engine.parts, client.after_version = [ApiPart(engine), part], engine._weights_named if is_served else None
    await client.update_weight_version("step-1")
    assert (named, part.names) == (["step-1"], ["step-1"] if is_served else [])
