"""Metrics of sessions."""

from __future__ import annotations

from vllm_rollout.kernel.http.metrics import MetricMaker, PartMetrics


class SessionMetrics(PartMetrics):
    def __init__(self, make: MetricMaker) -> None:
        self._turns = make.counter("session_turns", "Ended turns of sessions.")

    def turn_over(self) -> None:
        self._turns.inc()
