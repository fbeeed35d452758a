"""The quality head: how likely a candidate is to succeed, from the hidden state at its detection length.

A two-layer MLP trained on stored states, so that no gradient reaches the backbone. Invariant: `weights` score raw
hidden states, are finite and are replaced whole; training works on standardised states, and standardisation is folded
into what is published.

Source: ARRoL section 4.2.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from vllm_rollout.checks import MAX_COUNT
from vllm_rollout.config import MAX_DETECTION_LENGTH
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE
from vllm_rollout.parts.pruning.worker.quality_head_file import HeadBytes, HeadFile, HeadMismatch, read_head_file
from vllm_rollout.parts.pruning.worker.replay_buffer import (
    MAX_MAGNITUDE,
    MAX_STANDARDISED,
    MIN_SCALE,
    ReplayBuffer,
    Standardiser,
    check_labels,
)

QUALITY_HEAD_HIDDEN = 128
"""Width of the quality head's hidden layer (ARRoL 4.2)."""

REPLAY_BUFFER_SIZE = 8192
"""Newest labelled hidden states that a head trains on: 64 MB per head at hidden size 4,096 in bfloat16."""
QUALITY_HEAD_STATE_BYTES = 8 * 1024 * 1024
"""Labelled states in a saved head, in bytes: 1,024 at hidden size 4,096 in bfloat16. Saving holds up the engine."""
QUALITY_HEAD_MIN_LABELS = 32
"""Successes, and failures, that a head has seen before its training begins."""
QUALITY_HEAD_BATCH = 64
"""Number of labelled states in one optimizer step."""
QUALITY_HEAD_PASSES = 12
"""Optimizer steps planned for a label, times the batch: how often each label is drawn on average."""
QUALITY_HEAD_PUBLISH_STEPS = 256
"""While labels keep coming, new weights are published at least once per this many optimizer steps."""
QUALITY_HEAD_LEARNING_RATE = 1e-3
"""Learning rate of Adam."""
QUALITY_HEAD_WEIGHT_DECAY = 0.1
"""Decoupled weight decay of both layers' matrices."""
QUALITY_HEAD_DROPOUT = 0.5
"""Share of hidden units left out in a training step."""
MAX_QUALITY_HEAD_VERSIONS = 1024
"""Number of versions whose training loss is kept."""

__all__ = ["HeadMismatch", "HeadWeights", "QualityHead"]

MAX_PENDING_STEPS = REPLAY_BUFFER_SIZE * QUALITY_HEAD_PASSES // QUALITY_HEAD_BATCH
MAX_SEED = 2**32
MAX_WEIGHT = 1e12
"""The largest published weight: no state of a model makes a logit of them that float32 cannot hold."""
MAX_PARAMETER = 1e24
MAX_MOMENT = 1e18
"""The largest first moment of Adam; the second is bounded by its square. Beyond any of these training has diverged."""
MAX_LOSS = 1e35


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
"""Attributes of a head that its state holds beside the description and the seed."""


def head_shapes(hidden_size: int) -> tuple[tuple[int, ...], ...]:
    return (QUALITY_HEAD_HIDDEN, hidden_size), (QUALITY_HEAD_HIDDEN,), (QUALITY_HEAD_HIDDEN,), (1,)


def read_weights(file: HeadFile, hidden_size: int, prefix: str = "") -> HeadWeights:
    shapes = zip(HeadWeights._fields, head_shapes(hidden_size), strict=True)
    most = MAX_PARAMETER if prefix else MAX_WEIGHT
    return HeadWeights(*(file.tensor(prefix + name, *shape, least=-most, most=most) for name, shape in shapes))


class QualityHead:
    """Learns success from labelled hidden states, a few optimizer steps at a time; the same calls give the same head.

    Args:
        hidden_size: numbers per hidden state.
        model: name of the model the states come from.
        detection_length: output tokens after which the states were taken, or WHOLE.
        seed: of the initial weights, the draws from the replay buffer and dropout. What a step draws depends on the
            seed and on how many steps came before, and on nothing else.
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
        """Weights that score now. None while untrained."""
        self.version = 0
        """Number of times that training replaced `weights`."""
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
            self._seed = seed
            self._generator = torch.Generator()
            self._replay_buffer = ReplayBuffer(hidden_size, REPLAY_BUFFER_SIZE)
            self._standardiser = Standardiser(hidden_size, REPLAY_BUFFER_SIZE)
            # The standardisation that the parameters stand for; it follows the running one in steps.
            self._mean, self._scale = torch.zeros(hidden_size), torch.ones(hidden_size)
            self._num_labels_standardised = 0
            self._parameters: HeadWeights | None = None
            """None until the first training: making them takes as long as a step."""

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
            self._replay_buffer.add(features, labels, weights)
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
        """Take planned steps, at least one, while one more fits into the budget; returns their mean loss.

        After the last planned step, or enough of them, the new weights are published, which takes the place of a step.
        Raises: FloatingPointError when training diverged; `weights` stay, and training starts anew.
        """
        if not self.num_left:
            return None
        now = self._clock()
        deadline = now + budget_s
        losses: list[float] = []
        with torch.inference_mode(False), torch.enable_grad():
            self._begin()
            self._standardise()
            while True:
                if self._is_version_due:
                    self._publish()
                else:
                    losses.append(self._step())
                before, now = now, self._clock()
                if not self.num_left or now + (now - before) > deadline:  # another would not fit
                    return sum(losses) / len(losses) if losses else None

    @property
    def num_left(self) -> int:
        """Planned steps, and one more when those taken have not been published."""
        return self.num_pending_steps + bool(self._version_losses)

    @property
    def _is_version_due(self) -> bool:
        num_steps = len(self._version_losses)
        return num_steps >= QUALITY_HEAD_PUBLISH_STEPS or (num_steps > 0 and not self.num_pending_steps)

    def to_safetensors(self) -> bytes:
        """The whole head as safetensors bytes; see `export`."""
        return self.export().whole()

    def export(self) -> HeadBytes:
        """The published weights, with what is needed to train on. Raises: ValueError while untrained."""
        if self.weights is None:
            raise ValueError(f"the head for detection_length {self.detection_length} is not trained yet: post rewards")
        # None of these is ever written to.
        tensors = {**self.weights._asdict(), "mean": self._mean, "scale": self._scale}
        return HeadBytes("quality head", tensors, self._metadata())

    @classmethod
    def from_safetensors(cls, data: bytes, *, hidden_size: int, model: str) -> QualityHead:
        """A head that scores at once and trains on with a new optimizer, once it has labels of its own.

        Raises: HeadMismatch for another hidden size or model; ValueError for anything but such a file.
        """
        file = read_head_file(data, "quality head", hidden_size=hidden_size, model=model)
        head = cls._described(file, hidden_size, model)
        with torch.inference_mode(False):
            head._read_standardisation(file)
            head.weights = read_weights(file, hidden_size)
        file.check_all_read()
        return head

    def state(self) -> bytes:
        """The whole training state as bytes; see `snapshot`."""
        steps = self.snapshot()
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return done.value.whole()

    def snapshot(self) -> Generator[None, None, HeadBytes]:
        """Everything, optimizer too, and the newest `QUALITY_HEAD_STATE_BYTES` of the replay buffer.

        If that is all of it, what is restored goes on exactly as this head would. Training that has diverged and does
        not know it yet starts anew: what is saved can be restored. Copies a few megabytes at a time; the head may learn
        in between, its parameters are those at the beginning.
        """
        with torch.inference_mode(False), torch.no_grad():
            tensors, metadata = self._begun()
        yield
        if not all(_within(tensor, _most(name)) for name, tensor in tensors.items()):
            self._start_anew()
            with torch.inference_mode(False), torch.no_grad():
                tensors, metadata = self._begun()
            yield
        tensors |= yield from self._replay_buffer.copied(QUALITY_HEAD_STATE_BYTES)
        return HeadBytes("quality head state", tensors, metadata)

    def _begun(self) -> tuple[dict[str, Tensor], dict[str, int | str]]:
        """Tensors and metadata of a state, without the replay buffer. Tensors that training changes are copied."""
        tensors = {"mean": self._mean, "scale": self._scale, **self._standardiser.tensors()}
        if self.weights is not None:
            tensors |= self.weights._asdict()
        if self._parameters is not None:
            tensors |= {name: tensor.clone() for name, tensor in self._training().items()}
        for name in ("losses", "_version_losses"):
            tensors[name] = torch.tensor(list(getattr(self, name)), dtype=torch.float64)
        counters = {name: getattr(self, name) for name in COUNTERS}
        if not len(self._replay_buffer):
            counters["num_pending_steps"] = 0
        return tensors, self._metadata() | counters | {"seed": self._seed}

    @classmethod
    def restore(cls, data: bytes, *, hidden_size: int, model: str) -> QualityHead:
        """The head that `state` described. Raises: as `from_safetensors`."""
        file = read_head_file(data, "quality head state", hidden_size=hidden_size, model=model)
        head = cls._described(file, hidden_size, model, file.integer("seed", maximum=MAX_SEED))
        with torch.inference_mode(False):
            head._read_standardisation(file)
            head._replay_buffer.restore(file)
            head._standardiser.restore(file)
            if "w1" in file.tensors:
                head.weights = read_weights(file, hidden_size)
            if any(name.startswith("parameter.") for name in file.tensors):
                head._read_training(file)
        head.losses.extend(file.series("losses", max_length=MAX_QUALITY_HEAD_VERSIONS, most=MAX_LOSS))
        head._version_losses += file.series("_version_losses", max_length=QUALITY_HEAD_PUBLISH_STEPS, most=MAX_LOSS)
        head._read_counters(file)
        file.check_all_read()
        return head

    def _read_training(self, file: HeadFile) -> None:
        self._set_parameters(read_weights(file, self.hidden_size, prefix="parameter."))
        for name, parameter in zip(HeadWeights._fields, self._parameters, strict=True):  # type: ignore[arg-type]
            state, shape = self._optimizer.state[parameter], parameter.shape
            key = f"adam.{name}."
            state["step"] = file.tensor(f"{key}step", least=0.0, most=MAX_PARAMETER)
            state["exp_avg"] = file.tensor(f"{key}exp_avg", *shape, least=-MAX_MOMENT, most=MAX_MOMENT)
            state["exp_avg_sq"] = file.tensor(f"{key}exp_avg_sq", *shape, least=0.0, most=MAX_MOMENT**2)

    def _read_counters(self, file: HeadFile) -> None:
        most = {
            "num_pending_steps": MAX_PENDING_STEPS if len(self._replay_buffer) else 0,
            "_num_labels_standardised": self.num_labels,
        }
        for name in COUNTERS:
            setattr(self, name, file.integer(name, maximum=most.get(name, MAX_COUNT)))

    def _training(self) -> dict[str, Tensor]:
        """Parameters and their optimizer, by the names of the state."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in zip(HeadWeights._fields, self._parameters, strict=True):  # type: ignore[arg-type]
            tensors[f"parameter.{name}"] = parameter.detach()
            tensors |= {f"adam.{name}.{key}": value for key, value in self._optimizer.state[parameter].items()}
        return tensors

    def _metadata(self) -> dict[str, int | str]:
        names = ("hidden_size", "model", "detection_length", "version", "num_steps", "num_labels")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _described(cls, file: HeadFile, hidden_size: int, model: str, seed: int = 0) -> QualityHead:
        head = cls(hidden_size, model, file.integer("detection_length", WHOLE, MAX_DETECTION_LENGTH), seed)
        head.version = file.integer("version")
        head.num_steps = file.integer("num_steps")
        head.num_labels = file.integer("num_labels")
        return head

    def _read_standardisation(self, file: HeadFile) -> None:
        most = 1.01 * MAX_MAGNITUDE  # rounding
        self._mean = file.tensor("mean", self.hidden_size, least=-most, most=most)
        self._scale = file.tensor("scale", self.hidden_size, least=MIN_SCALE / 2, most=most)

    def _begin(self) -> None:
        """Make the parameters, if there are none: those of the published weights, or random ones."""
        if self._parameters is not None:
            return
        if self.weights is None:
            self._set_parameters(self._random_weights())
            return
        w1, b1, w2, b2 = self.weights
        self._set_parameters((w1 * self._scale, b1 + w1 @ self._mean, w2.clone(), b2.clone()))

    def _start_anew(self) -> None:
        """Reset the head after training diverged."""
        self._set_parameters(self._random_weights())
        self._version_losses.clear()

    def _seed_draws(self, purpose: int) -> None:
        self._generator.manual_seed((self._seed * 1_000_003 + self.num_steps) * 2 + purpose & 2**63 - 1)

    def _random_weights(self) -> HeadWeights:
        """Uniform random weights, as torch.nn.Linear initializes them."""
        self._seed_draws(0)
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
            [decayed, others],  # type: ignore[arg-type]
            lr=QUALITY_HEAD_LEARNING_RATE,
            weight_decay=QUALITY_HEAD_WEIGHT_DECAY,
            fused=True,  # type: ignore[arg-type]
        )
        for parameter in self._parameters:
            self._optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _step(self) -> float:
        self._seed_draws(1)
        features, labels, weights = self._replay_buffer.draw(QUALITY_HEAD_BATCH, self._generator)
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
        value = loss.item()
        if not value <= MAX_LOSS:
            self._diverged()
        self._version_losses.append(value)
        return value

    def _diverged(self) -> NoReturn:
        self._start_anew()
        raise FloatingPointError(f"the head diverged in {self.num_steps} steps: its training starts anew")

    def _publish(self) -> None:
        w1, b1, w2, b2 = (parameter.detach() for parameter in self._parameters)
        folded = w1 / self._scale
        weights = HeadWeights(folded, b1 - folded @ self._mean, w2.clone(), b2.clone())
        if not all(_within(tensor, MAX_WEIGHT) for tensor in weights):
            self._diverged()
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


def _most(name: str) -> float:
    """Largest absolute value that a tensor of a saved state may hold. A larger value means that training diverged."""
    return {"exp_avg": MAX_MOMENT, "exp_avg_sq": MAX_MOMENT**2}.get(name.rpartition(".")[2], MAX_PARAMETER)


def _within(tensor: Tensor, most: float) -> bool:
    """All of its numbers are finite and at most so large."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()  # NaN if any is
    return bool(low >= -most and high <= most)


def warm_up_training() -> None:
    """Take one step of a small head. The first optimizer of a process loads modules of torch for up to seconds."""
    head = QualityHead(1, "warm-up", 1)
    labels = torch.arange(2 * QUALITY_HEAD_MIN_LABELS) % 2
    head.add(labels[:, None].float(), labels, torch.ones(len(labels)))
    head.train(0.0)
