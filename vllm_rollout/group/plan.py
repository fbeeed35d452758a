"""Request fields -> GroupPlan. Invariant: a plan that exists can be carried out by the rules as they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal, TypeVar

from vllm_rollout.config import MAX_GROUP_SIZE, MAX_PATIENCE
from vllm_rollout.group.lifecycle import GroupTerms
from vllm_rollout.group.pruning_plan import RANGES, PlanError, PruningPlan, make_pruning_plan

SelectionRule = Literal["first", "shortest", "dual_end"]
SELECTION_RULES: tuple[SelectionRule, ...] = ("first", "shortest", "dual_end")
EarlyStop = bool | Literal["auto"] | None
"""None and "auto": wherever the selection allows it."""

Default = TypeVar("Default", int, None)

XARG_PREFIX = "rollout_"
PLAN_XARGS = (
    "rollout_redundancy",
    "rollout_early_stop",
    "rollout_selection",
    "rollout_num_longest",
    "rollout_patience",
)
JOIN_XARGS = ("rollout_group_id", "rollout_group_size", "rollout_num_candidates", "rollout_early_stop")
PRUNING_XARGS: Mapping[str, str] = {
    field: f"rollout_{'pruning_' if field in ('rule', 'strength', 'mode') else ''}{field}" for field in RANGES
}
"""Field of a PruningPlan -> its name among the xargs."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What to do with one prompt."""

    group_size: int
    """Trajectories to return, M."""
    redundancy: int = 0
    """Spare candidates, M' - M."""
    early_stop: bool = True
    """Stop the others as soon as `group_size` valid candidates have finished."""
    selection: SelectionRule = "first"
    num_longest: int = 0
    """L of a dual-end selection; K = group_size - L."""
    pruning: PruningPlan | None = None
    patience: float | None = None
    """Of a dual-end selection: once `group_size` valid candidates have finished, the others get `patience` times the
    tokens of the longest of those. None: the whole pool runs to its end."""

    @property
    def num_candidates(self) -> int:
        """M' of DARTS."""
        return self.group_size + self.redundancy

    @property
    def terms(self) -> GroupTerms:
        """What every candidate of the group is launched with."""
        return GroupTerms(self.group_size, self.num_candidates, self.early_stop, self.patience, self.pruning)

    def allocated(self, num_candidates: int, at_upper_bound: bool, *, early_stop: bool = True) -> GroupPlan:
        """This plan with as many candidates as redundancy "auto" gives the prompt.

        At the upper bound the prompt's tail is long: shortest-only, with early stop unless that is forbidden.

        Source: DARTS Algorithm 2.
        """
        plan = replace(self, redundancy=num_candidates - self.group_size)
        if not at_upper_bound:
            return plan
        return replace(plan, selection="shortest", num_longest=0, patience=None, early_stop=early_stop)


@dataclass(frozen=True, slots=True)
class GroupJoin:
    """A single request that belongs to a group which other requests of the client make up."""

    group_id: str
    group_size: int
    num_candidates: int
    early_stop: bool = True
    pruning: PruningPlan | None = None


def make_plan(
    group_size: int,
    redundancy: int = 0,
    early_stop: EarlyStop = None,
    selection: SelectionRule = "first",
    num_longest: int | None = None,
    pruning: PruningPlan | None = None,
    patience: float | None = None,
    *,
    max_candidates: int,
    names: Mapping[str, str] | None = None,
) -> GroupPlan:
    """Check the fields of one group and return its plan.

    `early_stop=None` and "auto" mean "wherever the selection allows it". `max_candidates` is the engine's
    `max_num_seqs`: a group whose candidates cannot all run at once would decide its race by queue position. `names`
    maps field names to what the user wrote (`rollout_redundancy` in xargs).

    Raises: PlanError with field, value, allowed range and remedy.
    """
    named = names or {}

    def name(field: str) -> str:
        return named.get(field, field)

    if not 1 <= group_size <= MAX_GROUP_SIZE:
        raise PlanError(name("group_size"), f"must be in [1, {MAX_GROUP_SIZE}], got {group_size}.")
    if redundancy < 0:
        raise PlanError(
            name("redundancy"),
            f"must be at least 0, got {redundancy}. It counts spare candidates beyond {name('group_size')}.",
        )
    num_candidates = group_size + redundancy
    if num_candidates > max_candidates:
        raise PlanError(
            name("redundancy") if redundancy else name("group_size"),
            f"{name('group_size')} + {name('redundancy')} must be at most the server's max_num_seqs "
            f"({max_candidates}), got {group_size} + {redundancy} = {num_candidates}. "
            f"Ask for fewer candidates or start the server with --max-num-seqs {num_candidates}.",
        )
    _check_can_prune(pruning, group_size, num_candidates, name("redundancy"), name("allow_fewer"))
    if selection not in SELECTION_RULES:
        raise PlanError(name("selection"), f"must be one of {', '.join(SELECTION_RULES)}, got {selection!r}.")
    if selection != "dual_end":
        for field, value in (("num_longest", num_longest), ("patience", patience)):
            if value is not None:
                raise PlanError(name(field), f"only applies to selection dual_end, got selection {selection!r}.")
        return GroupPlan(group_size, redundancy, early_stop is not False, selection, pruning=pruning)
    num_longest = default_num_longest(group_size) if num_longest is None else num_longest
    if not 0 <= num_longest < group_size:
        raise PlanError(
            name("num_longest"),
            f"must be at least 0 and below {name('group_size')} ({group_size}), got {num_longest}: the other "
            f"{name('group_size')} - {name('num_longest')} trajectories are the shortest, and of those a dual-end "
            f"selection needs one. Leave it out for {default_num_longest(group_size)}.",
        )
    if early_stop is True:
        raise PlanError(
            name("early_stop"),
            "cannot be true with selection dual_end: the longest of the pool are known only when the whole pool has "
            'ended. Set it to "auto" (stop early where redundancy "auto" goes to its upper bound) or to false, bound '
            f"the wait with {name('patience')}, or select first or shortest.",
        )
    if patience is not None and not (isfinite(patience) and 1 <= patience <= MAX_PATIENCE):
        raise PlanError(
            name("patience"),
            f"must be in [1, {MAX_PATIENCE:g}], got {patience}. It is a factor on the length of the longest of the "
            f"first {name('group_size')} candidates; leave it out to wait for the whole pool.",
        )
    return GroupPlan(group_size, redundancy, False, selection, num_longest, pruning, patience)


def default_num_longest(group_size: int) -> int:
    """L of a dual-end selection: one, and none where that would leave no shortest."""
    return min(1, group_size - 1)


def _check_can_prune(
    pruning: PruningPlan | None, group_size: int, num_candidates: int, spare_field: str, allow_field: str
) -> None:
    """Raises: PlanError when pruning is asked for and its floor forbids every single verdict."""
    if pruning is None or pruning.mode == "shadow" or pruning.keep_ratio == 1 or pruning.allow_fewer:
        return
    if num_candidates == group_size:
        raise PlanError(
            allow_field,
            f"nothing could ever be pruned: all {num_candidates} candidates are needed for a group of {group_size}. "
            f"Ask for spare candidates ({spare_field}), or set {allow_field} to true for smaller groups.",
        )


def rollout_xargs(extra_args: Mapping[str, object]) -> dict[str, object]:
    """The fields of ours among a request's `vllm_xargs`."""
    return {key: value for key, value in extra_args.items() if key.startswith(XARG_PREFIX)}


def plan_from_xargs(xargs: Mapping[str, object], n: int, *, max_candidates: int) -> GroupPlan | GroupJoin:
    """Flat `rollout_*` fields of an OpenAI request -> plan of its own group, or membership of a shared one.

    `n` is the request's OpenAI `n`, the `group_size` of its own group.

    Raises: PlanError naming the field as the user wrote it.
    """
    if "rollout_group_id" in xargs:
        return _join_from_xargs(xargs, n, max_candidates)
    _reject_unknown(xargs, (*PLAN_XARGS, *PRUNING_XARGS.values()))
    selection = xargs.get("rollout_selection", "first")
    num_longest = _int(xargs, "rollout_num_longest", None)
    early_stop: EarlyStop = "auto"
    if xargs.get("rollout_early_stop") != "auto":
        early_stop = _bool(xargs, "rollout_early_stop")
    patience = xargs.get("rollout_patience")
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int | float)):
        raise PlanError("rollout_patience", f"must be a number, got {patience!r}.")
    return make_plan(
        n,
        _int(xargs, "rollout_redundancy", 0),
        early_stop,
        selection,  # type: ignore[arg-type]  # make_plan checks it
        num_longest,
        _pruning_from_xargs(xargs),
        patience,
        max_candidates=max_candidates,
        names={"group_size": "n", **{field[len(XARG_PREFIX) :]: field for field in PLAN_XARGS}, **PRUNING_XARGS},
    )


def _join_from_xargs(xargs: Mapping[str, object], n: int, max_candidates: int) -> GroupJoin:
    _reject_unknown(xargs, (*JOIN_XARGS, *PRUNING_XARGS.values()))
    group_id = xargs["rollout_group_id"]
    if not isinstance(group_id, str) or not 1 <= len(group_id) <= 256:
        raise PlanError("rollout_group_id", f"must be a string of 1 to 256 characters, got {group_id!r}.")
    if n != 1:
        raise PlanError(
            "rollout_group_id",
            f"joins single requests, but n is {n}. Leave it out to run the n choices as one group, or send n=1.",
        )
    group_size = _int(xargs, "rollout_group_size", None)
    if group_size is None:
        raise PlanError("rollout_group_size", "is required with rollout_group_id: how many siblings have to finish.")
    remedy = "Send fewer or start the server with a larger --max-num-seqs."
    if not 1 <= group_size <= max_candidates:
        raise PlanError(
            "rollout_group_size",
            f"must be between 1 and the server's max_num_seqs ({max_candidates}), got {group_size}. {remedy}",
        )
    num_candidates = _int(xargs, "rollout_num_candidates", group_size)
    if not group_size <= num_candidates <= max_candidates:
        raise PlanError(
            "rollout_num_candidates",
            f"counts all siblings and must be between rollout_group_size ({group_size}) and the server's max_num_seqs "
            f"({max_candidates}), got {num_candidates}. {remedy}",
        )
    pruning = _pruning_from_xargs(xargs)
    _check_can_prune(pruning, group_size, num_candidates, "rollout_num_candidates", PRUNING_XARGS["allow_fewer"])
    return GroupJoin(group_id, group_size, num_candidates, _bool(xargs, "rollout_early_stop") is not False, pruning)


def _pruning_from_xargs(xargs: Mapping[str, object]) -> PruningPlan | None:
    given = {field: xargs[name] for field, name in PRUNING_XARGS.items() if xargs.get(name) is not None}
    if not given:
        return None
    detection_length = PRUNING_XARGS["detection_length"]
    if "detection_length" not in given:
        raise PlanError(
            PRUNING_XARGS[next(iter(given))],
            f"needs {detection_length}, which turns pruning on: output tokens after which a candidate is scored.",
        )
    for field in ("detection_length", "min_labels"):
        if field in given:
            given[field] = _int(xargs, PRUNING_XARGS[field], None)
    if "allow_fewer" in given:
        given["allow_fewer"] = _bool(xargs, PRUNING_XARGS["allow_fewer"])
    return make_pruning_plan(given, PRUNING_XARGS)


def _reject_unknown(xargs: Mapping[str, object], allowed: tuple[str, ...]) -> None:
    for key in xargs:
        if key not in allowed:
            raise PlanError(key, f"is not a field of this version; allowed here: {', '.join(allowed)}.")


def _int(xargs: Mapping[str, object], key: str, default: Default) -> int | Default:
    value = xargs.get(key)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(key, f"must be an integer, got {value!r}.")
    return value


def _bool(xargs: Mapping[str, object], key: str) -> bool | None:
    value = xargs.get(key)
    if value is None or value in (0, 1, True, False):  # vllm_xargs narrows JSON booleans to 0 and 1
        return None if value is None else bool(value)
    raise PlanError(key, f"must be true or false (or 1 or 0), got {value!r}.")
