"""Conversations with a calculator and a search over six facts, the same ones in every way of running them.

Invariant: a conversation depends on seed, group and number only. This holds for its tokens, its tool calls, their
duration, and whether one of them fails.
"""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

from tokenizers import Tokenizer

from vllm_rollout.parts.sessions.with_shaping.simulated import Course, SessionTerms, draw_course

TERMS = SessionTerms(turns=4, tool_seconds=0.5, tool_sigma=1.0, tool_tokens=40, tool_failures=0.05)
PROMPT_TOKENS = 200
MEAN_TOKENS, TOKENS_SIGMA = 160, 0.8
"""Mean and log deviation of the policy's tokens in all turns of a conversation, which are log-normal."""
FACTS = (
    "Paris has 2 million people.", "Rome has 3 million people.", "Oslo has 0.7 million people.", "A day has 24 hours.",
    "A week has 7 days.", "A year has 365 days.",
)  # fmt: skip


def course_of(seed: int, group: int, number: int) -> Course:
    chance = random.Random(f"agents/{seed}/{group}/{number}")
    drawn = chance.lognormvariate(math.log(MEAN_TOKENS) - TOKENS_SIGMA**2 / 2, TOKENS_SIGMA)
    return draw_course(TERMS, max(20, min(1600, round(drawn))), chance)


def prompt_of(seed: int, group: int) -> list[int]:
    chance = random.Random(f"agents/{seed}/{group}")
    return [chance.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]


def use_tool(call: str) -> str:
    """The answer to CALC(…) or SEARCH(…)."""
    called = re.fullmatch(r"(CALC|SEARCH)\((.*)\)", call)
    assert called is not None, call
    if called[1] == "SEARCH":
        found = [fact for fact in FACTS if any(word.lower() in fact.lower() for word in called[2].split())]
        return " ".join(found) or "nothing found"
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", called[2])]
    return str(math.prod(numbers) if "*" in called[2] else sum(numbers))


def drawn_call(chance: random.Random) -> str:
    """A random tool call, drawn because the emulated device generates no meaningful text."""
    if chance.random() < 0.5:
        return f"CALC({chance.randrange(100)} {chance.choice('+*')} {chance.randrange(100)})"
    return f"SEARCH({chance.choice(('Paris', 'Rome', 'hours', 'days', 'Madrid'))})"


class Tools:
    """Answers of tools in a model's tokens, always the same number of tokens."""

    def __init__(self, model: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))

    def answer(self, seed: int, group: int, number: int, turn: int) -> list[int]:
        call = drawn_call(random.Random(f"agents/{seed}/{group}/{number}/{turn}"))
        said = f"\n{call} says: {use_tool(call)}" + "\n." * TERMS.tool_tokens
        tokens: list[int] = self._tokenizer.encode(said, add_special_tokens=False).ids[: TERMS.tool_tokens]
        return tokens
