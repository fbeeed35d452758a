"""Chooses the number of candidates of each prompt of a batch: first a budget for the batch, then each prompt's share.

Prompts whose lengths vary most get most of the spare candidates. The most extreme prompts have tails that are too long
to wait for. DARTS calls a prompt extreme if its share reached its bound. With a generous budget every share reaches its
bound. Here a prompt is therefore extreme by its rank among the other prompts, at any budget.

Invariant: shares sum to the budget and keep their bounds. A prompt with a larger weight never gets fewer candidates.
Among at least 1 / `EXTREME_SHARE` prompts with a history, at most `EXTREME_SHARE` of them are extreme. The same input
gives the same shares.

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
from vllm_rollout.kernel.rules.fields import EarlyStop
from vllm_rollout.kernel.rules.plan import GroupPlan, upper_bound
from vllm_rollout.parts.shaping.rules.cost import CostModel, budget_slope
from vllm_rollout.parts.shaping.rules.moments import LengthMoments
from vllm_rollout.parts.shaping.rules.played_budget import played_budget

DEFAULT_BUDGET_RATIO = 1.5
"""Candidates per wanted trajectory if there is no profile or no history: the paper's average (Appendix B)."""
EXTREME_SHARE = 0.05
"""Prompts of a batch with an extreme tail: the paper's "~5 % of the most expensive prompts" (DARTS 4.3.1)."""
EXTREME_STD = 1.6
"""Threshold for a batch of fewer than 1 / `EXTREME_SHARE` prompts: a prompt's std over the std of the data set. If log
lengths spread by 0.8 within prompts and by 0.5 between prompts, one prompt in twenty exceeds it."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Candidates of a whole batch, with the numbers behind the choice."""

    total: int
    """M_total: `optimum`, rounded down and moved into [`lower`, `upper`], or a budget that `source` names."""
    lower: int
    """Candidates of the batch without redundancy."""
    upper: int
    """Candidates of the batch if every prompt is at its upper bound."""
    optimum: float | None
    """M* of Eq. 8. None: unknown, or infinite because more candidates cost no time."""
    rho: float | None
    """std / mean of lengths over the data set, cut at `max_tokens`. None without a history of lengths."""
    seconds_per_candidate: float | None
    """k of Eq. 6. None without a profile or a history."""
    base_s: float | None
    """Time of the rollout without redundancy, T(lower)."""
    tradeoff: float
    """Weight of time, lambda of Eq. 8, with time counted in rollouts without redundancy."""
    source: Literal["profile", "default", "places"]
    """Origin of `total`. `profile`: Eq. 8. `default`: there is no profile or no history, and `total` is the paper's
    average, 1.5 times `lower`. `places`: not all candidates run at once, and this budget was fastest in simulated
    launches."""


@dataclass(frozen=True, slots=True)
class PromptAllocation:
    """The share of one prompt, with the numbers behind it."""

    num_candidates: int
    """Candidates of the prompt, M' of DARTS."""
    weight: float
    """Position of the prompt's length std between the smallest (0) and the largest (1) of the batch."""
    std_tokens: float | None
    """Standard deviation of the prompt's lengths, cut at its `max_tokens`. None without a history of the prompt."""
    at_upper_bound: bool
    """True if the prompt has the most candidates that a prompt can have, and these are more than `group_size`."""
    extreme: bool = False
    """True if the prompt's tail is too long to wait for."""


@dataclass(frozen=True, slots=True)
class BatchAllocation:
    budget: Budget
    prompts: tuple[PromptAllocation, ...]
    """Shares in the order of the batch."""

    def plans(self, plan: GroupPlan, early_stop: EarlyStop = None) -> list[GroupPlan]:
        """The plan of each prompt, made from `plan`, the plan of a prompt at its upper bound. Source: DARTS Algorithm
        2."""
        stops = early_stop is not False
        return [allocated(plan, its.num_candidates, its.extreme, early_stop=stops) for its in self.prompts]


def allocated(plan: GroupPlan, num_candidates: int, extreme: bool, *, early_stop: bool = True) -> GroupPlan:
    """A plan with the candidates that redundancy "auto" gives the prompt.

    If the tail is extreme, the plan does not wait for it: it selects the shortest, with early stop unless that is
    forbidden. Source: DARTS Algorithm 2.
    """
    plan = replace(plan, redundancy=num_candidates - plan.group_size)
    if not extreme:
        return plan
    return replace(plan, selection="shortest", num_longest=0, patience=None, early_stop=early_stop)


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A prompt of the batch, as input of the allocation."""

    lengths: LengthMoments | None = None
    """Moments of the prompt's earlier lengths. None without a history of the prompt."""
    num_tokens: int = 0
    """Length of the prompt itself, in tokens."""
    max_tokens: int | None = None
    """Output tokens at which the prompt's candidates are cut. None: not known."""


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
    """Choose the budget and the shares of one batch. Every prompt gets from `group_size` to twice that.

    Args:
        max_candidates: most candidates of a prompt (the engine's `max_num_seqs`), at least `group_size`.
        race: the plan of a prompt at its upper bound. None: the budget is not simulated (`played_budget.py`).
        num_places: candidates that run at once. None: all of them.
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

    The paper's U(M) = rho ln M - lambda T(M) leaves lambda and its unit open. A second is not worth the same for every
    model. Time is therefore counted in rollouts without redundancy: U(M) = rho ln M - tradeoff T(M) / T(lower), with
    T(M) = T(lower) + k (M - lower). So M* = rho T(lower) / (tradeoff k). With a tradeoff of 1, a gain of 1 in rho ln M
    is worth the time of one rollout without redundancy. If time grows in proportion to candidates, M* is rho times
    `lower`. If a step costs the same for any batch, only longer tails take time, and M* soon reaches `upper`.

    rho is computed from lengths cut at `max_tokens`. Without the cut, lengths expected beyond `max_tokens` would count
    as a gain, but never as time.

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

    A prompt without a history gets the median of the prompts with one. If all known values are equal, or none is known,
    every weight is 1.
    """
    known = [std for std in stds if std is not None]
    if not known or min(known) == max(known):
        return [1.0] * len(stds)
    low, high, middle = min(known), max(known), median(known)
    return [((middle if std is None else std) - low) / (high - low) for std in stds]


def extreme_tails(stds: Sequence[float | None], usual: float | None) -> list[bool]:
    """One flag for each prompt: True if its lengths vary so much that its tail is too long to wait for.

    Only prompts with a history can be extreme. In a large batch, prompts above the 1 - `EXTREME_SHARE` quantile are
    extreme. Prompts that tie with the quantile are not, so no prompt of a batch of equal prompts is extreme. Fewer than
    1 / `EXTREME_SHARE` prompts have no such quantile. There a prompt is extreme if its std is more than `EXTREME_STD`
    times `usual`, the std of the data set.

    Source: DARTS 4.3.1. Algorithm 2 asks for a share at its upper bound instead.
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

    Each step from M' to M' + 1 visits prompts by falling weight. The steps are merged instead of the prompts, so that
    100,000 prompts stay fast. Ties go to the prompt with fewer candidates, then to the larger weight, then to the lower
    index. Prompts of weight 0 therefore share evenly the candidates from which no prompt gains.

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
