"""Converts flat `rollout_*` fields of an OpenAI request (`vllm_xargs`) for `kernel/rules/plan.py`.

Invariant: an error names a field as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm_rollout.kernel.part_terms import check_given, claimed_tables, part_tables, terms_of, why_unread
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.fields import PLAN_FIELDS, ROWS
from vllm_rollout.kernel.rules.plan import GroupJoin, GroupPlan, make_join, make_plan
from vllm_rollout.kernel.rules.rows import Door, PlanError, Row, rows
from vllm_rollout.kernel.rules.terms_port import PartTerms, pruning_of

PREFIX = "rollout_"
MARK = f'"{PREFIX}'.encode()
"""Beginning of each name of our fields in a body."""
PART_TABLES = part_tables()
CLAIMED_ROWS: Mapping[str, Row] = {field: row for table in claimed_tables() for field, row in rows(table).items()}
"""Rows of the fields of parts in requests that they claim, by field name."""
ALL_ROWS: Mapping[str, Row] = {
    **ROWS,
    **{field: row for table in PART_TABLES for field, row in rows(table).items()},
    **CLAIMED_ROWS,
}
"""Rows of the kernel's fields and of those of parts, by field name."""
NAMES: Mapping[str, str] = {field: PREFIX + (row.xarg or field) for field, row in ALL_ROWS.items()}
"""Name among the xargs, by field of a plan."""
GRADING: Mapping[str, str] = {
    f"{PREFIX}reward": "Name of the reward by which the server grades the choices before it answers.",
    f"{PREFIX}data": "Data that the reward gets beside the text: a string of JSON, or a plain string or number.",
}
"""Fields of a request whose choices the server grades: what each says."""


def rollout_xargs(extra_args: Mapping[str, object]) -> dict[str, object]:
    """The `rollout_*` fields of a request's `vllm_xargs`."""
    return {key: value for key, value in extra_args.items() if key.startswith(PREFIX)}


def plan_from_xargs(xargs: Mapping[str, object], n: int, *, max_candidates: int) -> GroupPlan | GroupJoin:
    """The plan of the request's own group, or its membership of a shared group.

    `n` is the request's OpenAI `n`, the `group_size` of its own group.

    Raises: PlanError with the field's name as the user wrote it.
    """
    if "rollout_group_id" in xargs or "rollout_group_size" in xargs:
        return _join(_read(xargs, "join"), n, max_candidates)
    said = _read(xargs, "own")
    group = {field: said[field] for field in PLAN_FIELDS if field in said}
    names = {**NAMES, "group_size": "n"}
    return make_plan(n, **group, parts=_terms(said), max_candidates=max_candidates, names=names)


def claimed_from_xargs(xargs: Mapping[str, object]) -> dict[str, Any]:
    """Checked values, by field, of a request that a part claims.

    Raises: PlanError with the field's name as the user wrote it.
    """
    return _read(xargs, "claim")


def audit_ratio_from_xargs(xargs: Mapping[str, object], plan: GroupPlan | GroupJoin, of_server: float) -> float:
    """Share of groups like the request's that are audited (`parts/pruning/rules/audit.py`).

    `of_server`: the server's ratio, for a request that learns but states none.

    Raises: PlanError.
    """
    name, learns = NAMES["audit_ratio"], pruning_of(plan.parts) is not None
    if (ratio := xargs.get(name)) is None:
        return of_server if learns else 0.0
    ratio = ROWS["audit_ratio"].read(ratio, name)
    if not learns:
        needed = f"{PREFIX}detection_length"
        raise PlanError(name, f"needs {needed}: without pruning nothing is learned that audits keep true.")
    return float(ratio)


def as_written(refusal: str) -> tuple[str, str]:
    """A refusal by a joined group ("group_size of this group is …"), rewritten for the user.

    Returns the name of the field among the xargs, and the text with that name. A refusal that begins with no field is
    about `rollout_group_id`.
    """
    field, _, rest = refusal.partition(" ")
    name = NAMES.get(field.removeprefix("pruning."))
    return ("rollout_group_id", f"rollout_group_id: {refusal}") if name is None else (name, f"{name} {rest}")


def _read(xargs: Mapping[str, object], door: Door) -> dict[str, Any]:
    """Checked values by field. null counts as not given. The audit ratio is left out, since the server has its own
    default.

    Raises: PlanError if a field is unknown, has a value that is not allowed, or needs another field.
    """
    allowed = {NAMES[field]: field for field, row in ALL_ROWS.items() if door in row.doors}
    for key in xargs:
        if key not in allowed:
            raise PlanError(key, _why_unknown(key, allowed))
    said = {field: xargs[key] for key, field in allowed.items() if xargs.get(key) is not None}
    said.pop("audit_ratio", None)
    for table in PART_TABLES:
        check_given(table, [field for field in rows(table) if field in said], NAMES)
    return {field: ALL_ROWS[field].read(value, NAMES[field]) for field, value in said.items()}


def _why_unknown(key: str, allowed: Collection[str]) -> str:
    """The problem with a name that is not allowed here, and the remedy."""
    field = next((field for field, name in NAMES.items() if name == key), None)
    if field in CLAIMED_ROWS and not any(field in rows(table) for _, table in faces("xargs")):
        return why_unread("xargs", lambda table: field in rows(table))
    joins = field is not None and "join" in ALL_ROWS[field].doors
    problem = "needs rollout_group_size" if joins else "is not a field of this version"
    return f"{problem}; allowed here: {', '.join(allowed)}."


def _terms(said: Mapping[str, Any]) -> dict[str, PartTerms]:
    """Terms of the group with parts, by part."""
    terms: dict[str, PartTerms] = {}
    for table in PART_TABLES:
        terms |= terms_of(table, {field: said[field] for field in rows(table) if field in said}, NAMES)
    return terms


def _join(said: Mapping[str, Any], n: int, max_candidates: int) -> GroupJoin:
    name = said.get("group_id")
    if n != 1:
        raise PlanError(
            NAMES["group_size" if name is None else "group_id"],
            f"joins single requests, but n is {n}. Leave it out to run the n choices as one group, or send n=1.",
        )
    if (group_size := said.get("group_size")) is None:
        raise PlanError(NAMES["group_size"], "is required to join a group: how many siblings have to finish.")
    join = GroupJoin(
        group_size,
        said.get("num_candidates", group_size),
        said.get("early_stop") is not False,
        parts=_terms(said),
        name=name,
        namespace=said.get("namespace", ""),
    )
    return make_join(join, max_candidates=max_candidates, names=NAMES)
