"""Calls to an engine core that dies."""

from __future__ import annotations

import asyncio

import pytest

from vllm_rollout.adapter.api import engine_calls
from vllm_rollout.adapter.api.engine_calls import EngineCalls
from vllm_rollout.adapter.call_table import CUT_RACE, HELD_GROUPS
from vllm_rollout.server.engine import RequestError


class DyingClient:
    """Never answers, as vLLM's client when its engine core dies with a call on its way."""

    num_ranks = 1
    living_ranks = (0,)
    core_engines = ("rank 0",)
    errored = False

    @property
    def engine_core(self) -> DyingClient:
        return self

    async def _call_utility_async(self, *args: object, **kwargs: object) -> bytes:
        asyncio.get_running_loop().call_later(0.02, setattr, self, "errored", True)
        return await asyncio.Future()


@pytest.mark.parametrize("calls", [
    lambda engine: engine._call_rank(0, CUT_RACE, "race"), lambda engine: engine._call_all(HELD_GROUPS, None)
])  # fmt: skip
def test_a_call_that_is_on_its_way_when_the_engine_dies_ends(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "LOOK_S", 0.01)

    async def call() -> None:
        with pytest.raises(RequestError, match="the engine has stopped") as error:
            await calls(EngineCalls(DyingClient()))
        assert error.value.status == 503

    asyncio.run(asyncio.wait_for(call(), 10))
