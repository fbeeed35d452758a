"""Calls to an engine core that dies."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.time_limit import end_within
from vllm_rollout.kernel.api import engine_calls
from vllm_rollout.kernel.api.engine_calls import EngineCalls, RankDied
from vllm_rollout.kernel.call_table import ABORT_REQUESTS, CANCEL_GROUPS, RANK_COUNTS
from vllm_rollout.kernel.http.engine import RequestError

pytestmark = pytest.mark.anyio


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


class TwoRanks:
    """The first dies when it is called; the other answers."""

    num_ranks = 2
    errored = False
    core_engines = (b"first", b"second")

    def __init__(self, *, both_die: bool = False) -> None:
        self.living_ranks = [0, 1]
        self._both_die = both_die

    @property
    def engine_core(self) -> TwoRanks:
        return self

    async def _call_utility_async(self, method: str, operation: str, payload: bytes, *, engine: bytes) -> bytes:
        rank = self.core_engines.index(engine)
        if rank == 0 or self._both_die:
            self.living_ranks.remove(rank)
            raise RankDied.of(rank)
        return ABORT_REQUESTS.encode_result([])


async def test_what_every_rank_knows_the_next_one_says_when_the_first_dies() -> None:
    end_within(10)
    assert await EngineCalls(TwoRanks()).call_first(ABORT_REQUESTS, ["g"]) == []
    with pytest.raises(RequestError, match="rank 1 of the engine has died"):
        await EngineCalls(TwoRanks(both_die=True)).call_first(ABORT_REQUESTS, ["g"])


@pytest.mark.parametrize("calls", [
    lambda engine: engine.call_rank(0, CANCEL_GROUPS, ["g"]), lambda engine: engine.call_all(RANK_COUNTS, None)
])  # fmt: skip
async def test_a_call_that_is_on_its_way_when_the_engine_dies_ends(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "LOOK_S", 0.01)
    end_within(10)
    with pytest.raises(RequestError, match="the engine has stopped") as error:
        await calls(EngineCalls(DyingClient()))
    assert error.value.status == 503
