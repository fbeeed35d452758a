"""Flat `rollout_*` fields of an OpenAI request (`vllm_xargs`) -> what `group/plan.py` checks.

Invariant: a field is refused by the name under which the user wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from vllm_rollout.group.plan import EarlyStop, GroupJoin, GroupPlan, PlanError, make_join, make_plan
from vllm_rollout.group.pruning_plan import RANGES, PruningPlan, make_pruning_plan

Default = TypeVar("Default", int, None)

PREFIX = "rollout_"
PLAN_XARGS = (
    "rollout_redundancy",
    "rollout_early_stop",
    "rollout_selection",
    "rollout_num_longest",
    "rollout_patience",
    "rollout_audit_ratio",
)
JOIN_XARGS = (
    "rollout_group_id",
    "rollout_namespace",
    "rollout_group_size",
    "rollout_num_candidates",
    "rollout_early_stop",
    "rollout_audit_ratio",
)
PRUNING_XARGS: Mapping[str, str] = {
    field: f"rollout_{'pruning_' if field in ('rule', 'strength', 'mode') else ''}{field}" for field in RANGES
}
"""Field of a PruningPlan -> its name among the xargs."""
NAMES: Mapping[str, str] = {
    **{xarg.removeprefix(PREFIX): xarg for xarg in (*PLAN_XARGS, *JOIN_XARGS)},
    **PRUNING_XARGS,
}
"""Field of a plan -> its name among the xargs."""
MAX_NAME_CHARS = 256


def rollout_xargs(extra_args: Mapping[str, object]) -> dict[str, object]:
    """The fields of ours among a request's `vllm_xargs`."""
    return {key: value for key, value in extra_args.items() if key.startswith(PREFIX)}


def plan_from_xargs(xargs: Mapping[str, object], n: int, *, max_candidates: int) -> GroupPlan | GroupJoin:
    """The plan of the request's own group, or membership of a shared one.

    `n` is the request's OpenAI `n`, the `group_size` of its own group.

    Raises: PlanError naming the field as the user wrote it.
    """
    if "rollout_group_id" in xargs or "rollout_group_size" in xargs:
        return _join(xargs, n, max_candidates)
    _reject_unknown(xargs, (*PLAN_XARGS, *PRUNING_XARGS.values()))
    selection = xargs.get("rollout_selection", "first")
    num_longest = _int(xargs, "rollout_num_longest", None)
    early_stop: EarlyStop = "auto"
    if xargs.get("rollout_early_stop") != "auto":
        early_stop = _bool(xargs, "rollout_early_stop")
    patience = xargs.get("rollout_patience")
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int | float)):
        raise PlanError("rollout_patience", f"must be a number, got {patience!r:.80}.")
    return make_plan(
        n,
        _int(xargs, "rollout_redundancy", 0),
        early_stop,
        selection,  # type: ignore[arg-type]  # make_plan checks it
        num_longest,
        _pruning(xargs),
        patience,
        max_candidates=max_candidates,
        names={**NAMES, "group_size": "n"},
    )


def audit_ratio_from_xargs(xargs: Mapping[str, object], of_server: float) -> float:
    """Share of groups like the request's that are audited (`group/audit.py`); `of_server`: where it does not say.

    Raises: PlanError.
    """
    name, detection_length = "rollout_audit_ratio", PRUNING_XARGS["detection_length"]
    ratio, learns = xargs.get(name), xargs.get(detection_length) is not None
    if ratio is None:
        return of_server if learns else 0.0
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise PlanError(name, f"must be a number from 0 to 1, got {ratio!r:.80}.")
    if not learns:
        raise PlanError(name, f"needs {detection_length}: without pruning nothing is learned that audits keep true.")
    return float(ratio)


def as_written(refusal: str) -> tuple[str, str]:
    """A refusal by a joined group ("group_size of this group is …") with the field's name among the xargs, and that
    name; one that begins with no field is about the group that was named."""
    field, _, rest = refusal.partition(" ")
    name = NAMES.get(field.removeprefix("pruning."))
    return ("rollout_group_id", f"rollout_group_id: {refusal}") if name is None else (name, f"{name} {rest}")


def _join(xargs: Mapping[str, object], n: int, max_candidates: int) -> GroupJoin:
    _reject_unknown(xargs, (*JOIN_XARGS, *PRUNING_XARGS.values()))
    name = None if xargs.get("rollout_group_id") is None else _name(xargs, "rollout_group_id")
    namespace = "" if xargs.get("rollout_namespace") is None else _name(xargs, "rollout_namespace")
    if n != 1:
        raise PlanError(
            "rollout_group_size" if name is None else "rollout_group_id",
            f"joins single requests, but n is {n}. Leave it out to run the n choices as one group, or send n=1.",
        )
    group_size = _int(xargs, "rollout_group_size", None)
    if group_size is None:
        raise PlanError("rollout_group_size", "is required to join a group: how many siblings have to finish.")
    join = GroupJoin(
        name,
        group_size,
        _int(xargs, "rollout_num_candidates", group_size),
        _bool(xargs, "rollout_early_stop") is not False,
        _pruning(xargs),
        namespace,
    )
    return make_join(join, max_candidates=max_candidates, names=NAMES)


def _pruning(xargs: Mapping[str, object]) -> PruningPlan | None:
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
    for field in ("allow_fewer", "final_score"):
        if field in given:
            given[field] = _bool(xargs, PRUNING_XARGS[field])
    return make_pruning_plan(given, PRUNING_XARGS)


def _reject_unknown(xargs: Mapping[str, object], allowed: tuple[str, ...]) -> None:
    for key in xargs:
        if key not in allowed:
            problem = "needs rollout_group_size" if key in JOIN_XARGS else "is not a field of this version"
            raise PlanError(key, f"{problem}; allowed here: {', '.join(allowed)}.")


def _name(xargs: Mapping[str, object], key: str) -> str:
    value = xargs[key]
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS:
        raise PlanError(key, f"must be a string of 1 to {MAX_NAME_CHARS} characters, got {value!r:.80}.")
    return value


def _int(xargs: Mapping[str, object], key: str, default: Default) -> int | Default:
    value = xargs.get(key)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(key, f"must be an integer, got {value!r:.80}.")
    return value


def _bool(xargs: Mapping[str, object], key: str) -> bool | None:
    value = xargs.get(key)
    if value is None or value in (0, 1, True, False):  # vllm_xargs narrows JSON booleans to 0 and 1
        return None if value is None else bool(value)
    raise PlanError(key, f"must be true or false (or 1 or 0), got {value!r:.80}.")
