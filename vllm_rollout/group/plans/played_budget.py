"""How many candidates the prompts of a rollout get together, where not all of them have places at once.

The paper's time of a budget is that of candidates which all run at once and which nobody stops. Where they wait for
each other spares take places from other groups: that pays where answers of a prompt differ much, since their race is
over early, and costs where they are alike. Which of the two is played beforehand, as orders of launch are: lengths are
drawn from what is known of each prompt, and each budget is run with as many places as there are.

Invariant: the paper's budget stays where all have places, where no race stops anybody, and where no other is expected
to save `MIN_GAIN` of the steps. The same knowledge gives the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from vllm_rollout.group.lengths.moments import LengthMoments
from vllm_rollout.group.plans.launch_order import MAX_DRAWN, NUM_DRAWS, drawn_lengths, steps, sure_gain, uniforms
from vllm_rollout.group.plans.plan import GroupPlan

LEVELS = 4
"""Budgets that are played beside the paper's: from no spares to all in so many equal parts."""


def played_budget(
    total: int,
    shares_of: Callable[[int], Sequence[int]],
    plan: GroupPlan,
    lengths: Sequence[tuple[LengthMoments, int | None]],
    num_places: int,
) -> int:
    """Candidates of all prompts together.

    Args:
        total: the paper's budget.
        shares_of: each prompt's candidates by the budget.
        plan: of a prompt with all that it may have.
        lengths: of each prompt, with its `max_tokens`.
        num_places: candidates that run at once.
    """
    lower, upper = (len(lengths) * size for size in (plan.group_size, plan.num_candidates))
    races = plan.early_stop and plan.patience is None and plan.pruning is None
    if not races or lower == upper or upper <= num_places:
        return total
    totals = sorted({total, *(lower + (upper - lower) * level // LEVELS for level in range(LEVELS + 1))})
    shares = {each: shares_of(each) for each in totals}
    taken: dict[int, list[float]] = {each: [] for each in totals}
    uniform = uniforms(upper)
    for _ in range(max(2, min(NUM_DRAWS, MAX_DRAWN // upper))):
        drawn = [list(drawn_lengths(*each, plan.num_candidates, uniform)) for each in lengths]
        for each in totals:
            taken[each].append(steps(_raced(drawn, shares[each], plan.group_size), num_places))
    best = min(totals, key=lambda each: sum(taken[each]))
    return best if sure_gain(taken[best], taken[total]) else total


def _raced(drawn: Sequence[Sequence[float]], shares: Sequence[int], group_size: int) -> Iterator[float]:
    """Lengths that candidates reach until their group is complete."""
    for all_of_group, num_candidates in zip(drawn, shares, strict=True):
        lengths = all_of_group[:num_candidates]
        last = sorted(lengths)[group_size - 1] if num_candidates > group_size else math.inf
        yield from (min(length, last) for length in lengths)
