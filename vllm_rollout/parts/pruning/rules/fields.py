"""The table of request fields of pruning, as `kernel/rules/fields.py` has those of groups."""

# ruff: noqa: RUF009  # `row` makes a field of a dataclass

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from vllm_rollout import config
from vllm_rollout.kernel.rules.fields import AUTO
from vllm_rollout.kernel.rules.rows import Either, Flag, Integer, Names, Number, Object, Several, row
from vllm_rollout.kernel.rules.types import Signal

PruningRule = Literal["balance", "gradient", "paper"]
PruningMode = Literal["active", "shadow"]

MAX_MIN_LABELS = config.CALIBRATION_WINDOW // 2
"""Largest `min_labels`: calibration remembers at most twice as many labels."""
MAX_STRENGTH = 1000.0
"""Largest `strength` of the paper's rule that a request may name."""

SHARE = Number(0, 1, above=True)
_LENGTH = Integer(1, config.MAX_DETECTION_LENGTH)


@dataclass(frozen=True)
class PruningFields:
    """Fields that set how candidates are scored at `detection_length`, and which are stopped there.

    Source: ARRoL 4.2 and A.4.
    """

    detection_length: int | list[int] | Literal["auto"] = row(
        Either((_LENGTH, Several(_LENGTH, config.MAX_TRIAL_LENGTHS), Names((AUTO,)))),
        "Output tokens after which a candidate is scored (L_detect). A candidate that ends before is not scored and "
        "is kept. A list scores at each length and stops no candidate (mode shadow), for a comparison by GET "
        '/v1/quality_head/detection_lengths. "auto" is the length recommended there. Before there is a '
        f'recommendation, "auto" compares {", ".join(map(str, config.TRIAL_LENGTHS))}.',
        flat=_LENGTH,
    )
    rule: PruningRule = row(
        Names(get_args(PruningRule)),
        'Rule that selects the kept candidates. Each rule keeps keep_ratio. "balance" steers survivors towards '
        'target_positive_ratio. "gradient" steers if a group would end without reward variance, and prunes at random '
        'otherwise. "paper" is ARRoL\'s Eq. 2 as printed.',
        default="balance",
        xarg="pruning_rule",
    )
    keep_ratio: float = row(
        SHARE,
        "Share of scored candidates to keep on average, between min_survival and max_survival. With 1 all candidates "
        "are scored and kept.",
        default=0.5,
    )
    target_positive_ratio: float = row(
        Number(0, 1, above=True, below=True),
        "Success rate that balance and paper aim at among survivors (rho).",
        default=0.5,
    )
    strength: float = row(
        Number(0, MAX_STRENGTH),
        "Lambda of the paper's rule. The other rules find their own lambda.",
        default=0.5,
        xarg="pruning_strength",
    )
    min_survival: float = row(SHARE, "Lower bound of the probability that a candidate is kept.", default=0.05)
    max_survival: float = row(SHARE, "Upper bound of the probability that a candidate is kept.", default=0.95)
    mode: PruningMode = row(
        Names(get_args(PruningMode)),
        '"shadow": decide and report (would_prune), but stop no candidate.',
        default="active",
        xarg="pruning_mode",
    )
    signal: Signal = row(
        Names(get_args(Signal)),
        "Signal that candidates are scored by: the quality head, or trace confidence. While the head knows too "
        "little, trace confidence stands in.",
        default="head",
    )
    allow_fewer: bool = row(
        Flag(),
        "Prune even if fewer than group_size candidates are left to finish. The group is then complete with those.",
        default=False,
    )
    min_labels: int = row(
        Integer(1, MAX_MIN_LABELS),
        "Number of positive rewards, and of negative rewards, that pruning needs before it stops a candidate.",
        default=64,
    )
    final_score: bool = row(
        Flag(),
        "Also score trajectories by their last token. A head of its own gives this score, and learns from the same "
        "rewards.",
        default=False,
    )


@dataclass(kw_only=True)
class RolloutPruningFields:
    """Fields of pruning that a rollout has beside `kernel/rules/fields.py::RaceFields`."""

    pruning: PruningFields | None = row(
        Object(PruningFields, '{"detection_length": 512, "keep_ratio": 0.5}'),
        "Score candidates at a detection length and stop candidates that will not help training. Default: no pruning.",
        "body",
        default=None,
    )
