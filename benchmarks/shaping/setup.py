"""Ways and sizes of `benchmarks.shaping`.

Invariant: all ways of a repeat have the same prompts and seeds, and the history of lengths was sampled with others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal, get_args

from benchmarks.common import in_turn
from benchmarks.long_run import SEED_STRIDE, TINY, TINY_SAMPLING, check_positive, size
from benchmarks.prompts import PROMPTS
from vllm_rollout.config import DEFAULT_TRADEOFF
from vllm_rollout.kernel.rules.fields import SelectionRule
from vllm_rollout.kernel.rules.plan import MAX_BUDGET_RATIO, GroupPlan, make_plan
from vllm_rollout.models import DEFAULT_MODEL

WayName = Literal[
    "uniform", "early_stop", "dual_end", "dual_end_patience", "pool", "auto", "auto_dual_end", "auto_patience"
]
WAY_NAMES: tuple[WayName, ...] = get_args(WayName)
BASELINE: WayName = "uniform"

TINY_PROMPT_TOKENS = 12
HISTORY_SEED = 500_000
"""Added to the seeds of the history's epochs."""


@dataclass(frozen=True, slots=True)
class Way:
    """Settings of a way to ask for the same groups."""

    title: str
    redundancy: float | Literal["auto", "shares"]
    """Spare candidates over group_size. `shares`: the number that "auto" gave the prompt in this repeat."""
    selection: SelectionRule = "dual_end"
    has_patience: bool = False
    early_stop: bool | None = None


WAYS: dict[WayName, Way] = {
    "uniform": Way("n = M, wait for all", 0, "first", early_stop=False),
    "early_stop": Way("1.5x, first, early stop", 0.5, "first"),
    "dual_end": Way("1.5x, dual-end", 0.5),
    "dual_end_patience": Way("1.5x, dual-end, patience", 0.5, has_patience=True),
    "pool": Way("2x, dual-end, wait for all", 1, early_stop=False),
    "auto": Way("auto, dual-end, tail pruning (DARTS)", "auto"),
    "auto_dual_end": Way("auto, dual-end for everybody", "shares"),
    "auto_patience": Way("auto, dual-end, patience, tail pruning", "auto", has_patience=True),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of groups, answers and repeats, which are also options of the command line."""

    model: str = size(DEFAULT_MODEL, "a name of `vllm-rollout models list`, a Hugging Face name or a directory")
    prompts: int = size(4, "prompts, all at once")
    group_size: int = size(8, "M, answers per prompt")
    max_tokens: int = size(512, "length cap of an answer")
    temperature: float = size(1.0, "temperature of sampling")
    num_longest: int = size(1, "L, longest answers of every dual-end way")
    patience: float = size(1.5, "patience of the ways with patience")
    tradeoff: float = size(DEFAULT_TRADEOFF, "tradeoff of redundancy auto")
    epochs: int = size(2, "epochs of history before the first measurement")
    repeats: int = size(4, "repeats of every way")
    seed: int = size(7, "repeat r samples with seed + 1000 r")

    @property
    def max_num_seqs(self) -> int:
        """`--max-num-seqs` of the server, so that all candidates of any way run at once."""
        return self.prompts * MAX_BUDGET_RATIO * self.group_size

    def sampling(self, seed: int) -> dict[str, Any]:
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": seed}
        return own | (TINY_SAMPLING if self.model == TINY else {})

    def repeat_seed(self, repeat: int) -> int:
        """Seed of a repeat. Candidate i samples with this seed + i in every way."""
        return self.seed + SEED_STRIDE * repeat

    def epoch_seed(self, epoch: int) -> int:
        return self.seed + HISTORY_SEED + SEED_STRIDE * epoch

    def selection(self, way: Way) -> Any:
        """The field `selection` of the request."""
        if way.selection != "dual_end":
            return way.selection
        return {"dual_end": {"num_longest": self.num_longest, "patience": self.patience if way.has_patience else None}}

    def plan(self, way: Way, redundancy: int) -> GroupPlan:
        """The plan of one prompt, as the server makes it."""
        dual_end = way.selection == "dual_end"
        return make_plan(
            self.group_size,
            redundancy,
            way.early_stop,
            way.selection,
            self.num_longest if dual_end else None,
            None,
            self.patience if way.has_patience else None,
            max_candidates=self.max_num_seqs,
        )

    def spare(self, way: Way) -> int:
        """Spare candidates of a way that has the same number for every prompt."""
        assert not isinstance(way.redundancy, str), f"{way.title} has no one number of spare candidates"
        return round(way.redundancy * self.group_size)


def check(sizes: Sizes) -> None:
    """Raises: ValueError for sizes that cannot be run."""
    check_positive(sizes, ("prompts", "group_size", "max_tokens", "epochs", "repeats"))
    if sizes.model != TINY and sizes.prompts > len(PROMPTS):
        raise ValueError(
            f"--prompts must be at most {len(PROMPTS)}, those of benchmarks/prompts.py, got {sizes.prompts}"
        )
    for way in WAYS.values():
        sizes.plan(way, sizes.group_size)


def prompts(sizes: Sizes) -> list[dict[str, Any]]:
    """Prompts with ids that do not change, because the server recognizes a prompt by its id."""
    if sizes.model == TINY:
        chance = random.Random(sizes.seed)
        tokens = [[chance.randrange(16, 512) for _ in range(TINY_PROMPT_TOKENS)] for _ in range(sizes.prompts)]
        return [{"id": f"tiny-{i}", "prompt_token_ids": ids} for i, ids in enumerate(tokens)]
    return [
        {"id": f"everyday-{i}", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(PROMPTS[: sizes.prompts])
    ]


def order(repeat: int) -> list[WayName]:
    """The ways, starting with another one in each repeat. `auto` comes before `auto_dual_end`, which needs it."""
    turned = in_turn(WAY_NAMES, repeat)
    if turned.index("auto_dual_end") < turned.index("auto"):
        turned.remove("auto_dual_end")
        turned.insert(turned.index("auto") + 1, "auto_dual_end")
    return turned
