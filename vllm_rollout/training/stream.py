"""Gradients group by group while the rest of a rollout still runs (RollPacker 4.4).

`StreamTrainer` runs the backward pass of each group when it comes, without talking to other processes, and updates
nothing before the last. Source: RollPacker 4.4 and Algorithm 1. The interface is that of NeMo-RL#2700.

Invariant: after `finish` the gradient is that of one backward pass over the whole batch. A step's
number N of samples or tokens is not known before its end. So each group adds the gradient of its *sum*, and `finish`
divides by N. This is exact because a gradient is linear in the loss and N does not depend on the weights. In a formula,
grad(sum of l_i / N) = (sum of grad l_i) / N. Only the roundings of a sum taken in another order are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

Normalization = Literal["token", "sample", "group"]
"""Units of equal weight: tokens of the step, samples (mean over their tokens), or groups (mean over their tokens)."""

BUCKET_ELEMENTS = 2**26
"""Gradients travel between processes in pieces of about so many numbers, which exist twice meanwhile."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Totals of a step over all processes."""

    step: int
    parts: int
    """Number of calls of `add` and `add_sum`."""
    weight: float
    """N, by which the sum was divided: tokens, samples, groups, or what `add_sum` and `count` were told."""
    loss: float
    """The loss of the whole batch. It is nan if N is 0."""
    gradient_norm: float
    """The norm before clipping. It is nan if there is no gradient."""
    updated: bool
    """The optimizer made its step. False without an optimizer, and where no process had a gradient."""


@dataclass(slots=True)
class OpenStep:
    step: int
    totals: Tensor  # [2], float64: the sum of the losses, and N
    parts: int = 0
    failed: bool = False
    """A backward pass or `finish` ended by an error, and may have changed a part of the gradients."""
    sums: dict[Parameter, Tensor] = field(default_factory=dict)
    """Float32 sums for parameters of lower precision. The others' sums are their `.grad`."""


class StreamTrainer:
    """One optimizer step from groups that come one by one.

        trainer = StreamTrainer(model.parameters(), optimizer, normalize="token", max_norm=1.0)
        trainer.begin(step)
        for group in groups:                            # each when it ends, in any order
            trainer.add(token_losses(model, group), group.mask)
        result = trainer.finish()

    parameters: those that learn. Gradients are in their `.grad`, unscaled until `finish`.
    optimizer: None leaves the update to the caller, who finds the finished gradients in `.grad`.
    max_norm: the gradient is clipped to it. None clips nothing.
    float32_sums: gradients of parameters in bfloat16 or float16 are summed in float32 and rounded once at the end. That
    costs four bytes per such parameter, less its own gradient, which is freed after each group.
    process_group: the data-parallel processes, by default all of `torch.distributed` if it is initialized. Each holds
    whole parameters and has any number of groups, also none.

    Raises: ValueError for no parameters, sharded ones, or a normalization that there is not.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        normalize: Normalization = "token",
        max_norm: float | None = None,
        float32_sums: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("parameters has none that requires a gradient. Pass model.parameters().")
        if any(isinstance(parameter, DTensor) for parameter in self.parameters):
            raise ValueError(
                "parameters are sharded (DTensor): their backward pass waits for the other processes. StreamTrainer"
                " takes whole parameters, one copy per process."
            )
        if normalize not in get_args(Normalization):
            raise ValueError(f"normalize must be one of {', '.join(get_args(Normalization))}, got {normalize!r}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, or None to clip nothing, got {max_norm}")
        self.optimizer = optimizer
        self.normalize = normalize
        self.max_norm = max_norm
        self.float32_sums = float32_sums
        self.process_group = process_group
        self._open: OpenStep | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, step: int) -> None:
        """Open a step, and drop the gradients of earlier ones. Raises: RuntimeError when a step is open."""
        if self._open is not None:
            raise RuntimeError(
                f"step {step} cannot begin: step {self._open.step} is open with {self._open.parts} parts."
                " Call finish(), or abandon() to drop its gradients."
            )
        self._drop_gradients()
        opened = OpenStep(step, torch.zeros(2, dtype=torch.float64, device=self.parameters[0].device))
        for parameter in self.parameters:
            if self.float32_sums and parameter.dtype in (torch.bfloat16, torch.float16):
                hook = parameter.register_post_accumulate_grad_hook(self._move_to_float32)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self._open = opened

    def add(self, token_losses: Tensor, mask: Tensor, group_tokens: int | None = None) -> None:
        """Run the backward pass of one group, at once.

        token_losses: [num_samples, num_tokens], with their graph, which is freed.
        mask: the same shape, 1 or True where a token counts. A sample without any counts as a sample of loss 0.
        group_tokens: if a group comes in several parts (micro-batches), the number of tokens of the whole group that
        count. Only `normalize="group"` reads it.

        Raises: ValueError for other shapes, or a group of no tokens. RuntimeError without an open step, or after a
        backward pass that failed.
        """
        if token_losses.ndim != 2 or token_losses.shape != mask.shape:
            raise ValueError(
                "token_losses and mask must both be [num_samples, num_tokens],"
                f" got {list(token_losses.shape)} and {list(mask.shape)}"
            )
        if self.normalize == "group" and group_tokens is not None and group_tokens < 1:
            raise ValueError(
                f"group_tokens must be at least 1, got {group_tokens}. A group in which no token counts needs no parts:"
                " count(1), once."
            )
        counted = mask.bool()
        losses = token_losses.masked_fill(~counted, 0.0)
        tokens = counted.sum(-1)  # [num_samples]
        match self.normalize:
            case "token":
                self.add_sum(losses.sum(), tokens.sum())
            case "sample":
                self.add_sum((losses.sum(-1) / tokens.clamp(min=1)).sum(), len(tokens))
            case "group" if group_tokens is None:
                self.add_sum(losses.sum() / tokens.sum().clamp(min=1), 1)
            case "group":
                self.add_sum(losses.sum() / group_tokens, tokens.sum().double() / group_tokens)

    def add_sum(self, loss_sum: Tensor, weight: Tensor | float) -> None:
        """Add a loss that is a sum. `weight`: its share of the N by which the whole step is divided at its end.

        A constant divisor per sample, as in Dr. GRPO, is `add_sum(losses.sum(), num_samples * max_tokens)`.
        Raises: ValueError for a loss that is no scalar with a graph. RuntimeError as `add`.
        """
        step = self._opened("add a part")
        if loss_sum.numel() != 1 or not loss_sum.requires_grad:
            raise ValueError(
                f"the loss must be one number with a graph, got shape {list(loss_sum.shape)} and requires_grad"
                f" {loss_sum.requires_grad}. Was it computed under no_grad, or with another model's parameters?"
            )
        if step.failed:
            raise RuntimeError(failure_of(step.step))
        step.failed = True
        loss_sum.backward()  # type: ignore[no-untyped-call]
        step.totals[0] += loss_sum.detach().reshape(())
        step.totals[1] += weight
        step.parts += 1
        step.failed = False

    def count(self, weight: float) -> None:
        """Count samples without a gradient, as those of advantage 0, in N. They need no pass.

        weight: number of tokens, samples or groups, as `normalize` says. Raises: RuntimeError without an open step.
        """
        self._opened("count").totals[1] += weight

    def abandon(self) -> None:
        """Drop the gradients of the open step, if one is open: of an attempt that failed and will be run again.

        No process waits for another: each abandons for itself, and all of them must.
        """
        self._open = None
        self._drop_gradients()

    def finish(self) -> StepResult:
        """Divide by N, clip, update. Only here do processes wait for each other: each must call it.

        Raises: RuntimeError in every process if in one of them a backward pass failed or another step is open.
        FloatingPointError if the gradient is not finite. Nothing is updated then, and the step stays open for
        `abandon`.
        """
        step = self._opened("finish")
        # After an error below only abandon() helps: a second call would sum or divide some gradients twice.
        failed, step.failed = step.failed, True
        parts, loss_sum, weight = self._combine(step, failed)
        sums = {parameter: step.sums.get(parameter, parameter.grad) for parameter in self.parameters}
        gradients = {parameter: each.div_(weight) for parameter, each in sums.items() if each is not None and weight}
        if not gradients:
            self.abandon()
            loss = loss_sum / weight if weight else math.nan
            return StepResult(step.step, parts, weight, loss, math.nan, updated=False)
        norm = get_total_norm(gradients.values())
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of step {step.step} is {norm.item()} over {parts} parts of loss"
                f" {loss_sum / weight}; nothing was updated. Look for a log probability of -inf or an overflow, then"
                " abandon() and begin() again."
            )
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.to(parameter.dtype)
        if self.max_norm is not None:
            clip_grads_with_norm_(self.parameters, self.max_norm, norm)
        self._open = None
        self._remove_hooks()
        if self.optimizer is not None:
            self.optimizer.step()
            self._drop_gradients()
        return StepResult(step.step, parts, weight, loss_sum / weight, norm.item(), updated=self.optimizer is not None)

    def _opened(self, wish: str) -> OpenStep:
        if self._open is None:
            raise RuntimeError(f"cannot {wish}: no step is open. Call begin(step) first.")
        return self._open

    def _combine(self, step: OpenStep, failed: bool) -> tuple[int, float, float]:
        """Sum gradients over all processes. Returns: parts, sum of losses and N, of all of them."""
        if not dist.is_initialized():
            if failed:
                raise RuntimeError(failure_of(step.step))
            loss_sum, weight = step.totals.tolist()
            return step.parts, loss_sum, weight
        mine = [step.sums.get(parameter, parameter.grad) for parameter in self.parameters]
        heads = self._gathered([step.step, failed, step.parts], step.totals, [each is not None for each in mine])
        if (heads[:, 0] != step.step).any():
            raise RuntimeError(
                f"steps {heads[:, 0].int().tolist()} are open in processes 0, 1, …: all of them must finish the same"
                " one. abandon() in each of them, then begin() again."
            )
        if heads[:, 1].any():
            raise RuntimeError(failure_of(step.step))
        parts, loss_sum, weight = heads[:, 2:5].sum(0).tolist()
        # A process without a gradient that another process has adds zeros. A gradient that no process has stays None.
        wanted = [
            self._own_or_zeros(step, parameter)
            for parameter, somebody in zip(self.parameters, heads[:, 5:].any(0).tolist(), strict=True)
            if somebody
        ]
        for bucket in buckets(wanted):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self.process_group)
            for gradient, piece in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))
        return int(parts), loss_sum, weight

    def _gathered(self, numbers: list[int], totals: Tensor, flags: list[bool]) -> Tensor:
        """[num_processes, len(numbers) + len(totals) + len(flags)], float64."""
        head = torch.cat([totals.new_tensor(numbers), totals, totals.new_tensor(flags)])
        rows = [torch.empty_like(head) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(rows, head, group=self.process_group)
        return torch.stack(rows)

    def _own_or_zeros(self, step: OpenStep, parameter: Parameter) -> Tensor:
        if parameter in step.sums:
            return step.sums[parameter]
        if self.float32_sums and parameter.dtype in (torch.bfloat16, torch.float16):
            return step.sums.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _move_to_float32(self, parameter: Tensor) -> None:
        """A hook of each parameter's accumulation: its gradient of one backward pass goes to the sum, and is freed."""
        assert isinstance(parameter, Parameter)
        assert self._open is not None
        assert parameter.grad is not None
        if parameter in self._open.sums:
            self._open.sums[parameter] += parameter.grad
        else:
            self._open.sums[parameter] = parameter.grad.float()
        parameter.grad = None

    def _drop_gradients(self) -> None:
        self._remove_hooks()
        for parameter in self.parameters:
            parameter.grad = None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def failure_of(step: int) -> str:
    return (
        f"a backward pass or finish() of step {step} ended by an error and may have changed a part of the gradients:"
        " nothing was updated. abandon() in each process, then begin() again."
    )


def buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    """Neighbours of one precision, up to `BUCKET_ELEMENTS` together."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(each.numel() for each in bucket) + gradient.numel() > BUCKET_ELEMENTS
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
