"""Records that `benchmarks.pruning` keeps of each rollout request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_rollout.kernel.rules.types import CandidateState, Signal
from vllm_rollout.parts.pruning.rules.assessment import Confidence

Score = Literal["head", "mean", "lowest_window", "bottom_windows"]
SCORES: tuple[Score, ...] = ("head", "mean", "lowest_window", "bottom_windows")
"""The head's logit, and the three aggregates of trace confidence."""


@dataclass(frozen=True, slots=True)
class Record:
    """One candidate, with its values from the answer and the checker's result."""

    prompt_id: str
    index: int
    state: CandidateState
    num_tokens: int
    truncated: bool
    correct: bool | None
    """None if the candidate was stopped before it could answer."""
    signal: Signal | None
    score: float | None
    """None if the candidate ended before `detection_length`, or if it was not scored."""
    success_probability: float | None
    survival_probability: float | None
    head_version: int | None
    confidence: Confidence | None

    def score_of(self, score: Score) -> float | None:
        if score == "head":
            return self.score if self.signal == "head" else None
        return None if self.confidence is None else getattr(self.confidence, score)


@dataclass(frozen=True, slots=True)
class Run:
    """One rollout request, with its time and its candidates."""

    key: tuple[str | int, ...]
    """Purpose of the request, such as ("balance", 3): way and block."""
    started_s: float
    """Start in seconds of Unix time."""
    wall_s: float
    generated_tokens: int
    num_scored: int
    num_pruned: int
    warnings: tuple[str, ...]
    records: tuple[Record, ...]
    rewards: Mapping[str, int] | None = None
    """Posted rewards by status, or None if none were posted."""
    num_audits: int = 0
    """Number of audit groups, in which no candidate is stopped, whatever the way."""


def records_of(runs: Iterable[Run]) -> list[Record]:
    return [record for run in runs for record in run.records]


def group_by(records: Iterable[Record], name: Callable[[Record], str]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(name(record), []).append(record)
    return groups


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def difference(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours - theirs
