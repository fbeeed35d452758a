"""Traces made up from a distribution.

Invariant: equal numbers and seeds give equal traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from vllm_rollout.config import MAX_TRACED_TOKENS
from vllm_rollout.kernel.rules.rows import Integer, Number, row, rows
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.simulator.settings import written_fields

MAX_GENERATED = 10_000_000
"""Largest number of candidates of a generated trace: a few GB of memory."""


_COUNT = Integer(1, MAX_TRACED_TOKENS)
_SIGMA = Number(0, 5)


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal lengths around log-normal medians, cut at `max_tokens`. Every step has the same prompts."""

    prompts: int = row(_COUNT, "Prompts of every step.", default=64)
    candidates: int = row(_COUNT, "Candidates per prompt and step.", default=16)
    steps: int = row(_COUNT, "Training steps.", default=4)
    median: float = row(Number(1, MAX_TRACED_TOKENS), "Tokens: the median of the prompts' medians.", default=700.0)
    prompt_sigma: float = row(_SIGMA, "Deviation of the prompts' log medians: how much prompts differ.", default=0.6)
    sigma: float = row(_SIGMA, "Deviation of log lengths within a prompt: how heavy its tail is.", default=0.7)
    max_tokens: int = row(_COUNT, "Longer answers are cut.", default=8192)
    prompt_tokens: int = row(Integer(0, MAX_TRACED_TOKENS), "Tokens of every prompt.", default=100)

    def __post_init__(self) -> None:
        if (num := self.prompts * self.candidates * self.steps) > MAX_GENERATED:
            raise ValueError(f"prompts * candidates * steps must be at most {MAX_GENERATED}, got {num}")


def parse_distribution(text: str) -> LengthDistribution:
    """Read "prompts=64,sigma=0.7". A field that is left out has its default.

    Raises: ValueError with field, value and what is allowed.
    """
    return LengthDistribution(**written_fields(text, rows(LengthDistribution)))


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
    """Logarithm of every prompt's median length in tokens."""
    its = distribution
    return [math.log(its.median) + its.prompt_sigma * chance.gauss(0, 1) for _ in range(its.prompts)]


def draw_length(log_median: float, sigma: float, max_tokens: int, chance: Random) -> int:
    log_length = log_median + sigma * chance.gauss(0, 1)
    return max(1, round(math.exp(min(log_length, math.log(max_tokens)))))
