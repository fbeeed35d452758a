"""Metrics of groups that move between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_rollout.kernel.http.engine import Engine
from vllm_rollout.kernel.http.engine_totals import Reading
from vllm_rollout.kernel.http.metrics import MetricMaker, PartMetrics
from vllm_rollout.kernel.rules.types import RankCounts
from vllm_rollout.parts.moving.http.engine import MovesPart
from vllm_rollout.parts.moving.rules.migration import MoveOutcome

MOVE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class MovingMetrics(PartMetrics):
    def __init__(self, make: MetricMaker) -> None:
        self._moves = make.counter(
            "moves", "Moves of groups to another rank, by outcome: moved, over, stays, failed, lost.", outcome=()
        )
        self._move_seconds = make.histogram(
            "move_seconds",
            "Time from asking the old rank for a group until the new rank has the group.",
            MOVE_BUCKETS_S,
        )
        self._moving = make.counter("moving_seconds", "Time that a rank spent on groups that leave or arrive.", rank=())
        self._moved_with_kv = make.counter(
            "groups_moved_in_with_kv", "Groups that arrived at a rank together with their KV blocks.", rank=()
        )
        self._kv_blocks = make.counter(
            "kv_blocks_moved_in", "KV blocks that a rank took over from other ranks.", rank=()
        )
        self._kv_fallbacks = make.counter(
            "kv_move_fallbacks", "Groups whose KV a rank could not send or take over. It was computed again.", rank=()
        )

    def group_moved(self, outcome: MoveOutcome, seconds: float) -> None:
        self._moves.labels(outcome).inc()
        if outcome == "moved":
            self._move_seconds.observe(seconds)

    async def refresh(self, engine: Engine, ranks: Mapping[int, RankCounts]) -> Iterable[Reading]:
        return [
            Reading(counter, {"rank": str(rank)}, total)
            for rank, its in enumerate(await engine.part(MovesPart).rank_states())
            for counter, total in (
                (self._moving, its.moving_s),
                (self._moved_with_kv, its.kv.num_groups),
                (self._kv_blocks, its.kv.num_blocks),
                (self._kv_fallbacks, its.kv.num_fallbacks),
            )
        ]
