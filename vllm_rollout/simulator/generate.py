"""Traces made up from a distribution. Invariant: the same numbers and seed give the same trace."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from random import Random

from vllm_rollout.config import MAX_TRACED_TOKENS
from vllm_rollout.trace.rows import Trace, TracedCandidate, TracedPrompt, TracedRollout

MAX_GENERATED = 10_000_000
"""Candidates of a generated trace: a few GB of memory."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal lengths around log-normal medians, cut at `max_tokens`; every step has the same prompts."""

    prompts: int = 64
    candidates: int = 16
    """Per prompt and step."""
    steps: int = 4
    median: float = 700.0
    """Tokens: the median of the prompts' medians."""
    prompt_sigma: float = 0.6
    """Standard deviation of the prompts' log medians: how much prompts differ."""
    sigma: float = 0.7
    """Standard deviation of log lengths within a prompt: how heavy its tail is."""
    max_tokens: int = 8192
    prompt_tokens: int = 100

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("candidates", 1), ("steps", 1), ("max_tokens", 1), ("prompt_tokens", 0)):
            if not least <= getattr(self, name) <= MAX_TRACED_TOKENS:
                raise ValueError(f"{name} must be in [{least}, {MAX_TRACED_TOKENS}], got {getattr(self, name)}")
        if not 1 <= self.median <= MAX_TRACED_TOKENS:
            raise ValueError(f"median must be in [1, {MAX_TRACED_TOKENS}] tokens, got {self.median}")
        for name in ("prompt_sigma", "sigma"):
            if not 0 <= getattr(self, name) <= 5:
                raise ValueError(f"{name} must be in [0, 5], got {getattr(self, name)}")
        if (num := self.prompts * self.candidates * self.steps) > MAX_GENERATED:
            raise ValueError(f"prompts * candidates * steps must be at most {MAX_GENERATED}, got {num}")


FIELDS = {field.name: float if field.type == "float" else int for field in fields(LengthDistribution)}


def parse_distribution(text: str) -> LengthDistribution:
    """From "prompts=64,sigma=0.7"; what is left out has its default.

    Raises: ValueError with field, value and what is allowed.
    """
    given: dict[str, int | float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"expected field=value, got {part!r}")
        if key not in FIELDS:
            raise ValueError(f"{key!r} is not a field; allowed: {', '.join(FIELDS)}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        try:
            given[key] = FIELDS[key](value)
        except ValueError:
            kind = "an integer" if FIELDS[key] is int else "a number"
            raise ValueError(f"{key} must be {kind}, got {value!r}") from None
    return LengthDistribution(**given)


def generate(distribution: LengthDistribution, seed: int = 0) -> Trace:
    chance = Random(f"{seed}/generate")
    its = distribution
    medians = log_medians(distribution, chance)

    def prompt(number: int) -> TracedPrompt:
        lengths = (draw_length(medians[number], its.sigma, its.max_tokens, chance) for _ in range(its.candidates))
        candidates = tuple(TracedCandidate(n, "length" if n == its.max_tokens else "stop") for n in lengths)
        return TracedPrompt(f"prompt-{number}", candidates, its.prompt_tokens, its.max_tokens)

    return Trace(tuple(TracedRollout(tuple(prompt(number) for number in range(its.prompts))) for _ in range(its.steps)))


def log_medians(distribution: LengthDistribution, chance: Random) -> list[float]:
    """Of every prompt."""
    its = distribution
    return [math.log(its.median) + its.prompt_sigma * chance.gauss(0, 1) for _ in range(its.prompts)]


def draw_length(log_median: float, sigma: float, max_tokens: int, chance: Random) -> int:
    log_length = log_median + sigma * chance.gauss(0, 1)
    return max(1, round(math.exp(min(log_length, math.log(max_tokens)))))
