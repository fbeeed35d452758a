"""Options of the demo of rounds: one period of short rounds and their long round. Checked before a server starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_rollout.demo.options import MAX_CANDIDATES, SEED, DemoOptions
from vllm_rollout.parts.rounds.demo.prompts import make_prompts
from vllm_rollout.parts.rounds.rules.rounds import RunTerms

TEMPERATURE = 0.6
"""At temperature 1 one answer in five of this small model runs to the cap, for any prompt. Then candidates have tails,
not prompts."""


@dataclass(frozen=True, slots=True)
class RoundsOptions(DemoOptions):
    """Options of the demo of rounds. `prompts`: number of prompts that a round returns."""

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
        """Number of candidates in a short round."""
        return self.terms.num_prompts * self.terms.num_candidates

    def questions(self) -> list[str]:
        """Prompts of a period's short rounds. Raises: ValueError if there are not enough."""
        return make_prompts(self.terms.num_period_prompts, SEED)

    @property
    def sampling(self) -> dict[str, float]:
        return {"temperature": TEMPERATURE, "max_tokens": self.max_tokens, "seed": SEED}


QUICK = {"prompts": 4, "group_size": 2, "max_tokens": 384}
