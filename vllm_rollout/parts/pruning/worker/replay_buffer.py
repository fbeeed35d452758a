"""The replay buffer of a quality head: the newest labelled hidden states, their mean and their scale.

Invariant: memory is bounded, and all numbers are finite.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from vllm_rollout.checks import MAX_COUNT
from vllm_rollout.parts.pruning.rules.success import MAX_LABEL_WEIGHT
from vllm_rollout.parts.pruning.worker.quality_head_file import HeadFile

MAX_MAGNITUDE = 1e5
"""Largest accepted feature: hidden states after a model's last norm stay far below."""

MAX_STANDARDISED = 10.0
"""Standard deviations at which a feature is cut off in training, so that one outlier cannot undo what was learned."""

MIN_RELATIVE_STD = 0.01
"""Smallest scale of a feature, as a share of the mean one: a feature that never moved must not get a huge weight."""


COPY_BYTES = 2**21
"""States that are copied at a time, in bytes."""

MIN_SCALE = 1e-9
"""Smallest scale at all: a feature divided by it, and a weight too, stay finite."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The types that hidden states may have."""


def check_labels(features: Tensor, labels: Tensor, weights: Tensor, hidden_size: int) -> None:
    """Raise ValueError unless these are labelled hidden states that can be learned from."""
    if not features.is_floating_point() or features.dim() != 2 or features.shape[1] != hidden_size:
        wanted = f"floating-point [num_labels, hidden_size] with hidden_size = {hidden_size}"
        raise ValueError(f"features must be {wanted}, got {features.dtype} {list(features.shape)}")
    for name, value in (("labels", labels), ("weights", weights)):
        if value.shape != features.shape[:1]:
            raise ValueError(f"{name} must be [num_labels] = [{len(features)}], got {list(value.shape)}")
    if (wrong := ((labels != 0) & (labels != 1)).nonzero()).numel():
        raise ValueError(f"labels[{wrong[0].item()}] must be 0 or 1, got {labels[wrong[0]].item()}")
    if (wrong := (~(torch.isfinite(weights) & (weights >= 0))).nonzero()).numel():
        raise ValueError(f"weights[{wrong[0].item()}] must be finite and >= 0, got {weights[wrong[0]].item()}")
    if not len(features) or is_usable(features).all():
        return
    if (wrong := (~(features.float().abs() <= MAX_MAGNITUDE)).nonzero()).numel():
        row, column = wrong[0].tolist()
        limit = f"finite and at most {MAX_MAGNITUDE:g} in magnitude"
        raise ValueError(f"features[{row}, {column}] must be {limit}, got {features[row, column].item()}")


def is_usable(features: Tensor) -> Tensor:
    """True for each state, [num_states, hidden_size], that is finite and not too large."""
    return features.abs().amax(dim=1) <= MAX_MAGNITUDE  # NaN if any is


class ReplayBuffer:
    """The newest labelled states, in the dtype the first of them came in."""

    def __init__(self, hidden_size: int, capacity: int) -> None:
        self.hidden_size = hidden_size
        self.capacity = capacity
        self.num_added = 0
        self.features = torch.empty(0, hidden_size)
        self.labels = torch.empty(0)
        self.weights = torch.empty(0)

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def add(self, features: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Remember them in place of the oldest."""
        if not self.num_added:
            # Pages are committed when they are written.
            self.features = torch.empty(self.capacity, self.hidden_size, dtype=features.dtype)
            self.labels = torch.empty(self.capacity)
            self.weights = torch.empty(self.capacity)
        self.num_added += max(0, len(labels) - self.capacity)
        parts = (part[-self.capacity :] for part in (features, labels, weights))
        for memory, new in zip((self.features, self.labels, self.weights), parts, strict=True):
            first = self.num_added % self.capacity
            end = min(self.capacity, first + len(new))
            memory[first:end] = new[: end - first]
            memory[: len(new) - (end - first)] = new[end - first :]
        self.num_added += min(len(labels), self.capacity)

    def draw(self, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """float32 features, labels and weights of `num` of them, with replacement; the mean weight of all is 1."""
        rows = torch.randint(len(self), (num,), generator=generator)
        mean_weight = self.weights[: len(self)].mean().clamp_min(torch.finfo(torch.float32).tiny)
        return self.features[rows].float(), self.labels[rows], self.weights[rows] / mean_weight

    def copied(self, max_bytes: int) -> Generator[None, None, dict[str, Tensor]]:
        """Everything, or the newest states that fit into `max_bytes`, at least one.

        Copies `COPY_BYTES` of them at a time. Labels may be added in between: each state stays with its own label.
        """
        row_bytes = self.hidden_size * self.features.element_size()
        num = min(len(self), max(1, max_bytes // row_bytes))
        whole = num == len(self)
        slots = torch.arange(num) if whole else torch.arange(self.num_added - num, self.num_added) % self.capacity
        num_added = min(self.num_added, MAX_COUNT) if whole else num
        copies = self.features.new_empty(num, self.hidden_size), torch.empty(num), torch.empty(num)
        step = max(1, COPY_BYTES // row_bytes)
        for start in range(0, num, step):
            for copy, memory in zip(copies, (self.features, self.labels, self.weights), strict=True):
                copy[start : start + step] = memory[slots[start : start + step]]
            yield
        features, labels, weights = copies
        return {
            "replay.features": features,
            "replay.labels": labels,
            "replay.weights": weights,
            "replay.num_added": torch.tensor(num_added),
        }

    def restore(self, file: HeadFile) -> None:
        """Load from a saved head. Raises: ValueError."""
        num_added = file.count("replay.num_added")
        num = min(num_added, self.capacity)
        dtype = file.dtype("replay.features", *DTYPES)
        most = MAX_MAGNITUDE
        features = file.tensor("replay.features", num, self.hidden_size, dtype=dtype, least=-most, most=most)
        labels = file.tensor("replay.labels", num, least=0.0, most=1.0)
        weights = file.tensor("replay.weights", num, least=0.0, most=MAX_LABEL_WEIGHT)
        check_labels(features, labels, weights, self.hidden_size)
        if num:
            self.num_added = 0
            self.add(features, labels, weights)
        self.num_added = num_added


class Standardiser:
    """Running mean and standard deviation of features, float64; after `memory` states the older ones fade."""

    def __init__(self, hidden_size: int, memory: int) -> None:
        self.memory = memory
        self.count = 0
        self.mean = torch.zeros(hidden_size, dtype=torch.float64)
        self.variance = torch.zeros(hidden_size, dtype=torch.float64)

    def update(self, features: Tensor) -> None:
        """Add states, [num_states, hidden_size], to the running mean and scale."""
        features = features.float()
        mean = features.mean(0)
        variance = (features - mean).square_().mean(0)  # ten times as quick as torch.var over rows
        share = len(features) / (self.count + len(features))
        difference = mean.double() - self.mean
        spread = variance.double() - self.variance
        self.variance = (self.variance + share * spread + share * (1 - share) * difference.square()).clamp_min_(0)
        self.mean = self.mean + share * difference
        self.count = min(self.count + len(features), self.memory)

    def scale(self) -> Tensor:
        """Divisor of each feature, [hidden_size]."""
        std = self.variance.sqrt()
        floor = MIN_RELATIVE_STD * std.mean()
        return std.clamp_min(max(floor.item(), MIN_SCALE)) if floor > 0 else torch.ones_like(std)

    def tensors(self) -> dict[str, Tensor]:
        return {"running.mean": self.mean, "running.variance": self.variance, "running.count": torch.tensor(self.count)}

    def restore(self, file: HeadFile) -> None:
        """Load from a saved head. Raises: ValueError."""
        most = 1.01 * MAX_MAGNITUDE  # rounding
        self.mean = file.tensor("running.mean", len(self.mean), dtype=torch.float64, least=-most, most=most)
        self.variance = file.tensor("running.variance", len(self.mean), dtype=torch.float64, least=0.0, most=most**2)
        self.count = file.count("running.count", self.memory)
