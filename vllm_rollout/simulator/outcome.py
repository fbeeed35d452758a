"""Measurements of replays, and the choice of a setting.

Invariant: generated = returned + wasted tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from vllm_rollout.kernel.rules.types import GroupResult
from vllm_rollout.simulator.machine import Curve, FleetRun, Machine
from vllm_rollout.simulator.race import PoolCandidate
from vllm_rollout.simulator.settings import Setting

MORE_INCOMPLETE = 0.01
"""Share of incomplete groups by which a recommended setting may exceed the baseline."""


class LengthSummary(NamedTuple):
    """Lengths of returned trajectories, in tokens."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float


@dataclass(slots=True)
class SimulationOutcome:
    """One setting over a whole trace. Its rollouts run one after the other, as training steps do, and are added up."""

    setting: Setting
    seconds: float = 0.0
    """Time of all rollouts, in steps on an ideal machine."""
    first_group_s: list[float] = field(default_factory=list)
    """Seconds until the first group of each rollout was over."""
    running_s: float = 0.0
    """Running candidates times seconds."""
    peak_s: float = 0.0
    """Candidates times seconds, if the peak of each rank had lasted until its rollout was over."""
    generated_tokens: int = 0
    returned_lengths: list[int] = field(default_factory=list)
    num_truncated: int = 0
    """Returned trajectories that were cut."""
    num_incomplete: int = 0
    """Groups that return fewer than `group_size` trajectories, also with `allow_fewer`."""
    num_at_upper_bound: int = 0
    """Groups whose redundancy "auto" went to its upper bound."""
    num_candidates: int = 0
    num_pruned: int = 0
    num_turns: int = 0
    """Turns of sessions that have run, including stopped turns."""
    num_void: int = 0
    """Sessions that are void because a tool failed."""
    num_drawn: int = 0
    """Candidates that ran beyond their recorded tokens."""
    num_resampled: int = 0
    """Candidates that repeat another candidate of their prompt."""
    num_preemptions: int = 0
    num_ranks: int = 0
    num_moves: int = 0
    """Moves of groups to another rank."""
    busy_rank_s: float = 0.0
    """Seconds until each rank had nothing left to do, summed."""
    freed_rank_s: float = 0.0
    """Seconds from each freed rank's last step to the end of its rollout, summed."""
    num_groups: int = 0
    num_without_history: int = 0
    """Groups with redundancy "auto" whose prompt had no history."""
    curve: Curve = field(default_factory=list)
    """Running candidates of the last rollout, over all ranks."""

    def add_group(self, result: GroupResult, pool: Sequence[PoolCandidate], at_upper_bound: bool) -> None:
        self.num_groups += 1
        self.num_at_upper_bound += at_upper_bound
        self.num_incomplete += len(result.selected) < self.setting.group_size
        self.num_candidates += len(pool)
        self.num_resampled += sum(candidate.resampled for candidate in pool)
        endings = result.endings
        self.generated_tokens += result.generated_tokens
        self.num_pruned += sum(ending.state == "pruned" for ending in endings)
        self.num_drawn += sum(e.num_tokens > c.num_known for e, c in zip(endings, pool, strict=True))
        for index in result.selected:
            self.returned_lengths.append(endings[index].num_tokens)
            self.num_truncated += endings[index].truncated

    def add_sessions(self, sessions: Iterable[Any]) -> None:
        for session in sessions:
            self.num_turns += session.num_turns
            self.num_void += session.is_void

    def add_rollout(self, run: FleetRun, first_group_s: float) -> None:
        ranks, seconds = run.ranks, run.seconds
        self.seconds += seconds
        self.first_group_s.append(first_group_s)
        self.num_preemptions += sum(rank.num_preemptions for rank in ranks)
        self.num_ranks = len(ranks)
        self.num_moves += run.num_moves
        self.busy_rank_s += sum(rank.seconds for rank in ranks)
        self.freed_rank_s += run.freed_rank_s
        self.running_s += sum(_integral(rank.curve) for rank in ranks)
        self.peak_s += seconds * sum(max(running for _, running in rank.curve) for rank in ranks)
        self.curve = summed(rank.curve for rank in ranks)

    @property
    def time_to_first_group_s(self) -> float:
        """Mean over rollouts of the seconds until the first group was over."""
        return sum(self.first_group_s) / len(self.first_group_s)

    @property
    def returned_tokens(self) -> int:
        return sum(self.returned_lengths)

    @property
    def wasted_tokens(self) -> int:
        return self.generated_tokens - self.returned_tokens

    @property
    def bubble(self) -> float:
        """1 - mean over time of running candidates / their peak, per rollout. A rank that is done runs none."""
        return 1 - self.running_s / self.peak_s if self.peak_s else 0.0

    @property
    def lengths(self) -> LengthSummary:
        lengths = np.array(self.returned_lengths or [0])
        return LengthSummary(*map(float, (lengths.mean(), lengths.std(), *np.percentile(lengths, (50, 90, 99)))))

    @property
    def truncated_share(self) -> float:
        """Share of returned trajectories that were cut."""
        return self.num_truncated / max(1, len(self.returned_lengths))

    @property
    def incomplete_share(self) -> float:
        """Share of groups that are incomplete."""
        return self.num_incomplete / self.num_groups

    @property
    def upper_bound_share(self) -> float:
        """Share of groups that had their upper bound of candidates."""
        return self.num_at_upper_bound / self.num_groups

    @property
    def candidates_per_prompt(self) -> float:
        return self.num_candidates / self.num_groups

    @property
    def num_rollouts(self) -> int:
        return len(self.first_group_s)

    @property
    def busy_share(self) -> float:
        """Share of all ranks' time in which they work."""
        return self.busy_rank_s / (self.num_ranks * self.seconds) if self.seconds else 0.0

    @property
    def freed_share(self) -> float:
        """Share of all ranks' time in which they are freed."""
        return self.freed_rank_s / (self.num_ranks * self.seconds) if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting.described(),
            "time": self.seconds,
            "time_to_first_group": self.time_to_first_group_s,
            "lengths": self.lengths._asdict(),
            **{name: getattr(self, name) for name in TOLD},
        }


TOLD = (
    *("generated_tokens", "returned_tokens", "wasted_tokens", "bubble", "truncated_share", "incomplete_share"),
    *("upper_bound_share", "candidates_per_prompt", "num_candidates", "num_pruned", "num_drawn", "num_resampled"),
    *("num_turns", "num_void"),
    *("num_preemptions", "num_ranks", "num_moves", "busy_rank_s", "freed_rank_s", "num_groups", "num_without_history"),
)
"""Attributes that `to_json` writes unchanged."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Many settings on one trace, with equal candidates on the same machine."""

    outcomes: tuple[SimulationOutcome, ...]
    """Outcomes by setting, the baseline first."""
    machine: Machine
    without_moves: SimulationOutcome | None = None
    """The baseline once more, with groups that stay on their ranks. None if they stay anyway."""

    @property
    def baseline(self) -> SimulationOutcome:
        return self.outcomes[0]

    @property
    def fastest(self) -> SimulationOutcome:
        """The fastest outcome with hardly more incomplete groups than the baseline (`MORE_INCOMPLETE`)."""
        return min(self._usable, key=lambda outcome: outcome.seconds)

    @property
    def fastest_with_longest(self) -> SimulationOutcome | None:
        """The fastest usable outcome that returns long answers on purpose, or None if no such setting was tried."""
        keeping = [outcome for outcome in self._usable if outcome.setting.keeps_longest]
        return min(keeping, key=lambda outcome: outcome.seconds, default=None)

    @property
    def _usable(self) -> list[SimulationOutcome]:
        most = self.baseline.incomplete_share + MORE_INCOMPLETE
        return [outcome for outcome in self.outcomes if outcome.incomplete_share <= most]

    def speed_up(self, outcome: SimulationOutcome) -> float:
        return self.baseline.seconds / outcome.seconds


def _integral(curve: Curve) -> float:
    return sum((after[0] - before[0]) * before[1] for before, after in pairwise(curve))


def summed(curves: Iterable[Curve]) -> Curve:
    """Candidates that run on any rank, over time."""
    changes = []
    for curve in curves:
        before = 0
        steps = []
        for time, running in curve:
            steps.append((time, running - before))
            before = running
        changes.append(steps)
    total = 0
    points = {}
    for time, change in merge(*changes):
        total += change
        points[time] = total
    return list(points.items())
