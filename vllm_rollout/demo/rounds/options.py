"""What the demo of rounds runs: one period of short rounds and their long one. Checked before a server starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_rollout.demo.options import MAX_CANDIDATES, SEED, DemoOptions
from vllm_rollout.demo.rounds.prompts import make_prompts
from vllm_rollout.group.rounds.rounds import RunTerms

TEMPERATURE = 0.6
"""At 1 this small model rambles to the cap on any prompt, one answer in five: tails of candidates, not of prompts."""


@dataclass(frozen=True, slots=True)
class RoundsOptions(DemoOptions):
    """`prompts`: those that a round returns."""

    group_size: int = 2
    output: Path = Path("rounds_demo.png")

    def __post_init__(self) -> None:
        DemoOptions.__post_init__(self)
        if self.num_at_once > MAX_CANDIDATES:
            raise ValueError(
                f"a short round runs {self.terms.num_prompts} prompts x {self.terms.num_candidates} candidates, at "
                f"most {MAX_CANDIDATES} fit. Use a smaller --prompts or --group-size."
            )
        self.questions()

    @property
    def terms(self) -> RunTerms:
        return RunTerms(self.group_size, self.prompts)

    @property
    def num_at_once(self) -> int:
        """Candidates of a short round."""
        return self.terms.num_prompts * self.terms.num_candidates

    def questions(self) -> list[str]:
        """What the short rounds of a period take. Raises: ValueError for more than there are."""
        return make_prompts(self.terms.num_period_prompts, SEED)

    @property
    def sampling(self) -> dict[str, float]:
        return {"temperature": TEMPERATURE, "max_tokens": self.max_tokens, "seed": SEED}


QUICK = {"prompts": 4, "group_size": 2, "max_tokens": 384}
