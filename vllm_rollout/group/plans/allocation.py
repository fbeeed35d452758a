"""How many candidates each prompt of a batch deserves: first a budget for all, then its shares.

Prompts whose lengths spread most get most of the spare candidates. Those that spread most of all have extreme tails,
too long to wait for. DARTS takes a share that reached its bound as the sign of that; a generous budget would make every
prompt extreme, so here the sign is the prompt's place among the others, whatever the budget.

Invariant: shares sum to the budget and keep their bounds, a larger weight never gets fewer candidates, at most
`EXTREME_SHARE` of many prompts are extreme, and the same input gives the same shares.

Source: DARTS 4.2.2, 4.3.1, Appendix B (Eq. 6-9) and C (Eq. 5 and 10, Algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import islice
from statistics import fmean, median
from typing import Literal

from vllm_rollout.config import DEFAULT_TRADEOFF
from vllm_rollout.group.lengths.cost import CostModel, budget_slope
from vllm_rollout.group.lengths.moments import LengthMoments
from vllm_rollout.group.plans.fields import EarlyStop
from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.plans.played_budget import played_budget

DEFAULT_BUDGET_RATIO = 1.5
"""Candidates per wanted trajectory while no profile or no history says better: the paper's average (Appendix B)."""
MAX_BUDGET_RATIO = 2
"""Most candidates per wanted trajectory: M_up = 2 M of DARTS Eq. 5 and Eq. 9."""
EXTREME_SHARE = 0.05
"""Prompts of a batch with an extreme tail: the paper's "~5 % of the most expensive prompts" (DARTS 4.3.1)."""
EXTREME_STD = 1.6
"""Among fewer prompts than have one in that share a tail is extreme from this std over that of the data set on. One
prompt in twenty has it where log lengths spread by 0.8 within prompts and 0.5 between them."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Candidates of a whole batch, and why so many."""

    total: int
    """M_total: the optimum, within the bounds."""
    lower: int
    """Candidates without redundancy."""
    upper: int
    """Candidates with every prompt at its upper bound."""
    optimum: float | None
    """M* of Eq. 8. None: unknown, or without bound because more candidates cost no time."""
    rho: float | None
    """std / mean of lengths over the data set, of what fits into `max_tokens`. None without a history of lengths."""
    seconds_per_candidate: float | None
    """k of Eq. 6. None without a profile or a history."""
    base_s: float | None
    """Time of the rollout without redundancy, T(lower)."""
    tradeoff: float
    """lambda."""
    source: Literal["profile", "default", "places"]
    """`default`: without a profile or a history it is the paper's average, 1.5 times the lower bound. `places`: not
    all candidates run at once, and this budget was fastest when some were played."""


@dataclass(frozen=True, slots=True)
class PromptAllocation:
    """One prompt's share, and why."""

    num_candidates: int
    """M'."""
    weight: float
    """Where the prompt's length std lies between the least (0) and the greatest (1) of the batch."""
    std_tokens: float | None
    """Standard deviation of its lengths, cut at its `max_tokens`; None when it was never seen."""
    at_upper_bound: bool
    """It has all that a prompt can have, and that is more than `group_size`."""
    extreme: bool = False
    """Its tail is too long to wait for."""


@dataclass(frozen=True, slots=True)
class BatchAllocation:
    budget: Budget
    prompts: tuple[PromptAllocation, ...]
    """Shares in the order of the batch."""

    def plans(self, plan: GroupPlan, early_stop: EarlyStop = None) -> list[GroupPlan]:
        """The plan of each prompt, from that of a prompt with all it may have. Source: DARTS Algorithm 2."""
        stops = early_stop is not False
        return [plan.allocated(its.num_candidates, its.extreme, early_stop=stops) for its in self.prompts]


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A prompt that wants candidates."""

    lengths: LengthMoments | None = None
    """What is known of its lengths; None for one that was never seen."""
    num_tokens: int = 0
    """Tokens of the prompt itself."""
    max_tokens: int | None = None
    """Output tokens at which its candidates are cut; None: not known."""


def upper_bound(group_size: int, max_candidates: int) -> int:
    """Most candidates of one prompt: M_up of DARTS Eq. 5, as far as the engine runs as many at once."""
    return min(MAX_BUDGET_RATIO * group_size, max_candidates)


def allocate_batch(
    prompts: Sequence[BatchPrompt],
    dataset: LengthMoments | None,
    cost: CostModel | None,
    *,
    group_size: int,
    max_candidates: int,
    num_ranks: int = 1,
    tradeoff: float = DEFAULT_TRADEOFF,
    race: GroupPlan | None = None,
    num_places: int | None = None,
) -> BatchAllocation:
    """Budget and shares of one batch; every prompt gets from `group_size` to twice that.

    Args:
        max_candidates: of one prompt (the engine's `max_num_seqs`), no fewer than `group_size`: `make_plan` sees to it.
        race: the plan of a prompt with all it may have, where its budget may be played (`played_budget.py`).
        num_places: candidates that run at once; None: all do.
    """
    assert prompts, "nothing to allocate candidates to"
    upper = upper_bound(group_size, max_candidates)
    num_prompts = len(prompts)
    budget_max_tokens = max((p.max_tokens for p in prompts if p.max_tokens is not None), default=None)
    budget = optimal_budget(
        dataset,
        cost,
        lower=num_prompts * group_size,
        upper=num_prompts * upper,
        num_ranks=num_ranks,
        prompt_tokens=fmean(prompt.num_tokens for prompt in prompts),
        max_tokens=budget_max_tokens,
        tradeoff=tradeoff,
    )
    stds = [None if prompt.lengths is None else prompt.lengths.cut(prompt.max_tokens).std for prompt in prompts]
    usual = None if dataset is None else dataset.cut(budget_max_tokens).std
    weights = normalized_weights(stds)
    if race is not None and num_places is not None and dataset is not None:
        lengths = [(prompt.lengths or dataset, prompt.max_tokens) for prompt in prompts]
        total = played_budget(
            budget.total, lambda total: allocate(weights, total, group_size, upper), race, lengths, num_places
        )
        if total != budget.total:
            budget = replace(budget, total=total, source="places")
    shares = allocate(weights, budget.total, group_size, upper)
    return BatchAllocation(
        budget,
        tuple(
            PromptAllocation(share, weight, std, share == upper > group_size, extreme)
            for share, weight, std, extreme in zip(shares, weights, stds, extreme_tails(stds, usual), strict=True)
        ),
    )


def optimal_budget(
    dataset: LengthMoments | None,
    cost: CostModel | None,
    *,
    lower: int,
    upper: int,
    num_ranks: int = 1,
    prompt_tokens: float = 0,
    max_tokens: int | None = None,
    tradeoff: float = DEFAULT_TRADEOFF,
) -> Budget:
    """Candidates of the whole batch that maximise gain less time, from `lower` to `upper`.

    The paper's U(M) = rho ln M - lambda T(M) leaves lambda and its unit open, and seconds mean other things to other
    models. Time is therefore counted in rollouts without redundancy, U(M) = rho ln M - tradeoff T(M) / T(lower), with
    T(M) = T(lower) + k (M - lower). So M* = rho T(lower) / (tradeoff k). With a tradeoff of 1, a gain of 1 in rho ln M
    is worth the time of one rollout without redundancy. Where time grows in proportion to candidates, M* is then rho
    times `lower`; where a step costs the same for any batch, only longer tails take time, and M* soon is `upper`.

    rho is of the lengths as they run, cut at `max_tokens`. Without the cut, what a history expects beyond `max_tokens`
    would count as a gain, but never as time.

    Raises: ValueError when the tradeoff is not positive.

    Source: DARTS Eq. 6-9.
    """
    assert 1 <= lower <= upper, "bounds of a budget in order"
    if not 0 < tradeoff < math.inf:
        raise ValueError(
            f"tradeoff must be a positive number, got {tradeoff}. More than {DEFAULT_TRADEOFF:g}, the default, buys "
            "less redundancy, less buys more."
        )
    rho = None
    if dataset is not None and dataset.mean >= 1:  # below a token per length there is nothing to shape
        cut = dataset.cut(max_tokens)
        rho = cut.std / cut.mean
    if dataset is None or rho is None or cost is None:
        total = min(upper, round(DEFAULT_BUDGET_RATIO * lower))
        return Budget(total, lower, upper, None, rho, None, None, tradeoff, "default")
    k, base_s = budget_slope(cost, dataset.mean, dataset.std, lower, upper, num_ranks, prompt_tokens, max_tokens)
    price = tradeoff * k / base_s
    optimum = rho / price if price > 0 else math.inf
    total = max(lower, math.floor(min(optimum, upper)))
    known = optimum if optimum < math.inf else None
    return Budget(total, lower, upper, known, rho, k, base_s, tradeoff, "profile")


def normalized_weights(stds: Sequence[float | None]) -> list[float]:
    """Standard deviations of lengths -> weights in [0, 1]: min-max over the batch (DARTS Eq. 5).

    A prompt that was never seen counts as the median of those that were. All alike, or all new: all 1.
    """
    known = [std for std in stds if std is not None]
    if not known or min(known) == max(known):
        return [1.0] * len(stds)
    low, high, middle = min(known), max(known), median(known)
    return [((middle if std is None else std) - low) / (high - low) for std in stds]


def extreme_tails(stds: Sequence[float | None], usual: float | None) -> list[bool]:
    """Which prompts spread so much that their tails are too long to wait for.

    Of the prompts that were seen before, those above the 1 - `EXTREME_SHARE` quantile. Of prompts that spread alike
    either all are above it or none is, so that a tie at the quantile leaves fewer, and of a batch of equals nobody is
    extreme. Fewer than 1 / `EXTREME_SHARE` prompts have no such quantile, and in a batch of one the prompt is always
    the first: there a prompt is extreme that spreads `EXTREME_STD` times as much as the data set, `usual`.

    Source: DARTS 4.3.1; Algorithm 2 asks for a saturated share instead.
    """
    known = sorted((std for std in stds if std is not None), reverse=True)
    most = math.floor(EXTREME_SHARE * len(known) + 1e-9)
    if most:
        threshold = known[most]
    elif usual:
        threshold = EXTREME_STD * usual
    else:
        threshold = math.inf
    return [std is not None and std > threshold for std in stds]


def allocate(weights: Sequence[float], total: int, lower: int, upper: int) -> list[int]:
    """Give every prompt `lower` candidates, then each next one to the prompt that gains most, w (1/M' - 1/(M' + 1)).

    Each step from M' to M' + 1 visits prompts by falling weight, so that steps are merged, not prompts: that is why
    100,000 prompts are quick. Ties go to the prompt with fewer candidates, then to the larger weight, then
    to the lower index; prompts of weight 0 thus share evenly what nobody gains from.

    The result minimises Eq. 5, whose terms are convex.

    Source: DARTS Algorithm 1.
    """
    num_prompts = len(weights)
    assert num_prompts * lower <= total <= num_prompts * upper, "a total that the bounds can meet"
    by_weight = sorted(range(num_prompts), key=lambda i: -weights[i])

    def gains(size: int) -> Iterator[tuple[float, int, int]]:
        for rank, i in enumerate(by_weight):
            yield -weights[i] / (size * (size + 1)), size, rank

    shares = [lower] * num_prompts
    for _, _, rank in islice(merge(*map(gains, range(lower, upper))), total - num_prompts * lower):
        shares[by_weight[rank]] += 1
    return shares
