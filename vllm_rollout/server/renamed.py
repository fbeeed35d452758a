"""Old names of fields and options. Invariant: each is refused for one version, with its new name in the error."""

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

_WORDS = {"text": "text", "logprobs": "logprobs", "unselected": "stopped"}
"""Field of an old `return` -> word of `include`."""


def remedy_for(name: str, known: Container[str]) -> str | None:
    """The new name to write in place of an old one. None if `name` is no old name of a known field."""
    new = RENAMED.get(name)
    return f"renamed, write {new}" if new is not None and new in known else None


def with_new_names(kept: Any) -> dict[str, Any]:
    """Fields of a run or a round that an earlier version kept on disk, under their new names.

    Raises: TypeError for what is no object.
    """
    if not isinstance(kept, Mapping):
        raise TypeError(f"must be an object, got a {type(kept).__name__}")
    fields: dict[str, Any] = {}
    for name, value in kept.items():
        new = RENAMED.get(name) or name
        fields[new] = _included(value) if name == "return" and value is not None else value
    return fields


def _included(asked: Any) -> list[str]:
    """The words of `include` for an old `return`. Raises: TypeError for what is no object."""
    said = {"logprobs": True, **asked}
    return [word for name, word in _WORDS.items() if said.get(name)]
