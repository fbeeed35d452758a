"""Fields of a request -> terms with parts. Invariant: a field whose part is not there is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

from vllm_rollout.kernel.parts import faces, faces_left_out
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.kernel.rules.terms_port import PartTerms, TermsPart


def part_tables() -> list[type]:
    """Tables of fields from which parts make terms, also of parts that are left out."""
    return [part.table for _, part in chain(faces("terms"), faces_left_out("terms"))]


def claimed_tables() -> list[type]:
    """Tables of fields in requests that parts claim, also of parts that are left out."""
    return [table for _, table in chain(faces("xargs"), faces_left_out("xargs"))]


def terms_of(table: type, fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, PartTerms]:
    """The terms that a part makes from fields of its table, by part. Raises: PlanError."""
    if not fields:
        return {}
    name, part = _reader(table, fields, names)
    return {name: part.terms(fields, names)}


def check_given(table: type, fields: Collection[str], names: Mapping[str, str]) -> None:
    """Check which fields of a table are given, before their values are read. Raises: PlanError."""
    if fields:
        _reader(table, fields, names)[1].given(fields, names)


def _reader(table: type, fields: Collection[str], names: Mapping[str, str]) -> tuple[str, TermsPart]:
    """The part that reads the table, with its name. Raises: PlanError if it is not there."""
    for name, part in faces("terms"):
        if part.table is table:
            return name, part()
    field = next(iter(fields))
    raise PlanError(names.get(field, field), why_unread("terms", lambda part: part.table is table))


def why_unread(face: str, reads: Callable[[Any], bool]) -> str:
    """The reason why nobody reads a field or a flag, and the remedy. `reads`: true of the face that would read it."""
    gone = next((name for name, part in faces_left_out(face) if reads(part)), None)
    lacks = "no part of this server reads it" if gone is None else f"this server runs without the part {gone!r}"
    return f"{lacks}. Leave it out, or start the server with the part."
