"""Prompts with checkable answers that a 0.5B model gets partly right, and their checker.

Invariant: the problems are a function of (num, seed, families); two problems of one call never ask the same question.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

THINK = " Think step by step, then end with 'Answer: <number>'."
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Question(NamedTuple):
    text: str
    answer: int


class Problem(NamedTuple):
    """One prompt whose answers `check` can judge."""

    id: str
    """Family and number, such as "arithmetic-12"; unique within one call of `make_problems`."""
    messages: list[dict[str, Any]]
    answer: int

    @property
    def family(self) -> str:
        return self.id.rpartition("-")[0]


def arithmetic(generator: random.Random) -> Question:
    """One operation on two numbers below 100."""
    operator = generator.choice("+-*")
    if operator == "*":
        left, right = generator.randrange(3, 20), generator.randrange(3, 20)
        return Question(f"What is {left} * {right}?{THINK}", left * right)
    right, left = sorted(generator.randrange(10, 100) for _ in range(2))
    answer = left + right if operator == "+" else left - right
    return Question(f"What is {left} {operator} {right}?{THINK}", answer)


def word_sum(generator: random.Random) -> Question:
    """Three numbers in a story."""
    numbers = [generator.randrange(5, 60) for _ in range(3)]
    story = f"Tom has {numbers[0]} apples, buys {numbers[1]} and then {numbers[2]} more."
    return Question(f"{story} How many apples does he have now?{THINK}", sum(numbers))


FAMILIES: dict[str, Callable[[random.Random], Question]] = {
    family.__name__: family for family in (arithmetic, word_sum)
}


def make_problems(num: int, seed: int, families: Sequence[str] | None = None) -> list[Problem]:
    """`num` different problems, the families in turn; None stands for all of them.

    Raises: ValueError for an unknown family, or when the families cannot ask that many different questions.
    """
    names = list(FAMILIES) if families is None else list(families)
    if unknown := [name for name in names if name not in FAMILIES] or not names:
        raise ValueError(f"families must be some of {', '.join(FAMILIES)}, got {unknown or names}")
    generator = random.Random(seed)
    problems: list[Problem] = []
    asked: set[str] = set()
    while len(problems) < num:
        name = names[len(problems) % len(names)]
        for _ in range(1000):
            question = FAMILIES[name](generator)
            if question.text not in asked:
                break
        else:
            raise ValueError(f"num must be smaller: after {len(problems)} problems {name!r} has no new question")
        asked.add(question.text)
        messages = [{"role": "user", "content": question.text}]
        problems.append(Problem(f"{name}-{len(problems)}", messages, question.answer))
    return problems


def check(problem: Problem, text: str) -> bool:
    """Whether the answer is right: the number after the last "Answer:", or the last number when there is none."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    _, marker, after = text.rpartition("Answer:")
    numbers = NUMBER.findall(after)
    if not numbers:
        return False
    return float(numbers[0] if marker else numbers[-1]) == problem.answer
