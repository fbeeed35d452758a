"""Chooses the implementation of an operator for a device type.

Invariant: the choice is made once per operator and device type, from what is installed and never from the data. It says
why a faster implementation is not active. `VLLM_ROLLOUT_OPS=torch` forces the reference.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, library

from vllm_rollout.kernel.tracker import arguments, reference
from vllm_rollout.kernel.tracker.build_command import MIN_TORCH, build_command

OPS_VARIABLE = "VLLM_ROLLOUT_OPS"
OPS_CHOICES = ("auto", "torch")

Operator = Literal["token_confidence", "quality_head", "update_confidence", "windowed_confidence"]
Compute = Callable[..., Tensor]

OPERATORS: tuple[Operator, ...] = get_args(Operator)

REFERENCES: dict[Operator, Compute] = {name: getattr(reference, f"{name}_reference") for name in OPERATORS}
CHECKS: dict[Operator, Callable[..., None]] = {name: getattr(arguments, f"check_{name}") for name in OPERATORS}

TRITON_MODULES: dict[Operator, str] = {
    "token_confidence": "token_confidence",
    "quality_head": "quality_head",
    "update_confidence": "confidence",
}
"""Operators that kernels/triton has, and the module of each. Trace confidence is computed once per candidate."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation that serves an operator on a device type."""

    name: Literal["c++", "triton", "torch"]
    reason: str | None
    """Reason why a faster one is not active. None when this is the fastest there is."""
    compute: Compute = field(repr=False, compare=False)


@functools.cache
def active_implementation(device_type: str, operator: Operator = "token_confidence") -> Implementation:
    """The implementation of `operator` for tensors on `device_type`, such as "cpu" or "cuda"."""
    forced = reference_is_forced()
    if operator not in OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    found: Implementation | str | None = None
    if forced is not None:
        found = forced
    elif device_type not in ("cpu", "cuda"):
        found = f"no kernel for device type {device_type!r}"
    elif device_type == "cpu" and operator in FAKES:
        found = _cpp(operator)
    elif device_type == "cuda" and operator in TRITON_MODULES:
        found = _triton(operator)
    return found if isinstance(found, Implementation) else Implementation("torch", found, REFERENCES[operator])


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


def _cpp(operator: Operator) -> Implementation | str:
    """The operator in C++, or why it is not active."""
    fault = extension_fault()
    if fault is not None:
        return fault
    if not hasattr(torch.ops.vllm_rollout, operator):
        return f"vllm_rollout._C was built before it had {operator}: run `{build_command()}` to rebuild it"
    kernel = getattr(torch.ops.vllm_rollout, operator).default
    arguments_built = [argument.name for argument in kernel._schema.arguments]
    if arguments_built != list(inspect.signature(FAKES[operator]).parameters):
        return f"vllm_rollout._C has another {operator} than this version: run `{build_command()}` to rebuild it"
    library.register_fake(f"vllm_rollout::{operator}")(FAKES[operator])
    check = CHECKS[operator]

    def compute(*tensors: Tensor | int) -> Tensor:
        try:
            return kernel(*tensors)
        except RuntimeError:
            # The operator made the same checks. Here they raise the same ValueError as the other implementations, at
            # no cost to a call that succeeds.
            check(*tensors)
            raise

    return Implementation("c++", None, compute)


def _triton(operator: Operator) -> Implementation | str:
    """The operator in Triton, or why it is not active."""
    try:
        module = importlib.import_module(f"vllm_rollout.kernels.{TRITON_MODULES[operator]}")
    except ModuleNotFoundError as error:
        name = "triton" if error.name == "triton" else "vllm_rollout.kernels"
        how = "pip install triton" if error.name == "triton" else f"run `{build_command()}`"
        return f"{name} is not installed: {how}"

    kernel = getattr(module, f"{operator}_triton")
    check = CHECKS[operator]

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


FAKES: dict[Operator, Compute] = {
    "token_confidence": _token_confidence_fake,
    "update_confidence": _update_confidence_fake,
}
"""Operators of csrc. In torch their calls would cost more than their work. The head is a matrix product, in which
torch is as fast as the CPU. Each operator gives the shape and dtype of the operator's result, for torch.compile."""
