"""Groups of known lengths on an emulated device, and the time that the device alone needs for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.parts.emulation.device import StepWork, step_seconds
from vllm_rollout.parts.emulation.fate import Fates
from vllm_rollout.parts.emulation.settings import Settings

NUM_CANDIDATES, GROUP_SIZE = 16, 8
FIRST_SEED = 1000
MAX_TOKENS = 2048
PROMPT_TOKENS = 97
"""Three full blocks of 32 tokens, which siblings share, and one token."""
DEVICE: dict[str, Any] = {
    "step": {"ms": 8.0, "ms_per_request": 0.02},
    "kv_tokens": 20_000_000,
    "lengths": {"log_normal": {"mean": 400, "sigma": 1.0, "cap": 2000}},
}


class Ideal(NamedTuple):
    """Time and tokens if all groups start together and each stops in the step in which its 8th candidate ends."""

    seconds: float
    generated_tokens: int


def prompts_of(num_groups: int, seed: int) -> list[list[int]]:
    chance = random.Random(f"front_end/{seed}")
    return [[chance.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(num_groups)]


def seed_of(position: int) -> int:
    """Seed with which a rollout samples the prompt at that position. The other ways send it."""
    return seed_for(FIRST_SEED, str(position))


def lengths_of(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    fates = Fates(Settings.model_validate(DEVICE))
    return [
        [fates.of(prompt, seed_of(position) + index, index, {}).length for index in range(NUM_CANDIDATES)]
        for position, prompt in enumerate(prompts)
    ]


def ideal(lengths: Sequence[Sequence[int]], num_ranks: int = 1) -> Ideal:
    """The ideal over ranks that take groups in turn. `seconds` is the slowest rank's time."""
    ranks = [_rank(lengths[rank::num_ranks]) for rank in range(num_ranks)]
    return Ideal(max(rank.seconds for rank in ranks), sum(rank.generated_tokens for rank in ranks))


def _rank(lengths: Sequence[Sequence[int]]) -> Ideal:
    seconds = step_seconds(Settings.model_validate(DEVICE))
    ends = Counter(_ends(lengths))
    running, total = ends.total(), 0.0
    for step in range(1, max(ends, default=0) + 1):
        total += seconds(StepWork(running, 0, 0))
        running -= ends[step]
    return Ideal(total, sum(length * count for length, count in ends.items()))


def _ends(lengths: Sequence[Sequence[int]]) -> Iterator[int]:
    for group in lengths:
        last = sorted(group)[GROUP_SIZE - 1]
        yield from (min(length, last) for length in group)
