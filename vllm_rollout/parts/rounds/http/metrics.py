"""Metrics of rounds."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping
from typing import get_args

from vllm_rollout.kernel.http.engine import Engine
from vllm_rollout.kernel.http.engine_totals import Reading
from vllm_rollout.kernel.http.metrics import LATENCY_BUCKETS_S, MetricMaker, PartMetrics, TokenFate, token_fates
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import GroupResult, RankCounts
from vllm_rollout.parts.rounds.calls import NUM_RACES
from vllm_rollout.parts.rounds.rules.fields import RoundKind
from vllm_rollout.parts.rounds.rules.rounds import ROUND_KINDS, Fate


class RoundMetrics(PartMetrics):
    def __init__(self, make: MetricMaker) -> None:
        self._rounds = make.counter("rounds", "Rounds of runs that are over, by kind.", kind=ROUND_KINDS)
        self._prompts = make.counter(
            "round_prompts",
            "Prompts of rounds, by outcome: returned, filtered, deferred to a long round, or not started.",
            fate=get_args(Fate),
        )
        self._latency = make.histogram(
            "round_latency_seconds",
            "Time from the start of a round to the end of its last group.",
            LATENCY_BUCKETS_S,
            kind=ROUND_KINDS,
        )
        self._resumed = make.counter(
            "resumed_tokens",
            "Output tokens that a round took over from an earlier one, where tokens_total counts them as deferred.",
            kind=get_args(TokenFate),
        )
        self._races = make.gauge(
            "races_held", "Rounds of runs in the engine, counted on each rank that has groups of the round."
        )

    def round_over(self, kind: RoundKind, fates: Iterable[Fate], latency_s: float) -> None:
        self._rounds.labels(kind).inc()
        self._latency.labels(kind).observe(latency_s)
        for fate, num_prompts in Counts(fates).items():
            self._prompts.labels(fate).inc(num_prompts)

    def group_over(self, result: GroupResult, plan: GroupPlan | None) -> None:
        for ending, fate in token_fates(result):
            self._resumed.labels(fate).inc(ending.num_resumed)

    async def refresh(self, engine: Engine, ranks: Mapping[int, RankCounts]) -> Iterable[Reading]:
        held: list[int] = await engine.calls.call_all(NUM_RACES, None)
        self._races.set(sum(held))
        return ()
