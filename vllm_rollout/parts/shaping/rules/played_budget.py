"""Chooses the budget of a rollout if not all of its candidates run at once.

The paper's time of a budget assumes that all candidates run at once and that none is stopped. If candidates wait for
places, spares take places from other groups. Spares pay if the answers of a prompt differ much, since its race ends
early, and cost time if the answers are alike. A simulation decides, as for `launch_order.py`: lengths are drawn from
the history of each prompt, and each budget runs with the real number of places.

Invariant: the paper's budget stays if all candidates have places, or if the race stops no candidate. It also stays if
no other budget is expected to save `MIN_GAIN` of the steps. The same history gives the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.shaping.rules.launch_order import (
    MAX_DRAWN,
    NUM_DRAWS,
    drawn_lengths,
    steps,
    sure_gain,
    uniforms,
)
from vllm_rollout.parts.shaping.rules.moments import LengthMoments

LEVELS = 4
"""Number of equal steps from no spares to all spares: these budgets are simulated beside the paper's."""


def played_budget(
    total: int,
    shares_of: Callable[[int], Sequence[int]],
    plan: GroupPlan,
    lengths: Sequence[tuple[LengthMoments, int | None]],
    num_places: int,
) -> int:
    """Total candidates of all prompts.

    Args:
        total: the paper's budget.
        shares_of: maps a budget to each prompt's candidates.
        plan: the plan of a prompt at its upper bound.
        lengths: each prompt's length moments and its `max_tokens`.
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
    """Tokens of each candidate, up to the end of its group's race."""
    for all_of_group, num_candidates in zip(drawn, shares, strict=True):
        lengths = all_of_group[:num_candidates]
        last = sorted(lengths)[group_size - 1] if num_candidates > group_size else math.inf
        yield from (min(length, last) for length in lengths)
