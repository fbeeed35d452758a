"""Operators on logits: the torch reference, which is the specification, and the dispatch.

An operator has one name and up to three implementations: C++ for CPU tensors (csrc/), Triton for CUDA tensors
(kernels/triton/) and torch for everything else. Which one is active is decided once per device type, with the
reason when a faster one is not; `VLLM_ROLLOUT_OPS=torch` forces the reference.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OPS_VARIABLE = "VLLM_ROLLOUT_OPS"
OPS_CHOICES = ("auto", "torch")

NO_TOKEN = -1
"""Entry of `sampled` for a row that has no token in this step."""


class TokenStats(NamedTuple):
    """Per row of logits, float32 [num_rows] each."""

    logprob: Tensor
    """Natural logarithm of the sampled token's probability; NaN for a row without a token."""
    entropy: Tensor
    """Entropy of the distribution over the vocabulary, in nats."""
    confidence: Tensor
    """Mean over the vocabulary of -log(probability), in nats; larger for a more peaked distribution."""


def token_stats(logits: Tensor, sampled: Tensor) -> TokenStats:
    """Log-probability of the sampled token, entropy and token confidence of every row, in one pass.

    logits: float32, bfloat16 or float16 [num_rows, vocab_size], stride(1) == 1; -inf marks a masked token.
    sampled: int64 [num_rows] on the same device, a token id or -1 for a row without a token.

    With z the entries of a row that are not -inf, V' their number and lse = log(sum(exp(z))):
    logprob = z[sampled] - lse, entropy = lse - sum(p * z), confidence = lse - mean(z), computed in float32 or better.
    The logprob of a masked token is -inf. A row with no entry left, with a NaN or with +inf gives NaN three times.

    Raises ValueError for a wrong dtype, shape, stride or device and, on the CPU, for a token id outside the
    vocabulary; on CUDA, where looking would make the host wait, such a row's logprob is NaN.

    Source: confidence is H_t of ARRoL section 3 (self-uncertainty, Kang et al. 2025) divided by V', so that it does
    not depend on the size of the vocabulary.
    """
    return active_implementation(logits.device.type).compute(logits, sampled)


def token_stats_reference(logits: Tensor, sampled: Tensor) -> TokenStats:
    """The specification of `token_stats`, in torch and on any device; it writes several [num_rows, vocab_size]."""
    check_arguments(logits, sampled)
    check_token_ids(sampled, vocab_size=logits.shape[1])
    z = logits.float()
    # Not z - logsumexp(z), which loses the digits of a distribution around logits of 1e4. A row with nothing left,
    # a NaN or +inf is NaN throughout from here on.
    logprobs = z.log_softmax(dim=1)
    unmasked = z != -torch.inf
    surprisal = torch.where(unmasked, -logprobs, 0.0)
    logprob = logprobs.gather(1, sampled.clamp(min=0)[:, None])[:, 0]
    return TokenStats(
        logprob=logprob.masked_fill(sampled == NO_TOKEN, torch.nan),
        entropy=(logprobs.exp() * surprisal).sum(dim=1),
        confidence=surprisal.sum(dim=1) / unmasked.sum(dim=1),
    )


def check_arguments(logits: Tensor, sampled: Tensor) -> None:
    """Raise ValueError unless dtypes, shapes, strides and devices are those of `token_stats`; reads no data."""
    if logits.dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}")
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits must be [num_rows, vocab_size] with vocab_size >= 1, got {list(logits.shape)}")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits must have stride(1) == 1, got {logits.stride(1)}: call .contiguous() on them")
    if sampled.dtype != torch.int64:
        raise ValueError(f"sampled must be int64, got {sampled.dtype}")
    if sampled.shape != logits.shape[:1]:
        raise ValueError(f"sampled must be [num_rows] = [{logits.shape[0]}], got {list(sampled.shape)}")
    if sampled.device != logits.device:
        raise ValueError(f"sampled must be on the device of logits, {logits.device}, got {sampled.device}")


def check_token_ids(sampled: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless every entry is -1 or a token id. Looks at CPU tensors only."""
    if sampled.device.type != "cpu":
        return
    wrong = ((sampled < NO_TOKEN) | (sampled >= vocab_size)).nonzero()
    if len(wrong):
        row = wrong[0].item()
        raise ValueError(f"sampled[{row}] must be -1 or in [0, {vocab_size}), got {sampled[row].item()}")


@dataclass(frozen=True, slots=True)
class Implementation:
    """Which implementation serves a device type."""

    name: Literal["c++", "triton", "torch"]
    reason: str | None
    """Why a faster one is not active; None when this is the fastest there is."""
    compute: Callable[[Tensor, Tensor], TokenStats] = field(repr=False, compare=False)


@functools.cache
def active_implementation(device_type: str) -> Implementation:
    """The implementation of `token_stats` for tensors on `device_type`, such as "cpu" or "cuda"."""
    choice = os.environ.get(OPS_VARIABLE, "auto")
    if choice not in OPS_CHOICES:
        raise ValueError(f"{OPS_VARIABLE} must be one of {', '.join(OPS_CHOICES)}, got {choice!r}")
    if choice == "torch":
        return Implementation("torch", f"{OPS_VARIABLE}=torch", token_stats_reference)
    if device_type == "cpu":
        return _cpp_or_reference()
    if device_type == "cuda":
        return _triton_or_reference()
    return Implementation("torch", f"no kernel for device type {device_type!r}", token_stats_reference)


def _cpp_or_reference() -> Implementation:
    try:
        from vllm_rollout import _C  # noqa: F401  (importing it registers the operators)
    except ModuleNotFoundError:
        return Implementation("torch", "vllm_rollout._C is not built: run `make install`", token_stats_reference)
    except ImportError as error:
        reason = f"vllm_rollout._C does not load ({error}): run `make install` to rebuild it"
        return Implementation("torch", reason, token_stats_reference)

    operator = torch.ops.vllm_rollout.token_stats.default
    torch.library.register_fake("vllm_rollout::token_stats")(_token_stats_fake)

    def compute(logits: Tensor, sampled: Tensor) -> TokenStats:
        try:
            return TokenStats(*operator(logits, sampled))
        except RuntimeError:
            # The operator made the same checks; repeating them here, only now, raises the same ValueError as the
            # other implementations at no cost to a call that succeeds.
            check_arguments(logits, sampled)
            check_token_ids(sampled, vocab_size=logits.shape[1])
            raise

    return Implementation("c++", None, compute)


def _triton_or_reference() -> Implementation:
    try:
        from vllm_rollout.kernels.token_stats import token_stats_triton
    except ModuleNotFoundError as error:
        name = "triton" if error.name == "triton" else "vllm_rollout.kernels"
        how = "pip install triton" if error.name == "triton" else "run `make install`"
        return Implementation("torch", f"{name} is not installed: {how}", token_stats_reference)

    def compute(logits: Tensor, sampled: Tensor) -> TokenStats:
        check_arguments(logits, sampled)
        return TokenStats(*token_stats_triton(logits, sampled))

    return Implementation("triton", None, compute)


def _token_stats_fake(logits: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the operator's results, for torch.compile."""
    logprob, entropy, confidence = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
    return logprob, entropy, confidence
