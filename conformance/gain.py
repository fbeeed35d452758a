"""What spare candidates gain a trainer: the same prompts with and without them, in pairs, turn about.

It is measured where it can show: on a real model, whose answers differ in length as answers do (`REAL_MODEL`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.common import in_turn, ratios
from conformance.checks import REAL_MODEL
from conformance.report import FOLDER

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
        f"{what}_ratio": statistics.median(ratios(off, on)),
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


DEVICE = FOLDER.parent / "examples" / "emulate_7b.json"
"""The emulated device of `AtOnce`: of the size of a 7B model on one GPU. Steps take what this file says."""
AT_ONCE_PROMPTS = [[100 + number] * 30 for number in range(16)]
AT_ONCE_TOKENS, AT_ONCE_LENGTH = 4096, 4200
"""At most, of an answer, and with its prompt."""
AT_ONCE_PLACES = len(AT_ONCE_PROMPTS) * (GROUP_SIZE + REDUNDANCY)
GRADE_S = 0.05
"""Of an answer; a trainer grades one after another."""
NUM_REPEATS = 5


class AtOnce:
    """Seconds of generation and of rewards, for 16 prompts at once: without spare candidates (`plain`), with them
    (`spares`), and with them and rewards that the engine asks for (`rewarded`). The first repeat warms up."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, list[float]]] = {}
        """Of each repeat, by what was timed and by arm."""

    @staticmethod
    def turns(arms: Sequence[str]) -> Iterator[str]:
        """Each arm once per repeat."""
        for repeat in range(NUM_REPEATS + 1):
            yield from in_turn(arms, repeat)

    @contextmanager
    def timed(self, what: str, arm: str) -> Iterator[None]:
        """what: "generation", or "step", which is generation and rewards."""
        began = time.monotonic()
        yield
        self._seconds.setdefault(what, {}).setdefault(arm, []).append(time.monotonic() - began)

    def result(self) -> dict[str, Any]:
        """For a check."""
        counted = {what: {arm: s[1:] for arm, s in by_arm.items()} for what, by_arm in self._seconds.items()}
        faster = {
            f"{what}_{arm}": statistics.median(ratios(by_arm["plain"], s))
            for what, by_arm in counted.items()
            for arm, s in by_arm.items()
            if arm != "plain"
        }
        said = ", ".join(f"{name.replace('_', ' with ')} {ratio:.2f} times faster" for name, ratio in faster.items())
        return {
            "detail": f"{len(AT_ONCE_PROMPTS)} prompts at once, {GROUP_SIZE} answers each, {REDUNDANCY} spare "
            f"candidates, {DEVICE.name}: {said} (medians of {NUM_REPEATS})",
            "at_once": {"ratios": faster, "seconds": counted},
        }
