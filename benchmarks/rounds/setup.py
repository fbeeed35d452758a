"""What `benchmarks.rounds` compares, and how much of it.

Invariant: all ways of a repeat have the same prompts in the same order and the same seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from vllm_rollout.config import DEFAULT_SPECULATION
from vllm_rollout.demo.rounds.prompts import make_prompts
from vllm_rollout.group.rounds import RunTerms

WayName = Literal["plain", "client", "run"]
WAY_NAMES: tuple[WayName, ...] = get_args(WayName)
BASELINE: WayName = "plain"
TITLES: dict[WayName, str] = {
    "plain": "plain rounds, wait for all",
    "client": "tail batching in the client, stock endpoint",
    "run": "tail batching by the server (a run)",
}

TINY = "tiny-random"
TINY_SAMPLING = {"allowed_token_ids": [2, *range(16, 64)]}
"""The end and 48 other tokens: answers of some 50 tokens, whose lengths are nearly exponential."""
SEED_STRIDE = 1000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything. Fields are options of the command line; see there."""

    model: str
    prompts_per_round: int
    group_size: int
    max_tokens: int
    temperature: float
    repeats: int
    seed: int

    @property
    def terms(self) -> RunTerms:
        return RunTerms(self.group_size, self.prompts_per_round, DEFAULT_SPECULATION, DEFAULT_SPECULATION)

    @property
    def num_prompts(self) -> int:
        """Of a period: what its short rounds take."""
        return self.terms.num_period_prompts

    @property
    def max_num_seqs(self) -> int:
        """Of the server: everything that any way asks for runs at once."""
        return self.terms.num_prompts * self.terms.num_candidates

    def sampling(self, repeat: int) -> dict[str, Any]:
        """Candidate i of any prompt samples with that prompt's seed + i (`sampling_of`)."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.repeat_seed(repeat)}
        return own | (TINY_SAMPLING if self.model == TINY else {})

    def repeat_seed(self, repeat: int) -> int:
        return self.seed + SEED_STRIDE * repeat

    def questions(self, repeat: int) -> list[str]:
        """The order is the repeat's own."""
        return make_prompts(self.num_prompts, self.repeat_seed(repeat))


def check(sizes: Sizes) -> None:
    """Raises: ValueError for sizes that cannot be run."""
    for name in ("prompts_per_round", "group_size", "max_tokens", "repeats"):
        if getattr(sizes, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(sizes, name)}")
    sizes.questions(0)


def order(repeat: int) -> list[WayName]:
    """Who begins rotates with the repeat."""
    start = repeat % len(WAY_NAMES)
    return [*WAY_NAMES[start:], *WAY_NAMES[:start]]
