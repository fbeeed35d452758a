"""Runs and rounds that an earlier version kept on disk. Invariant: fields have their new names, with one meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_rollout.kernel.http.body import RENAMED

_UNTIL = (None, "complete")
"""Values of `until` that an earlier version kept of runs without it."""
_WORDS = {"text": "text", "logprobs": "logprobs", "unselected": "stopped"}
"""Field of an old `return` -> word of `include`."""


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
