"""Request fields -> PruningPlan. Invariant: a plan that exists lies within the ranges stated here, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from vllm_rollout.config import CALIBRATION_WINDOW, MAX_DETECTION_LENGTH, MAX_TRIAL_LENGTHS, TRIAL_LENGTHS
from vllm_rollout.group.types import Signal

PruningRule = Literal["gradient", "balance", "paper"]
PRUNING_RULES: tuple[PruningRule, ...] = ("gradient", "balance", "paper")
PruningMode = Literal["active", "shadow"]
PRUNING_MODES: tuple[PruningMode, ...] = ("active", "shadow")
SIGNALS: tuple[Signal, ...] = ("head", "confidence")

MAX_STRENGTH = 1000.0
"""Largest `strength` of the paper's rule that a request may name."""
MAX_MIN_LABELS = CALIBRATION_WINDOW // 2
"""Of either kind: calibration remembers no more than twice that."""


class PlanError(ValueError):
    """A field of a group request is out of its range. `field` names it as the user wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class PruningPlan:
    """How candidates are judged at `detection_length` (ARRoL section 4.2 and A.4)."""

    detection_length: int
    """Output tokens after which a candidate is scored, L_detect."""
    rule: PruningRule = "gradient"
    keep_ratio: float = 0.5
    """Share of scored candidates to keep on average, kappa."""
    target_positive_ratio: float = 0.5
    """Success rate wanted among survivors, rho; the gradient rule has no such aim."""
    strength: float = 0.5
    """Lambda of the paper's rule; the others find their own."""
    min_survival: float = 0.05
    max_survival: float = 0.95
    mode: PruningMode = "active"
    """`shadow`: decide and report, stop nothing."""
    signal: Signal = "head"
    allow_fewer: bool = False
    """Prune even when fewer than `group_size` candidates are left to finish."""
    min_labels: int = 64
    """Rewards of either kind, positive and negative, before anything is pruned."""
    audit: bool = False
    """Of an audit group (`group/audit.py`): nobody else sets it."""
    is_instead_of_race: bool = False
    """And without the audit it would race."""
    trial_lengths: tuple[int, ...] = ()
    """Further lengths, at which candidates are scored where nobody is stopped: in shadow mode and in audit groups."""
    final_score: bool = False
    """Finished candidates are scored at their end as well, by a head of its own (`WHOLE`)."""
    auto: bool = False
    """`detection_length` is to be chosen: `group/length_trial.py::chosen`. Nothing is launched with such a plan."""

    @property
    def scored_lengths(self) -> tuple[int, ...]:
        """All detection lengths at which a candidate is scored, ascending."""
        return tuple(sorted((self.detection_length, *self.tried_lengths)))

    @property
    def tried_lengths(self) -> tuple[int, ...]:
        """Those that nothing is decided by."""
        return self.trial_lengths if self.mode == "shadow" else ()

    def audited(self, races: bool) -> PruningPlan:
        """This plan in an audit group: what is decided is noted only. `races`: without the audit it would race."""
        return replace(self, mode="shadow", audit=True, is_instead_of_race=races)


class _Range(NamedTuple):
    allowed: str
    holds: Callable[[Any], bool]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(names: tuple[str, ...]) -> _Range:
    return _Range(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


_SURVIVAL = _Range("a number in (0, 1]", lambda value: _is_number(value) and 0 < value <= 1)


def _is_length(value: object) -> bool:
    return _is_integer(value) and 1 <= value <= MAX_DETECTION_LENGTH  # type: ignore[operator]  # it is an integer


def _are_lengths(value: object) -> bool:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_TRIAL_LENGTHS:
        return False
    return all(map(_is_length, value)) and len(set(value)) == len(value)


AUTO = "auto"

RANGES: Mapping[str, _Range] = {
    "detection_length": _Range(
        f'an integer in [1, {MAX_DETECTION_LENGTH}], a list of 1 to {MAX_TRIAL_LENGTHS} different ones, or "{AUTO}"',
        lambda value: value == AUTO or _is_length(value) or _are_lengths(value),
    ),
    "rule": _one_of(PRUNING_RULES),
    "keep_ratio": _Range("a number in (0, 1]; 1 scores and keeps everything", _SURVIVAL.holds),
    "target_positive_ratio": _Range("a number in (0, 1)", lambda value: _is_number(value) and 0 < value < 1),
    "strength": _Range(
        f"a number in [0, {MAX_STRENGTH:.0f}]", lambda value: _is_number(value) and 0 <= value <= MAX_STRENGTH
    ),
    "min_survival": _SURVIVAL,
    "max_survival": _SURVIVAL,
    "mode": _one_of(PRUNING_MODES),
    "signal": _one_of(SIGNALS),
    "allow_fewer": _Range("true or false", lambda value: isinstance(value, bool)),
    "min_labels": _Range(f"an integer in [1, {MAX_MIN_LABELS}]", lambda n: _is_integer(n) and 1 <= n <= MAX_MIN_LABELS),
    "final_score": _Range("true or false", lambda value: isinstance(value, bool)),
}
"""Each field of a PruningPlan -> what it takes."""


def make_pruning_plan(fields: Mapping[str, Any], names: Mapping[str, str] | None = None) -> PruningPlan:
    """Check the fields of a PruningPlan; one that is left out has its default.

    `names` maps field names to what the user wrote (`rollout_keep_ratio` in xargs, `pruning.keep_ratio` in a body).

    Raises: PlanError with field, value and allowed range.
    """
    named = {field: (names or {}).get(field, field) for field in RANGES}
    for field, value in fields.items():
        if not RANGES[field].holds(value):
            raise PlanError(named[field], f"must be {RANGES[field].allowed}, got {value!r:.80}.")
    plan = PruningPlan(**{**fields, **_lengths(fields, named)})
    if plan.min_survival > plan.max_survival:
        field, other = "min_survival", "max_survival"
        if field not in fields:
            field, other = other, field
        raise PlanError(
            named[field],
            f"{named['min_survival']} must be at most {named['max_survival']}, got {plan.min_survival} and "
            f"{plan.max_survival}. Change {named[field]} or {named[other]}.",
        )
    if plan.keep_ratio < 1 and not plan.min_survival <= plan.keep_ratio <= plan.max_survival:
        broken = "min_survival" if plan.keep_ratio < plan.min_survival else "max_survival"
        raise PlanError(
            named["keep_ratio" if "keep_ratio" in fields else broken],
            f"{named['keep_ratio']} must lie between {named['min_survival']} and {named['max_survival']}, got "
            f"{plan.keep_ratio} and bounds of {plan.min_survival} and {plan.max_survival}: no verdicts within them "
            f"keep that share. Change {named['keep_ratio']} or {named[broken]}.",
        )
    return plan


def _lengths(fields: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, Any]:
    """What `detection_length` stands for: one length, several to compare, or one to be chosen."""
    given = fields.get("detection_length")
    if given == AUTO:
        return {"detection_length": TRIAL_LENGTHS[0], "trial_lengths": TRIAL_LENGTHS[1:], "auto": True}
    if not isinstance(given, list | tuple):
        return {}
    if fields.get("mode", "shadow") != "shadow" and len(given) > 1:
        raise PlanError(
            named["detection_length"],
            f"several lengths are compared in shadow mode only, got {list(given)} and {named['mode']} "
            f'{fields["mode"]!r}. Name one length, leave {named["mode"]} out, or let "{AUTO}" choose.',
        )
    first, *others = sorted(given)
    shadow = {"mode": "shadow"} if others else {}
    return {"detection_length": first, "trial_lengths": tuple(others), **shadow}
