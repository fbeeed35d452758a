"""Request fields -> PruningPlan, and what is seen of a candidate. Invariant: a plan that exists lies within the ranges
of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from vllm_rollout.config import TRIAL_LENGTHS
from vllm_rollout.kernel.rules.fields import AUTO
from vllm_rollout.kernel.rules.rows import PlanError, rows
from vllm_rollout.kernel.rules.types import BASE_MODEL, Signal
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.fields import PruningFields

SIGNALS: tuple[Signal, ...] = get_args(Signal)
WHOLE = 0
"""Value in place of a detection length: the whole trajectory, scored at its end (ARRoL section 4.4)."""


class HeadKey(NamedTuple):
    """Key of a quality head, and of the calibration of its scores."""

    detection_length: int
    adapter: str = BASE_MODEL
    """Name under which the LoRA adapter is served. `BASE_MODEL`: no adapter."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Measurement of a candidate in the step that produced token `detection_length`, or its last token."""

    confidence: Confidence
    logit: float | None = None
    """Output of the quality head. None while the head is untrained."""
    head_version: int = 0
    """Version of the quality head. 0: untrained."""
    detection_length: int | None = None
    """Output tokens at the measurement, or `WHOLE`. None: the plan's `detection_length`."""


@dataclass(frozen=True, slots=True)
class PruningPlan(PruningFields):
    """Checked fields of pruning, with one detection length, and the state of a group's audit."""

    detection_length: int
    audit: bool = False
    """True for the plan of an audit group (`parts/pruning/rules/audit.py`). No request field sets it."""
    is_instead_of_race: bool = False
    """True if the group would race without the audit."""
    trial_lengths: tuple[int, ...] = ()
    """Further detection lengths for scores only, in shadow mode and in audit groups."""
    auto: bool = False
    """True if `detection_length` is still to be chosen by `parts/pruning/rules/length_trial.py::chosen`. No candidate
    is launched with such a plan."""

    @property
    def scored_lengths(self) -> tuple[int, ...]:
        """All detection lengths at which a candidate is scored, ascending."""
        return tuple(sorted((self.detection_length, *self.tried_lengths)))

    @property
    def tried_lengths(self) -> tuple[int, ...]:
        """Detection lengths at which a candidate is scored without a decision."""
        return self.trial_lengths if self.mode == "shadow" else ()

    def audited(self, races: bool) -> PruningPlan:
        """Return this plan for an audit group: decisions are recorded, not carried out. `races`: sets
        `is_instead_of_race`."""
        return replace(self, mode="shadow", audit=True, is_instead_of_race=races)


def make_pruning_plan(fields: Mapping[str, Any], names: Mapping[str, str] | None = None) -> PruningPlan:
    """Check the fields of a PruningPlan. A field that is left out has its default.

    `names` maps field names to those that the user wrote (`rollout_keep_ratio` in xargs, `pruning.keep_ratio` in a
    body).

    Raises: PlanError with field, value and allowed range.
    """
    named = {field: (names or {}).get(field, field) for field in rows(PruningFields)}
    for field, value in fields.items():
        rows(PruningFields)[field].check(value, named[field])
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
    """Plan fields that follow from `detection_length`: one length, several to compare, or one to be chosen.

    Raises: PlanError if several lengths are given and the mode is not "shadow".
    """
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
