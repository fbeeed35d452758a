"""What spare candidates gain a trainer: the same prompts with and without them, in pairs, turn about.

It is measured where it can show: on a real model, whose answers differ in length as answers do (`REAL_MODEL`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.checks import REAL_MODEL

GROUP_SIZE, REDUNDANCY = 8, 8
MAX_TOKENS = 256
NUM_PAIRS = 3
QUESTIONS = tuple(f"What is {a} + {a + 3}?" for a in range(4, 4 + NUM_PAIRS + 1))
"""One per pair; the first pair warms up."""


def chat(question: str) -> str:
    """As this model's chat template writes it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def turns(num_pairs: int = NUM_PAIRS) -> Iterator[tuple[int, bool]]:
    """Number of a pair, and whether with spare candidates: a pair that warms up, and so many that count."""
    for pair in range(num_pairs + 1):
        yield from ((pair, is_on) for is_on in ((True, False) if pair % 2 else (False, True)))


def gain(what: str, with_s: Sequence[float], without_s: Sequence[float]) -> dict[str, Any]:
    """The gain of all pairs' seconds, first to last: numbers without the first one.

    Raises: ValueError when there is no other.
    """
    if len(with_s) < 2:
        raise ValueError("no pair but the first, which warms up. Give the check more time.")
    on, off = list(with_s[1:]), list(without_s[1:])
    return {
        "num_pairs": len(on),
        f"{what}_ratio": statistics.median(a / b for a, b in zip(off, on, strict=True)),
        f"{what}_s": {"with": on, "without": off},
    }


def words(numbers: dict[str, Any]) -> str:
    """For the detail of a check."""
    step = f", whole steps {numbers['step_ratio']:.2f} times" if "step_ratio" in numbers else ""
    return (
        f"exactly {GROUP_SIZE} answers per prompt out of {GROUP_SIZE + REDUNDANCY} candidates: generation "
        f"{numbers['generation_ratio']:.2f} times faster{step} (median of {numbers['num_pairs']} pairs after one that "
        f"warms up, {REAL_MODEL}, at most {MAX_TOKENS} tokens)"
    )
