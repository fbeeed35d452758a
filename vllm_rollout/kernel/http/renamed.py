"""Fields and options of earlier versions. Invariant: each is refused for one version, and the error names a remedy."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

RENAMED = {
    "sampling": "sampling_params",
    "return": "include",
    "return_text": "include",
    "return_logprobs": "include",
    "return_unselected": "include",
}
"""Old name of a body's field, or of an option of the Python client -> new name."""

REMOVED = {
    "until": 'removed, leave it out: let rounds filter groups without variance ("filter": "zero_variance"), or drop '
    "these groups in the trainer",
}
"""Removed field of a body, or option of the Python client -> what to do instead."""

_UNTIL = (None, "complete")
"""Values of `until` that an earlier version kept of runs without it."""
_WORDS = {"text": "text", "logprobs": "logprobs", "unselected": "stopped"}
"""Field of an old `return` -> word of `include`."""


def remedy_for(name: str, known: Container[str]) -> str | None:
    """Message for a field of an earlier version. None for other names, and if `known` does not have the new name."""
    if name in REMOVED:
        return REMOVED[name]
    new = RENAMED.get(name)
    return f"renamed, write {new}" if new is not None and new in known else None


def with_new_names(kept: Any) -> dict[str, Any]:
    """Fields of a run or a round that an earlier version kept on disk, under their new names. A removed field stays
    if it was used, and is then refused.

    Raises: TypeError for what is no object.
    """
    if not isinstance(kept, Mapping):
        raise TypeError(f"must be an object, got a {type(kept).__name__}")
    fields: dict[str, Any] = {}
    for name, value in kept.items():
        if name == "until" and value in _UNTIL:
            continue
        if name == "sessions" and value is not None:
            value = with_new_names(value)
        new = RENAMED.get(name) or name
        fields[new] = _included(value) if name == "return" and value is not None else value
    return fields


def _included(asked: Any) -> list[str]:
    """The words of `include` for an old `return`. Raises: TypeError for what is no object."""
    said = {"logprobs": True, **asked}
    return [word for name, word in _WORDS.items() if said.get(name)]
