"""The quality head: how likely a candidate is to succeed, from the hidden state at its detection length.

A two-layer MLP trained on stored states, so that no gradient reaches the backbone. Invariant: `weights` score raw
hidden states, are finite and are replaced whole; training works on standardised states, and standardisation is folded
into what is published.

Source: ARRoL section 4.2.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from vllm_rollout.config import (
    MAX_QUALITY_HEAD_VERSIONS,
    QUALITY_HEAD_BATCH,
    QUALITY_HEAD_DROPOUT,
    QUALITY_HEAD_HIDDEN,
    QUALITY_HEAD_LEARNING_RATE,
    QUALITY_HEAD_MIN_LABELS,
    QUALITY_HEAD_PASSES,
    QUALITY_HEAD_PUBLISH_STEPS,
    QUALITY_HEAD_REPLAY,
    QUALITY_HEAD_STATE_BYTES,
    QUALITY_HEAD_WEIGHT_DECAY,
)
from vllm_rollout.tracker.quality_head_file import HeadFile, HeadMismatch, read_head_file, write_head_file
from vllm_rollout.tracker.replay import MAX_STANDARDISED, Replay, Standardiser, check_labels

__all__ = ["HeadMismatch", "HeadWeights", "QualityHead"]

MAX_PENDING_STEPS = QUALITY_HEAD_REPLAY * QUALITY_HEAD_PASSES // QUALITY_HEAD_BATCH


class HeadWeights(NamedTuple):
    """The logit of a raw hidden state h is relu(h @ w1.T + b1) @ w2 + b2. float32, contiguous, never written to."""

    w1: Tensor
    """[QUALITY_HEAD_HIDDEN, hidden_size]"""
    b1: Tensor
    """[QUALITY_HEAD_HIDDEN]"""
    w2: Tensor
    """[QUALITY_HEAD_HIDDEN]"""
    b2: Tensor
    """[1]"""


COUNTERS = (
    "num_pending_steps",
    "_draws_owed",
    "_num_negative",
    "_num_positive",
    "_num_labels_standardised",
)
"""Attributes of a head that its state holds beside the description."""


def head_shapes(hidden_size: int) -> tuple[tuple[int, ...], ...]:
    return (QUALITY_HEAD_HIDDEN, hidden_size), (QUALITY_HEAD_HIDDEN,), (QUALITY_HEAD_HIDDEN,), (1,)


def read_weights(file: HeadFile, hidden_size: int, prefix: str = "") -> HeadWeights:
    shapes = zip(HeadWeights._fields, head_shapes(hidden_size), strict=True)
    return HeadWeights(*(file.tensor(prefix + name, *shape) for name, shape in shapes))


class QualityHead:
    """Learns success from labelled hidden states, a few optimizer steps at a time; the same calls give the same head.

    Args:
        hidden_size: numbers per hidden state.
        model: name of the model the states come from.
        detection_length: output tokens after which the states were taken.
        seed: of the initial weights, the draws from the replay memory and dropout.
        clock: monotonic seconds, for the budget of `train`.
    """

    def __init__(
        self,
        hidden_size: int,
        model: str,
        detection_length: int,
        seed: int = 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.hidden_size = hidden_size
        self.model = model
        self.detection_length = detection_length
        self.weights: HeadWeights | None = None
        """What scores now; None while untrained."""
        self.version = 0
        """How often `weights` were replaced by training."""
        self.losses: deque[float] = deque(maxlen=MAX_QUALITY_HEAD_VERSIONS)
        """Mean training loss of each version in nats, oldest first."""
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_labels = 0
        """Labels received."""
        self.num_pending_steps = 0
        """Optimizer steps planned for the labels that came."""
        self._clock = clock
        self._draws_owed = 0
        self._num_negative = 0
        self._num_positive = 0
        self._version_losses: list[float] = []
        with torch.inference_mode(False):
            self._generator = torch.Generator().manual_seed(seed)
            self._replay = Replay(hidden_size, QUALITY_HEAD_REPLAY)
            self._standardiser = Standardiser(hidden_size, QUALITY_HEAD_REPLAY)
            # The standardisation that the parameters stand for; it follows the running one in steps.
            self._mean, self._scale = torch.zeros(hidden_size), torch.ones(hidden_size)
            self._num_labels_standardised = 0
            self._set_parameters(self._random_weights())

    def add(self, features: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Remember labelled states and plan optimizer steps for them.

        Args:
            features: hidden states, [num_labels, hidden_size], any floating dtype.
            labels: 1 for success and 0 for failure, [num_labels].
            weights: of each label in the loss, 1 / survival probability, [num_labels].

        Raises: ValueError, and nothing of the call is remembered.
        """
        features, labels, weights = features.detach().cpu(), labels.detach().cpu(), weights.detach().cpu()
        check_labels(features, labels, weights, self.hidden_size)
        if not len(labels):
            return
        with torch.inference_mode(False):
            self._replay.add(features, labels, weights)
            self._standardiser.update(features)
        num_positive = int(labels.sum())
        self._num_positive += num_positive
        self._num_negative += len(labels) - num_positive
        self.num_labels += len(labels)
        self._draws_owed += len(labels) * QUALITY_HEAD_PASSES
        if min(self._num_positive, self._num_negative) >= QUALITY_HEAD_MIN_LABELS:
            steps, self._draws_owed = divmod(self._draws_owed, QUALITY_HEAD_BATCH)
            self.num_pending_steps = min(self.num_pending_steps + steps, MAX_PENDING_STEPS)

    def train(self, budget_s: float) -> float | None:
        """Take planned steps, at least one, until none is left or the budget is spent; returns their mean loss.

        After the last planned step, or enough of them, the new weights are published.
        Raises: FloatingPointError when training diverged; `weights` stay, and training starts anew.
        """
        if not self.num_pending_steps:
            return None
        deadline = self._clock() + budget_s
        losses: list[float] = []
        with torch.inference_mode(False), torch.enable_grad():
            self._standardise()
            while not losses or (self.num_pending_steps and self._clock() < deadline):
                losses.append(self._step())
                if not self.num_pending_steps or len(self._version_losses) >= QUALITY_HEAD_PUBLISH_STEPS:
                    self._publish()
        return sum(losses) / len(losses)

    def to_safetensors(self) -> bytes:
        """The published weights, with what is needed to train on. Raises: ValueError while untrained."""
        if self.weights is None:
            raise ValueError(f"the head for detection_length {self.detection_length} is not trained yet: post rewards")
        tensors = {**self.weights._asdict(), "mean": self._mean, "scale": self._scale}
        return write_head_file("quality head", tensors, self._metadata())

    @classmethod
    def from_safetensors(cls, data: bytes, *, hidden_size: int, model: str, seed: int = 0) -> QualityHead:
        """A head that scores at once and trains on with a new optimizer, once it has labels of its own.

        Raises: HeadMismatch for another hidden size or model; ValueError for anything but such a file.
        """
        file = read_head_file(data, "quality head", hidden_size=hidden_size, model=model)
        head = cls._described(file, hidden_size, model, seed)
        with torch.inference_mode(False):
            head._read_standardisation(file)
            head.weights = w1, b1, w2, b2 = read_weights(file, hidden_size)
            head._set_parameters((w1 * head._scale, b1 + w1 @ head._mean, w2.clone(), b2.clone()))
        return head

    def state(self) -> bytes:
        """Everything, optimizer too, and the newest `QUALITY_HEAD_STATE_BYTES` of the replay memory.

        If that is all of it, what is restored goes on exactly as this head would.
        """
        tensors = {"mean": self._mean, "scale": self._scale, "generator": self._generator.get_state()}
        tensors |= self._replay.tensors(QUALITY_HEAD_STATE_BYTES) | self._standardiser.tensors()
        if self.weights is not None:
            tensors |= self.weights._asdict()
        for name, parameter in zip(HeadWeights._fields, self._parameters, strict=True):
            tensors[f"parameter.{name}"] = parameter
            tensors |= {f"adam.{name}.{key}": value for key, value in self._optimizer.state[parameter].items()}
        for name in ("losses", "_version_losses"):
            tensors[name] = torch.tensor(list(getattr(self, name)), dtype=torch.float64)
        counters = {name: getattr(self, name) for name in COUNTERS}
        return write_head_file("quality head state", tensors, self._metadata() | counters)

    @classmethod
    def restore(cls, data: bytes, *, hidden_size: int, model: str) -> QualityHead:
        """The head that `state` described. Raises: as `from_safetensors`."""
        file = read_head_file(data, "quality head state", hidden_size=hidden_size, model=model)
        head = cls._described(file, hidden_size, model, seed=0)
        with torch.inference_mode(False):
            head._read_standardisation(file)
            head._generator.set_state(file.tensor("generator", len(head._generator.get_state()), dtype=torch.uint8))
            head._replay.restore(file)
            head._standardiser.restore(file)
            if "w1" in file.tensors:
                head.weights = read_weights(file, hidden_size)
            head._set_parameters(read_weights(file, hidden_size, prefix="parameter."))
            for name, parameter in zip(HeadWeights._fields, head._parameters, strict=True):
                state = head._optimizer.state[parameter]
                state["step"] = file.tensor(f"adam.{name}.step")
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = file.tensor(f"adam.{name}.{key}", *parameter.shape)
        for name in ("losses", "_version_losses"):
            getattr(head, name).extend(file.series(name))
        for name in COUNTERS:
            setattr(head, name, file.integer(name))
        return head

    def _metadata(self) -> dict[str, int | str]:
        names = ("hidden_size", "model", "detection_length", "version", "num_steps", "num_labels")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _described(cls, file: HeadFile, hidden_size: int, model: str, seed: int) -> QualityHead:
        head = cls(hidden_size, model, file.integer("detection_length", minimum=1), seed)
        head.version = file.integer("version")
        head.num_steps = file.integer("num_steps")
        head.num_labels = file.integer("num_labels")
        return head

    def _read_standardisation(self, file: HeadFile) -> None:
        self._mean, self._scale = file.tensor("mean", self.hidden_size), file.tensor("scale", self.hidden_size)
        if not (self._scale > 0).all():
            raise ValueError(f"tensor 'scale' must be positive, got {self._scale.min().item()}")

    def _random_weights(self) -> HeadWeights:
        """Uniform, as torch.nn.Linear begins."""
        shapes = head_shapes(self.hidden_size)
        bounds = (self.hidden_size**-0.5, self.hidden_size**-0.5, QUALITY_HEAD_HIDDEN**-0.5, QUALITY_HEAD_HIDDEN**-0.5)
        return HeadWeights(
            *(
                (2 * torch.rand(shape, generator=self._generator) - 1) * bound
                for shape, bound in zip(shapes, bounds, strict=True)
            )
        )

    def _set_parameters(self, values: Iterable[Tensor]) -> None:
        """Train on from these, with a new optimizer."""
        self._parameters = HeadWeights(*(value.requires_grad_() for value in values))
        w1, b1, w2, b2 = self._parameters
        decayed, others = {"params": [w1, w2]}, {"params": [b1, b2], "weight_decay": 0.0}
        self._optimizer = torch.optim.AdamW(
            [decayed, others], lr=QUALITY_HEAD_LEARNING_RATE, weight_decay=QUALITY_HEAD_WEIGHT_DECAY, fused=True
        )
        for parameter in self._parameters:
            self._optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _step(self) -> float:
        features, labels, weights = self._replay.draw(QUALITY_HEAD_BATCH, self._generator)
        standardised = ((features - self._mean) / self._scale).clamp_(-MAX_STANDARDISED, MAX_STANDARDISED)
        w1, b1, w2, b2 = self._parameters
        hidden = torch.relu(torch.addmm(b1, standardised, w1.T))
        kept = torch.rand(hidden.shape, generator=self._generator) >= QUALITY_HEAD_DROPOUT
        logits = (hidden * kept / (1 - QUALITY_HEAD_DROPOUT)) @ w2 + b2
        loss = binary_cross_entropy_with_logits(logits, labels, weights)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.num_pending_steps -= 1
        self.num_steps += 1
        self._version_losses.append(loss.item())
        return self._version_losses[-1]

    def _publish(self) -> None:
        w1, b1, w2, b2 = (parameter.detach() for parameter in self._parameters)
        folded = w1 / self._scale
        weights = HeadWeights(folded, b1 - folded @ self._mean, w2.clone(), b2.clone())
        if not all(tensor.isfinite().all() for tensor in weights):
            self._set_parameters(self._random_weights())
            self._version_losses.clear()
            raise FloatingPointError(f"the head diverged in {self.num_steps} steps: its training starts anew")
        self.weights = weights
        self.version += 1
        self.losses.append(sum(self._version_losses) / len(self._version_losses))
        self._version_losses.clear()

    def _standardise(self) -> None:
        """Follow the running statistics when labels have grown by a tenth; what the head computes stays the same."""
        if self.num_labels < 1.1 * self._num_labels_standardised:
            return
        mean, scale = self._standardiser.mean.float(), self._standardiser.scale().float()
        if self.num_steps:
            with torch.no_grad():
                w1, b1, _, _ = self._parameters
                b1 += w1 @ ((mean - self._mean) / self._scale)
                w1 *= scale / self._scale
        self._mean, self._scale, self._num_labels_standardised = mean, scale, self.num_labels
