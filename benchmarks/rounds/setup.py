"""Ways and sizes of `benchmarks.rounds`.

Invariant: all ways of a repeat have the same prompts in the same order and the same seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from benchmarks.long_run import SEED_STRIDE, TINY, TINY_SAMPLING, check_positive, size
from vllm_rollout.config import DEFAULT_SPECULATION
from vllm_rollout.models import DEFAULT_MODEL
from vllm_rollout.parts.rounds.demo.options import TEMPERATURE
from vllm_rollout.parts.rounds.demo.prompts import make_prompts
from vllm_rollout.parts.rounds.rules.rounds import RunTerms

WayName = Literal["plain", "client", "run"]
WAY_NAMES: tuple[WayName, ...] = get_args(WayName)
BASELINE: WayName = "plain"
TITLES: dict[WayName, str] = {
    "plain": "plain rounds, wait for all",
    "client": "tail batching in the client, stock endpoint",
    "run": "tail batching by the server (a run)",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of rounds, answers and repeats, which are also options of the command line."""

    model: str = size(DEFAULT_MODEL, "a name of `vllm-rollout models list`, a Hugging Face name or a directory")
    prompts_per_round: int = size(8, "P0, prompts per round")
    group_size: int = size(2, "R0, trajectories per prompt")
    max_tokens: int = size(768, "length cap of an answer")
    temperature: float = size(TEMPERATURE, "temperature of sampling")
    repeats: int = size(2, "repeats of every way")
    seed: int = size(7, "repeat r samples with seed + 1000 r")

    @property
    def terms(self) -> RunTerms:
        return RunTerms(self.group_size, self.prompts_per_round, DEFAULT_SPECULATION, DEFAULT_SPECULATION)

    @property
    def max_num_seqs(self) -> int:
        """`--max-num-seqs` of the server, so that all candidates of any way run at once."""
        return self.terms.num_prompts * self.terms.num_candidates

    def sampling(self, repeat: int) -> dict[str, Any]:
        """Sampling parameters. Candidate i of any prompt samples with that prompt's seed + i (`sampling_of`)."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.repeat_seed(repeat)}
        return own | (TINY_SAMPLING if self.model == TINY else {})

    def repeat_seed(self, repeat: int) -> int:
        return self.seed + SEED_STRIDE * repeat

    def questions(self, repeat: int) -> list[str]:
        """Questions of a period, in an order that belongs to the repeat."""
        return make_prompts(self.terms.num_period_prompts, self.repeat_seed(repeat))


def check(sizes: Sizes) -> None:
    """Raises: ValueError for sizes that cannot be run."""
    check_positive(sizes, ("prompts_per_round", "group_size", "max_tokens", "repeats"))
    sizes.questions(0)
