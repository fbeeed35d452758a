"""Fields as they are written behind a flag: "redundancy=4,patience=1.5"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_rollout.group.plans.rows import Row, Text


def written_fields(text: str, rows: Mapping[str, Row]) -> dict[str, Any]:
    """Values by field. Raises: PlanError for a value, another ValueError for what is no field."""
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ValueError(f"expected field=value, got {part!r}")
        if key not in rows:
            raise ValueError(f"{key!r} is not a field; allowed: {', '.join(rows)}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        given[key] = rows[key].read(value if isinstance(rows[key].flat, Text) else _literal(value), key)
    return given


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
