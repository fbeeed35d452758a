"""What every request body has in common. Invariant: an unknown field is an error that names it, and what is accepted
can travel to the engine.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MIN_INT, MAX_INT = -(2**63), 2**63 - 1
"""Integers that can travel to the engine: 64 bit, signed."""
MAX_DEPTH = 32
"""Levels of nesting inside messages and sampling."""
UNION_TAGS = frozenset({"<flag>", "<name>", "<number>", "<object>"})
"""Parts that pydantic puts into an error's location and that are no part of the body."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        """One error for the first unknown field: a body of a million of them costs no more than one."""
        if isinstance(value, dict):
            known = _names_of(cls)
            for name in value:
                if name not in known:
                    raise PydanticCustomError(
                        "unknown_field",
                        "is not a field of this version; allowed here: {allowed}. Leave it out",
                        {"field": name.encode(errors="backslashreplace").decode(), "allowed": ", ".join(known)},
                    )
        return value


@cache
def _names_of(body: type[Body]) -> tuple[str, ...]:
    """Fields as they are written in JSON; kept, because a body may have a hundred thousand objects."""
    return tuple(field.alias or name for name, field in body.model_fields.items())


def check_json(value: Any, where: str) -> None:
    """Raises: ValueError for what Python's JSON parser lets through and no engine can take."""
    pending = [(value, where, 0)]
    while pending:
        value, where, depth = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: must be a finite number, got {value}")
        if isinstance(value, int) and not MIN_INT <= value <= MAX_INT:
            raise ValueError(f"{where}: must be an integer from {MIN_INT} to {MAX_INT} (64 bit), got {value}")
        if isinstance(value, str) and not _is_unicode(value):
            raise ValueError(f"{where}: must be valid Unicode text, got an unpaired surrogate")
        if not isinstance(value, (dict, list)):
            continue
        if depth == MAX_DEPTH:
            raise ValueError(f"{where}: is nested more than {MAX_DEPTH} levels deep; flatten it")
        if isinstance(value, dict):
            pending += ((key, where, depth + 1) for key in value)
            pending += ((item, f"{where}.{key}", depth + 1) for key, item in value.items())
        else:
            pending += ((item, f"{where}.{position}", depth + 1) for position, item in enumerate(value))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
