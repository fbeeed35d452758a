"""Gain of a trainer by spare candidates: the same prompts with and without them, in pairs, alternating the order.

It is measured on a real model, `REAL_MODEL`, because its answers differ in length as real answers do.
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
"""One question per pair. The first pair warms up."""


def chat(question: str) -> str:
    """The question in the chat template of this model."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def turns(num_pairs: int = NUM_PAIRS) -> Iterator[tuple[int, bool]]:
    """Number of a pair, and True if with spare candidates. One pair warms up, then `num_pairs` count."""
    for pair in range(num_pairs + 1):
        yield from ((pair, is_on) for is_on in ((True, False) if pair % 2 else (False, True)))


def gain(what: str, with_s: Sequence[float], without_s: Sequence[float]) -> dict[str, Any]:
    """The median gain over pairs, from the seconds of all pairs in order. The first pair does not count.

    Raises: ValueError if there is no other pair.
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
    """The numbers as a sentence, for the detail of a check."""
    step = f", whole steps {numbers['step_ratio']:.2f} times" if "step_ratio" in numbers else ""
    return (
        f"exactly {GROUP_SIZE} answers per prompt out of {GROUP_SIZE + REDUNDANCY} candidates: generation "
        f"{numbers['generation_ratio']:.2f} times faster{step} (median of {numbers['num_pairs']} pairs after one that "
        f"warms up, {REAL_MODEL}, at most {MAX_TOKENS} tokens)"
    )


DEVICE = FOLDER.parent / "examples" / "emulate_7b.json"
"""The emulated device of `AtOnce`: a 7B model on one GPU, with the step times of this file."""
AT_ONCE_PROMPTS = [[100 + number] * 30 for number in range(16)]
AT_ONCE_TOKENS, AT_ONCE_LENGTH = 4096, 4200
"""Length caps in tokens: of an answer, and of an answer with its prompt."""
AT_ONCE_PLACES = len(AT_ONCE_PROMPTS) * (GROUP_SIZE + REDUNDANCY)
GRADE_S = 0.05
"""Seconds to grade an answer. A trainer grades one after another."""
NUM_REPEATS = 5


class AtOnce:
    """Seconds of generation and of rewards for 16 prompts at once. The first repeat warms up.

    Arms: without spare candidates (`plain`), with them (`spares`), and with rewards that the engine asks for
    (`rewarded`).
    """

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, list[float]]] = {}
        """Seconds of each repeat, by what was timed and by arm."""

    @staticmethod
    def turns(arms: Sequence[str]) -> Iterator[str]:
        """The arms in order, each once per repeat."""
        for repeat in range(NUM_REPEATS + 1):
            yield from in_turn(arms, repeat)

    @contextmanager
    def timed(self, what: str, arm: str) -> Iterator[None]:
        """Time the block. what: "generation", or "step", which is generation and rewards."""
        began = time.monotonic()
        yield
        self._seconds.setdefault(what, {}).setdefault(arm, []).append(time.monotonic() - began)

    def result(self) -> dict[str, Any]:
        """Detail and numbers for a check: medians of the ratios to `plain`, without the first repeat."""
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
