"""Lengths of prompts, for the table of known prompts."""

from __future__ import annotations

from vllm_rollout.parts.memories.rules import Memory
from vllm_rollout.parts.shaping.rules.history import LENGTHS, LengthHistory


def prompt_lengths(memory: Memory) -> LengthHistory | None:
    return LENGTHS.of(memory)
