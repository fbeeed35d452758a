"""Calls of pruning to one rank."""

from __future__ import annotations

from tests.kernel.api.test_engine_calls import TwoRanks
from tests.support.time_limit import end_within
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.parts.pruning.api.rank_calls import call_if_alive
from vllm_rollout.parts.pruning.calls import HEADS


async def test_a_rank_that_dies_when_it_is_called_gives_no_answer() -> None:
    end_within(10)
    assert await call_if_alive(EngineCalls(TwoRanks()), 0, HEADS, None) is None
