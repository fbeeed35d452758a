"""Corrections for samples of older policies: importance weights, masks, a decoupled loss and diagnostics.

The behavior policy sampled the tokens, and the engine returned its log probabilities. The proximal policy is the
trainer's at the beginning of a step. The current policy is the one that learns. In the first update of a step the
proximal and the current policy are the same.

Invariant: functions are pure, and compute in float32 or float64. Gradients flow only through the log probabilities
of the trainer's policy. Values outside of a mask change no result, also if they are nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Level = Literal["token", "sequence", "geometric"]
"""Unit of a ratio: a token, a sequence (product over its tokens), or a sequence (geometric mean over its tokens)."""

MAX_LOG_RATIO = 20.0
"""Ratios are exp of at most this, against overflow."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Options of `importance_weights`. The names are verl's. Raises: ValueError for values that are not allowed.

    Sources: truncated importance sampling (TIS): Ionides 2008, for tokens Yao et al. 2025. Masks of tokens: IcePop
    (Ring-1T, arXiv 2510.18855). Geometric mean: GSPO (arXiv 2507.18071), Eq. 7.
    """

    rollout_is: Level | None = "token"
    """Level of the weights. None: each weight is 1."""
    rollout_is_threshold: float | None = 2.0
    """Greater weights are truncated to it. None truncates nothing below exp(20)."""
    rollout_rs: Mapping[Level, tuple[float, float]] | None = field(default_factory=dict)
    """Allowed ratios [low, high] by level. Tokens and sequences with another ratio are masked. None masks none."""

    def __post_init__(self) -> None:
        levels = get_args(Level)
        if self.rollout_is not in (None, *levels):
            raise ValueError(f"rollout_is must be None or one of {', '.join(levels)}, got {self.rollout_is!r}")
        limit = self.rollout_is_threshold
        if limit is not None and not (isinstance(limit, Real) and limit is not True and limit > 0):
            raise ValueError(f"rollout_is_threshold must be above 0, or None to truncate nothing, got {limit!r}")
        if not isinstance(self.rollout_rs, Mapping | None):
            raise ValueError(f"rollout_rs must be a mapping from a level to (low, high), got {self.rollout_rs!r}")
        for level, allowed in (self.rollout_rs or {}).items():
            if level not in levels:
                raise ValueError(f"levels of rollout_rs must be among {', '.join(levels)}, got {level!r}")
            is_pair = isinstance(allowed, Sequence) and len(allowed) == 2 and all(isinstance(a, Real) for a in allowed)
            if not is_pair or not 0 <= allowed[0] <= allowed[1]:
                raise ValueError(f"rollout_rs[{level!r}] must be (low, high) with 0 <= low <= high, got {allowed!r}")


class ImportanceWeights(NamedTuple):
    """Weights of a batch. All tensors are [num_samples, num_tokens], and none has a gradient."""

    weights: Tensor
    """float32 or float64. 0 outside of `mask`."""
    mask: Tensor
    """bool. Tokens that train."""
    clipped: Tensor
    """bool. Tokens whose weight was truncated."""
    counted: Tensor
    """bool. The mask before the correction."""
    log_ratios: Tensor
    """Log ratios of tokens: 0 outside of `counted`, -inf for a token with a log probability that is not finite."""


def log_ratios(logprobs: Tensor, behavior: Tensor, mask: Tensor, level: Level = "token") -> Tensor:
    """Log of the ratio of two policies, trainer to behavior, with the gradient of `logprobs`.

    logprobs, behavior: log probabilities of the sampled tokens, [num_samples, num_tokens], any float dtype.
    mask: the same shape, 1 or True where a token counts. A sequence without any has log ratio 0.
    Returns: [num_samples, num_tokens]. Each token of a sequence has the value of its sequence at the level "sequence"
    or "geometric". A log probability that is not finite makes its token's ratio 0, and at these levels its sequence's.

    Raises: ValueError for other shapes or levels. Source of "geometric": GSPO (arXiv 2507.18071), Eq. 7.
    """
    if level not in get_args(Level):
        raise ValueError(f"level must be one of {', '.join(get_args(Level))}, got {level!r}")
    if logprobs.ndim != 2 or not logprobs.shape == behavior.shape == mask.shape:
        raise ValueError(
            "logprobs, behavior and mask must all be [num_samples, num_tokens], got"
            f" {list(logprobs.shape)}, {list(behavior.shape)} and {list(mask.shape)}. Pad the samples to one length."
        )
    found = widened(logprobs) - widened(behavior).detach()
    found = torch.where(found.isfinite(), found, -math.inf).masked_fill(~mask.bool(), 0.0)
    return at_level(found, mask.bool(), level)


def at_level(tokens: Tensor, counted: Tensor, level: Level) -> Tensor:
    if level == "token":
        return tokens
    total = tokens.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / counted.sum(-1, keepdim=True).clamp(min=1)
    return total.expand_as(tokens)


def widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


@torch.no_grad()
def importance_weights(
    logprobs: Tensor, behavior: Tensor, mask: Tensor, correction: Correction | None = None
) -> ImportanceWeights:
    """Weights trainer/behavior of sampled tokens, truncated and masked as `correction` says.

    logprobs: the proximal policy's, or the current one's. Arguments are those of `log_ratios`. `correction`: by default
    tokens truncated at 2. Levels of `rollout_rs` are tested independently, over all tokens of `mask`. A token of ratio
    0 by a log probability that is not finite is masked, and so is its sequence at a level of sequences.

    Raises: ValueError for other shapes. Sources: see `Correction`.
    """
    correction = correction or Correction()
    counted = mask.bool()
    tokens = log_ratios(logprobs, behavior, counted)
    chosen = at_level(tokens, counted, correction.rollout_is or "token")
    kept = counted & chosen.isfinite()
    for level, (low, high) in (correction.rollout_rs or {}).items():
        logs = at_level(tokens, counted, level)
        ratios = bounded_exp(logs)
        kept = kept & logs.isfinite() & (ratios >= low) & (ratios <= high)
    if correction.rollout_is is None:
        return ImportanceWeights(kept.to(tokens.dtype), kept, torch.zeros_like(kept), counted, tokens)
    limit = correction.rollout_is_threshold or math.inf
    weights = bounded_exp(chosen)
    clipped = kept & (weights > limit)
    return ImportanceWeights(weights.clamp(max=limit).masked_fill(~kept, 0.0), kept, clipped, counted, tokens)


def bounded_exp(log_values: Tensor) -> Tensor:
    return log_values.clamp(max=MAX_LOG_RATIO).exp()


def decoupled_loss(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    importance: ImportanceWeights,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Loss per token: w * -min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A), with u = current/proximal.

    logprobs: the current policy's, with their graph, [num_samples, num_tokens].
    proximal: the proximal policy's, of that shape.
    advantages: of that shape, or [num_samples, 1].
    importance: weights w, proximal/behavior, of `importance_weights(proximal, behavior, mask)`.
    Returns: [num_samples, num_tokens], float32 or float64. 0 for tokens that are masked or whose log probability is not
    finite, for `StreamTrainer.add` or a mean.

    Raises: ValueError for other shapes. Sources: AReaL (arXiv 2505.24298), decoupled PPO objective in section 5.2,
    after Hilton et al. 2021 (arXiv 2110.00641).
    """
    logs = log_ratios(logprobs, proximal, importance.mask)
    if advantages.shape not in (logs.shape, (len(logs), 1)):
        raise ValueError(
            f"advantages must be {list(logs.shape)} or [{len(logs)}, 1], got {list(advantages.shape)}."
            " Advantages of samples need advantages[:, None]."
        )
    trained = importance.mask & logs.isfinite()
    ratios = bounded_exp(logs)
    advantages = widened(advantages).detach()
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = -importance.weights * torch.minimum(ratios * advantages, clipped * advantages)
    return losses.masked_fill(~trained, 0.0)


def token_staleness(
    weight_versions: Sequence[Mapping[str, Any]],
    num_tokens: int,
    current_version: int,
    step_of: Callable[[str], int] = int,
) -> Tensor:
    """Number of weights updates since each token of a trajectory was sampled: `current_version` minus its version.

    weight_versions: spans `{"version", "start", "end"}` over the output tokens, as `/v1/rollouts` returns them.
    num_tokens: output tokens of the trajectory.
    step_of: the step of a version's name, such as `lambda name: int(name.removeprefix("step-"))`.
    Returns: [num_tokens], int64, on the CPU.

    Raises: ValueError for a version that is no integer, that `step_of` does not know, or that is newer than
    `current_version`. Also for spans that leave tokens out, overlap, or end elsewhere than at `num_tokens`.
    """
    staleness = torch.empty(num_tokens, dtype=torch.long)
    position = 0
    for span in weight_versions:
        start, end = span["start"], span["end"]
        if start != position or not start <= end <= num_tokens:
            raise ValueError(
                f"span {dict(span)} must start at {position} and end at most at num_tokens {num_tokens}: spans join"
                " without gap or overlap. Pass all spans of one trajectory in their order, with its own num_tokens."
            )
        staleness[start:end] = current_version - step_of_version(span["version"], current_version, step_of)
        position = end
    if position != num_tokens:
        raise ValueError(
            f"weight_versions must cover num_tokens {num_tokens} tokens, and end at {position}. Pass all spans of the"
            " trajectory. If the server returned none, its version of vLLM does not name weights."
        )
    return staleness


def step_of_version(version: str, current_version: int, step_of: Callable[[str], int]) -> int:
    try:
        step = step_of(version)
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(
            f"version {version!r} must be an integer: staleness counts updates. Name weights by the number of the"
            ' step, give_weights(folder, "17"), or pass step_of, which turns names such as "default" into steps.'
        ) from error
    if step > current_version:
        raise ValueError(
            f"version {version!r} must be at most current_version {current_version}: its weights are newer than the"
            " trainer's. Pass the number of the last update that the trainer made, and name weights by that number."
        )
    return step


def kept_tokens(logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Tokens that top-k and then top-p keep, by the trainer's own logits. Ties at the k-th logit are all kept.

    logits: [..., vocabulary], any float dtype. top_k below 1 keeps all, as in vLLM.
    Returns: [..., vocabulary], bool. At least one token is kept, if logits over the temperature are finite.

    Raises: ValueError for a temperature that is not above 0, or top_p outside of (0, 1]. Sources: top-k: Fan et al.
    2018. Top-p: Holtzman et al. 2020. Order and ties are as in vLLM's sampler in PyTorch.
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    scaled, order = scaled_by(logits.detach(), temperature).sort(dim=-1)
    if 0 < top_k < scaled.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled[..., -top_k, None], -math.inf)
    kept = scaled > -math.inf
    if top_p < 1:
        least_likely = scaled.softmax(-1).cumsum(-1) <= 1 - torch.tensor(top_p, dtype=torch.float32)
        least_likely[..., -1] = False
        kept &= ~least_likely
    return torch.zeros_like(kept).scatter(-1, order, kept)


def recorded_tokens(token_ids: Sequence[Sequence[int]], vocabulary_size: int) -> Tensor:
    """Tokens that the engine kept, from lists of ids: one list per output token, as in vLLM's `SamplingMask`.

    Returns: [num_tokens, vocabulary_size], bool, on the CPU. Raises: IndexError for an id outside of the vocabulary.
    """
    kept = torch.zeros(len(token_ids), vocabulary_size, dtype=torch.bool)
    for row, ids in enumerate(token_ids):
        if min(ids, default=0) < 0:
            raise IndexError(f"token_ids[{row}] must be from 0 to {vocabulary_size - 1}, got {min(ids)}")
        kept[row, torch.tensor(ids, dtype=torch.long)] = True
    return kept


def truncated_logprobs(logits: Tensor, token_ids: Tensor, kept: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log probabilities of the sampled tokens, normalized over the kept tokens, with the gradient of `logits`.

    They compare with `logprobs` of a server with `--logprobs-mode processed_logprobs`. vLLM's default, `raw_logprobs`,
    has neither truncation nor temperature: compare it with a plain log softmax.

    logits: [..., vocabulary], any float dtype. token_ids: [...], int64.
    kept: [..., vocabulary], bool, of `kept_tokens` or `recorded_tokens`.
    Returns: [...], float32 or float64. A token that is not kept has -inf: `importance_weights` masks it, and
    `diagnostics` counts it in `outside_share`.

    Raises: ValueError for a temperature that is not above 0, or other shapes.
    """
    if logits.shape != kept.shape or logits.shape[:-1] != token_ids.shape:
        raise ValueError(
            "logits and kept must be [..., vocabulary], and token_ids [...], got"
            f" {list(logits.shape)}, {list(kept.shape)} and {list(token_ids.shape)}"
        )
    scaled = scaled_by(logits, temperature).masked_fill(~kept, -math.inf)
    sampled = token_ids[..., None]
    found = scaled.log_softmax(-1).gather(-1, sampled)
    return found.masked_fill(~kept.gather(-1, sampled), -math.inf)[..., 0]  # also if no token is kept


def scaled_by(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: greedy answers have none to divide by")
    return widened(logits) / temperature


def effective_sample_size(weights: Tensor) -> float:
    """Number of equally weighted samples with the variance of these: (sum w)^2 / sum w^2. 0 if all weights are 0.

    weights: any shape, at least 0. Source: Kish 1965, "Survey Sampling".
    """
    wide = weights.double()
    squares = (wide * wide).sum().item()
    return wide.sum().item() ** 2 / squares if squares else 0.0


def diagnostics(importance: ImportanceWeights, among: Tensor | None = None) -> dict[str, float]:
    """Numbers of a batch for a logger.

    among: a mask, [num_samples, num_tokens], 1 or True for the tokens to look at. None: all that count.

    Shares divide by `num_tokens`, the tokens that count. `mean_ratio`, `k1` and `k3` are means over those whose log
    probabilities are finite, and `outside_share` is the share of the others. k1 and k3 estimate KL(behavior || trainer)
    in nats. All values are 0 if no token counts. The expected ratio is 1 if the behavior policy sampled the tokens.

    Raises: ValueError for another shape. Sources: `ess`: Kish 1965, over tokens, masked ones with weight 0. k1 and k3:
    Schulman 2020, "Approximating KL divergence".
    """
    counted = importance.counted
    if among is not None:
        check_shape("among", among, importance)
        counted = counted & among.bool()
    inside = counted & importance.log_ratios.isfinite()
    logs = importance.log_ratios[inside].double()
    ratios = bounded_exp(logs)
    num_tokens, num_inside = int(counted.sum()), len(logs)
    ess = effective_sample_size(importance.weights[counted])

    def share(count: float) -> float:
        return count / max(num_tokens, 1)

    def mean(values: Tensor) -> float:
        return values.sum().item() / max(num_inside, 1)

    return {
        "num_tokens": num_tokens,
        "ess": ess,
        "ess_share": share(ess),
        "clipped_share": share(int((importance.clipped & counted).sum())),
        "masked_share": share(int((counted & ~importance.mask).sum())),
        "outside_share": share(num_tokens - num_inside),
        "mean_ratio": mean(ratios),
        "k1": mean(-logs),
        "k3": mean(ratios - 1 - logs),
    }


def diagnostics_by_staleness(importance: ImportanceWeights, staleness: Tensor) -> dict[int, dict[str, float]]:
    """`diagnostics` of the tokens of each staleness, by staleness. Those that count only.

    staleness: [num_samples, num_tokens], int64, on the device of the weights: rows of `token_staleness`, padded.
    Raises: ValueError for another shape.
    """
    check_shape("staleness", staleness, importance)
    found = staleness[importance.counted].unique().tolist()  # type: ignore[no-untyped-call]
    return {each: diagnostics(importance, staleness == each) for each in found}


def check_shape(name: str, values: Tensor, importance: ImportanceWeights) -> None:
    if values.shape != importance.counted.shape:
        raise ValueError(
            f"{name} must be {list(importance.counted.shape)}, as the weights, got {list(values.shape)}."
            " Pad the trajectories' rows to that length."
        )
