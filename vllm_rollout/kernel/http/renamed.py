"""Fields and options of earlier versions. Invariant: each is refused for one version, and the error names a remedy."""

from __future__ import annotations

from collections.abc import Container

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


def remedy_for(name: str, known: Container[str]) -> str | None:
    """Message for a field of an earlier version. None for other names, and if `known` does not have the new name."""
    if name in REMOVED:
        return REMOVED[name]
    new = RENAMED.get(name)
    return f"renamed, write {new}" if new is not None and new in known else None
