"""What a replay measures. Invariant: generated tokens = returned tokens + wasted tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from heapq import merge
from itertools import pairwise
from typing import Any

import numpy as np

from vllm_rollout.group.types import Ending, GroupResult
from vllm_rollout.simulator.fleet import FleetRun
from vllm_rollout.simulator.pool import PoolCandidate
from vllm_rollout.simulator.settings import Setting

Curve = list[tuple[float, int]]
"""(time, candidates that run from then on)."""


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Of returned trajectories, in tokens."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One setting over a whole trace."""

    setting: Setting
    seconds: float
    """Steps on an ideal machine. Rollouts run one after the other, as training steps do."""
    time_to_first_group_s: float
    """Mean over rollouts."""
    generated_tokens: int
    returned_tokens: int
    bubble: float
    """1 - mean over time of running candidates / their peak, per rollout; a rank that is done runs none."""
    lengths: LengthSummary
    truncated_share: float
    """Of returned trajectories."""
    incomplete_share: float
    """Of groups: those that return fewer than `group_size` trajectories, be it with `allow_fewer`."""
    upper_bound_share: float
    """Of groups whose redundancy "auto" went to its upper bound."""
    candidates_per_prompt: float
    num_candidates: int
    num_pruned: int
    num_drawn: int
    """Candidates that ran beyond what the trace has seen of them."""
    num_resampled: int
    """Candidates that are others of their prompt once more."""
    num_preemptions: int
    num_ranks: int
    num_moves: int
    """Groups that moved to another rank."""
    busy_rank_s: float
    """Seconds until each rank had nothing left to do, summed."""
    freed_rank_s: float
    """Seconds for which ranks that were emptied stayed so until their rollout was over, summed."""
    num_groups: int
    num_without_history: int
    """Of groups with redundancy "auto": nothing was known of their prompt."""
    returned_lengths: tuple[int, ...]
    curve: Curve
    """Of the last rollout, over all ranks."""

    @property
    def busy_share(self) -> float:
        """Of the time of all ranks."""
        return self.busy_rank_s / (self.num_ranks * self.seconds) if self.seconds else 0.0

    @property
    def freed_share(self) -> float:
        """The same."""
        return self.freed_rank_s / (self.num_ranks * self.seconds) if self.seconds else 0.0

    @property
    def wasted_tokens(self) -> int:
        return self.generated_tokens - self.returned_tokens

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for name in ("setting", "returned_lengths", "curve"):
            del values[name]
        times = {"time": values.pop("seconds"), "time_to_first_group": values.pop("time_to_first_group_s")}
        return {"setting": self.setting.described(), **times, **values, "wasted_tokens": self.wasted_tokens}


@dataclass(slots=True)
class Tally:
    """Adds up rollouts."""

    setting: Setting
    seconds: float = 0.0
    first_group_s: list[float] = field(default_factory=list)
    running_s: float = 0.0
    """Candidates times seconds."""
    peak_s: float = 0.0
    """The same, had the peak lasted."""
    generated_tokens: int = 0
    returned_lengths: list[int] = field(default_factory=list)
    num_truncated: int = 0
    num_incomplete: int = 0
    num_at_upper_bound: int = 0
    num_candidates: int = 0
    num_pruned: int = 0
    num_drawn: int = 0
    num_resampled: int = 0
    num_preemptions: int = 0
    num_ranks: int = 0
    num_moves: int = 0
    busy_rank_s: float = 0.0
    freed_rank_s: float = 0.0
    num_groups: int = 0
    num_without_history: int = 0
    curve: Curve = field(default_factory=list)

    def add_group(self, result: GroupResult, pool: Sequence[PoolCandidate], at_upper_bound: bool) -> None:
        self.num_groups += 1
        self.num_at_upper_bound += at_upper_bound
        self.num_incomplete += len(result.selected) < self.setting.group_size
        self.num_candidates += len(pool)
        self.num_resampled += sum(candidate.resampled for candidate in pool)
        endings: tuple[Ending, ...] = result.endings
        self.generated_tokens += result.generated_tokens
        self.num_pruned += sum(ending.state == "pruned" for ending in endings)
        self.num_drawn += sum(e.num_tokens > c.num_known for e, c in zip(endings, pool, strict=True))
        for index in result.selected:
            self.returned_lengths.append(endings[index].num_tokens)
            self.num_truncated += endings[index].truncated

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

    def outcome(self) -> Outcome:
        lengths = np.array(self.returned_lengths or [0])
        p50, p90, p99 = np.percentile(lengths, (50, 90, 99))
        num_returned = max(1, len(self.returned_lengths))
        return Outcome(
            setting=self.setting,
            seconds=self.seconds,
            time_to_first_group_s=sum(self.first_group_s) / len(self.first_group_s),
            generated_tokens=self.generated_tokens,
            returned_tokens=sum(self.returned_lengths),
            bubble=1 - self.running_s / self.peak_s if self.peak_s else 0.0,
            lengths=LengthSummary(float(lengths.mean()), float(lengths.std()), float(p50), float(p90), float(p99)),
            truncated_share=self.num_truncated / num_returned,
            incomplete_share=self.num_incomplete / self.num_groups,
            upper_bound_share=self.num_at_upper_bound / self.num_groups,
            candidates_per_prompt=self.num_candidates / self.num_groups,
            num_candidates=self.num_candidates,
            num_pruned=self.num_pruned,
            num_drawn=self.num_drawn,
            num_resampled=self.num_resampled,
            num_preemptions=self.num_preemptions,
            num_ranks=self.num_ranks,
            num_moves=self.num_moves,
            busy_rank_s=self.busy_rank_s,
            freed_rank_s=self.freed_rank_s,
            num_groups=self.num_groups,
            num_without_history=self.num_without_history,
            returned_lengths=tuple(self.returned_lengths),
            curve=self.curve,
        )


def _integral(curve: Curve) -> float:
    return sum((after[0] - before[0]) * before[1] for before, after in pairwise(curve))


def summed(curves: Iterable[Curve]) -> Curve:
    """Candidates that run anywhere."""
    changes = []
    for curve in curves:
        before = 0
        steps = []
        for time, running in curve:
            steps.append((time, running - before))
            before = running
        changes.append(steps)
    total = 0
    points: Curve = []
    for time, change in merge(*changes):
        total += change
        if points and points[-1][0] == time:
            points[-1] = (time, total)
        else:
            points.append((time, total))
    return points
