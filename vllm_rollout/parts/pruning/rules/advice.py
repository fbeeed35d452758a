"""Compares pruning with smaller groups without pruning, by signal to noise of the gradient per generated token.

Both give a trainer groups of the same size. They differ in the signal to noise of GRPO's gradient (squared mean over
variance of a group's estimate), and in the generated tokens. A group whose n rewards have the mean rho contributes
sqrt(rho (1 - rho)) along the gradient, with noise of 1 / n. If all its rewards are equal, it contributes neither. So
the value of a token is

    E[sqrt(rho (1 - rho))]^2 / (E[1 / n; rewards differ] E[tokens]) .

Survivors are counted directly, less the loss of contrast by a choice that follows scores
(`parts/pruning/rules/gradient.py`). The loss is a factor of 1 - R^2 / 2 mean((p - kappa)^2) / kappa^2 on the mean.
Groups without pruning are computed, since most rewards are those of survivors. Weights 1 / p give the mean of prompts'
success rates, and pairs of siblings give its variance. With a beta distribution of both, the rewards of n candidates
are beta-binomial.

Invariant: advice depends only on the rewarded candidates. Groups that race are left out, since they do not show how
many candidates would succeed.

Source: vllm_rollout. Checked against the true gradient (docs/development/log.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum, lgamma, sqrt
from typing import Literal, NamedTuple

from vllm_rollout.parts.pruning.rules.report import RewardedCandidate, weighted_mean

Setting = Literal["prune", "fewer"]

MIN_GROUPS = 64
"""Groups that advice needs. With fewer, the value is not known to a tenth."""
MARGIN = 1.05
"""Smallest value at which pruning is advised. Above 1, because pruning is more complicated and the value has an
error."""
MAX_CONCENTRATION = 1e4
"""Largest concentration of prompts' success rates. Its inverse is the smallest one."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommendation for more gradient per generated token: pruning, or fewer candidates without pruning."""

    cheaper: Setting | None
    """None: no recommendation, for the given reason."""
    reason: str
    num_groups: int
    """Number of groups behind the recommendation."""
    value: float | None = None
    """Signal to noise per generated token with pruning, as a multiple of that of `num_kept` candidates without
    pruning."""
    num_candidates: float | None = None
    """Scored candidates of a group, on average."""
    num_kept: float | None = None
    """Candidates of a group that pruning keeps, on average."""


def advise(outcomes: Iterable[RewardedCandidate], detection_length: int) -> Advice:
    """Recommend for or against pruning from the newest rewarded candidates of one detection length, in tokens."""
    judged = [o for o in outcomes if o.is_sample and not o.cold]
    by_group: dict[str, list[RewardedCandidate]] = defaultdict(list)
    for outcome in judged:
        by_group[outcome.group].append(outcome)
    groups = [_Group(fsum(map(_weight, members)), [o for o in members if o.keep]) for members in by_group.values()]
    if len(groups) < MIN_GROUPS:
        return Advice(None, f"{MIN_GROUPS} groups have to be judged and rewarded in which nobody races", len(groups))
    num_candidates = fsum(group.num_candidates for group in groups) / len(groups)
    num_kept = sum(len(group.kept) for group in groups) / len(groups)
    known = Advice(None, "", len(groups), None, num_candidates, num_kept)
    size = round(num_kept)
    if not 1 < size < round(num_candidates):
        return replace(known, reason="pruning keeps nearly all, or nearly none")
    rates = _success_rates(by_group.values())
    if rates is None:
        return replace(known, reason="no reward differs from the others")
    length = detection_length + _mean((_weight(o), o.tokens_after) for o in judged)
    length_kept = detection_length + _mean((1.0, o.tokens_after) for group in groups for o in group.kept)
    pruned = _quality_of_survivors(groups) * _contrast(judged) ** 2
    pruned /= num_kept * length_kept + (num_candidates - num_kept) * detection_length
    value = pruned / (_quality_of_unpruned(rates, size) / (size * length))
    reason = f"per generated token it is worth {value:.2f} times groups of {size} without pruning"
    return replace(known, cheaper="prune" if value >= MARGIN else "fewer", reason=reason, value=value)


class _Group(NamedTuple):
    num_candidates: float
    """Number of candidates. With active pruning only survivors are rewarded, and each counts as 1 / p candidates."""
    kept: Sequence[RewardedCandidate]


def _weight(candidate: RewardedCandidate) -> float:
    return candidate.weight if candidate.active else 1.0


class _Rates(NamedTuple):
    """Success rates of prompts: a beta distribution."""

    successes: float
    failures: float


def _success_rates(groups: Iterable[Sequence[RewardedCandidate]]) -> _Rates | None:
    """The beta distribution with the moments of these groups. None if all candidates succeed, or all fail."""
    total = successes = pairs = successful_pairs = 0.0
    for members in groups:
        weights = [_weight(member) for member in members]
        right = [weight for weight, member in zip(weights, members, strict=True) if member.positive]
        total += fsum(weights)
        successes += fsum(right)
        pairs += _pairs(weights)
        successful_pairs += _pairs(right)
    rate = successes / total
    if not 0 < rate < 1:
        return None
    both = successful_pairs / pairs if pairs else rate**2
    excess = max(both - rate**2, rate * (1 - rate) / (1 + MAX_CONCENTRATION))
    concentration = max((rate - both) / excess, 1 / MAX_CONCENTRATION)
    return _Rates(rate * concentration, (1 - rate) * concentration)


def _pairs(weights: Sequence[float]) -> float:
    return fsum(weights) ** 2 - fsum(weight**2 for weight in weights)


def _quality_of_unpruned(rates: _Rates, size: int) -> float:
    """Signal to noise of groups of `size` candidates."""
    chances = [_beta_binomial(rates, size, k) for k in range(size + 1)]
    spread = fsum(chance * sqrt(k * (size - k)) / size for k, chance in enumerate(chances))
    return _quality(spread, (1 - chances[0] - chances[-1]) / size)


def _quality_of_survivors(groups: Sequence[_Group]) -> float:
    spread = noise = 0.0
    for group in groups:
        size, right = len(group.kept), sum(o.positive for o in group.kept)
        if 0 < right < size:
            spread += sqrt(right * (size - right)) / size
            noise += 1 / size
    return _quality(spread / len(groups), noise / len(groups))


def _quality(spread: float, noise: float) -> float:
    return spread**2 / noise if noise > 0 else 0.0


def _beta_binomial(rates: _Rates, size: int, k: int) -> float:
    a, b = rates
    choose = lgamma(size + 1) - lgamma(k + 1) - lgamma(size - k + 1)
    return exp(choose + _log_beta(k + a, size - k + b) - _log_beta(a, b))


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def _contrast(judged: Sequence[RewardedCandidate]) -> float:
    """Share of the mean that remains if survivors are chosen by a score."""
    told = [(o, o.success_probabilities.get("head", o.success_probabilities.get("confidence"))) for o in judged]
    scored = [(_weight(o), q, o.survival_probability) for o, q in told if q is not None]
    if not scored:
        return 1.0
    rate = _mean((w, q) for w, q, _ in scored)
    kappa = _mean((w, p) for w, _, p in scored)
    if not 0 < rate < 1:
        return 1.0
    explained = _mean((w, (q - rate) ** 2) for w, q, _ in scored) / (rate * (1 - rate))
    steered = _mean((w, (p - kappa) ** 2) for w, _, p in scored) / kappa**2
    return max(0.0, 1 - explained / 2 * steered)


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    return weighted_mean(weighted) or 0.0
