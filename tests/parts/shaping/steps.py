"""Lengths that an engine has learned, for tests."""

from __future__ import annotations

from typing import Any

from vllm_rollout.parts.shaping.rules.history import LENGTHS, LengthHistory


def lengths_of(of: Any) -> LengthHistory:
    """Lengths in a memory, or in the base model's memory of an engine, its steps or its judge."""
    return LENGTHS.of(of.memories.base if hasattr(of, "memories") else of)
