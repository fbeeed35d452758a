"""Chooses the implementation of an operator for a device type.

Invariant: the choice is made once per operator and device type, from what is installed and never from the data. It says
why a faster implementation is not active. `VLLM_ROLLOUT_OPS=torch` forces the reference.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, library

from vllm_rollout.build_command import MIN_TORCH, build_command
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.observing.tracker import arguments, reference

OPS_VARIABLE = "VLLM_ROLLOUT_OPS"
OPS_CHOICES = ("auto", "torch")

Compute = Callable[..., Tensor]


class Operator(NamedTuple):
    """An operator, which its own module specifies."""

    reference: Compute
    """In torch, for any device."""
    check: Callable[..., None]
    """Raises ValueError for arguments that the operator refuses."""
    triton: str | None = None
    """Module of kernels/triton that has it for CUDA tensors."""
    fake: Compute | None = None
    """Shape and dtype of its result, for torch.compile, if csrc has it for CPU tensors."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation that serves an operator on a device type."""

    name: Literal["c++", "triton", "torch"]
    reason: str | None
    """Reason why a faster one is not active. None when this is the fastest there is."""
    compute: Compute = field(repr=False, compare=False)


@functools.cache
def active_implementation(device_type: str, name: str = "token_confidence") -> Implementation:
    """The implementation of an operator for tensors on `device_type`, such as "cpu" or "cuda"."""
    forced = reference_is_forced()
    if (operator := operators().get(name)) is None:
        raise ValueError(f"operator must be one of {', '.join(operators())}, got {name!r}")
    found: Implementation | str | None = None
    if forced is not None:
        found = forced
    elif device_type not in ("cpu", "cuda"):
        found = f"no kernel for device type {device_type!r}"
    elif device_type == "cpu" and operator.fake is not None:
        found = _cpp(name, operator.check, operator.fake)
    elif device_type == "cuda" and operator.triton is not None:
        found = _triton(name, operator.check, operator.triton)
    return found if isinstance(found, Implementation) else Implementation("torch", found, operator.reference)


def reference_is_forced() -> str | None:
    """The setting that forces the reference. None when the fastest implementation may serve."""
    choice = os.environ.get(OPS_VARIABLE, "auto")
    if choice not in OPS_CHOICES:
        raise ValueError(f"{OPS_VARIABLE} must be one of {', '.join(OPS_CHOICES)}, got {choice!r}")
    return f"{OPS_VARIABLE}=torch" if choice == "torch" else None


def extension_fault() -> str | None:
    """Reason why nothing of csrc can serve. None when its library is loaded."""
    try:
        from vllm_rollout import _C  # noqa: F401  (importing it registers the operators)
    except ModuleNotFoundError:
        return f"vllm_rollout._C is not built: run `{build_command()}`"
    except ImportError as error:
        remedy = f"run `{build_command()}` to rebuild it"
        if torch.__version__ < MIN_TORCH:  # type: ignore[operator]
            remedy = f"it needs torch {'.'.join(map(str, MIN_TORCH))} or later, found {torch.__version__}"
        return f"vllm_rollout._C does not load ({error}): {remedy}"
    return None


def _cpp(operator: str, check: Callable[..., None], fake: Compute) -> Implementation | str:
    """The operator in C++, or why it is not active."""
    fault = extension_fault()
    if fault is not None:
        return fault
    if not hasattr(torch.ops.vllm_rollout, operator):
        return f"vllm_rollout._C was built before it had {operator}: run `{build_command()}` to rebuild it"
    kernel = getattr(torch.ops.vllm_rollout, operator).default
    arguments_built = [argument.name for argument in kernel._schema.arguments]
    if arguments_built != list(inspect.signature(fake).parameters):
        return f"vllm_rollout._C has another {operator} than this version: run `{build_command()}` to rebuild it"
    library.register_fake(f"vllm_rollout::{operator}")(fake)

    def compute(*tensors: Tensor | int) -> Tensor:
        try:
            return kernel(*tensors)
        except RuntimeError:
            # The operator made the same checks. Here they raise the same ValueError as the other implementations, at
            # no cost to a call that succeeds.
            check(*tensors)
            raise

    return Implementation("c++", None, compute)


def _triton(operator: str, check: Callable[..., None], name: str) -> Implementation | str:
    """The operator in Triton, or why it is not active."""
    try:
        module = importlib.import_module(f"vllm_rollout.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return "triton is not installed: pip install triton"
        return f"vllm_rollout.kernels is not installed: run `{build_command()}`"

    kernel = getattr(module, f"{operator}_triton")

    def compute(*tensors: Tensor | int) -> Tensor:
        check(*tensors)
        return kernel(*tensors)

    return Implementation("triton", None, compute)


def _token_confidence_fake(logits: Tensor, rows: Tensor) -> Tensor:
    return logits.new_empty(rows.shape[0], dtype=torch.float32)


def _update_confidence_fake(
    slots: Tensor, positions: Tensor, values: Tensor, means: Tensor, m2s: Tensor, trace: Tensor
) -> Tensor:
    return values.new_empty(slots.shape[0], 2)


OPERATORS = {
    "token_confidence": Operator(
        reference.token_confidence_reference,
        arguments.check_token_confidence,
        "token_confidence",
        _token_confidence_fake,
    ),
    "update_confidence": Operator(
        reference.update_confidence_reference, arguments.check_update_confidence, "confidence", _update_confidence_fake
    ),
}


@functools.cache
def operators() -> Mapping[str, Operator]:
    """The operators of the tracker, then those of parts, by name."""
    return OPERATORS | {name: operator for _, its in faces("operators") for name, operator in its.items()}
