"""The quality heads of one worker, by detection length and adapter: fed from the feature ring, shown to the scorer
when trained.

Invariant: candidates are scored by published weights only; training, and a training that fails, leaves them alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence

import torch

from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.pruning.rules.memory import MAX_DETECTION_LENGTHS
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.rules.report import HeadInfo
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights, QualityHead
from vllm_rollout.parts.pruning.worker.quality_head_file import HeadBytes
from vllm_rollout.parts.pruning.worker.replay_buffer import is_usable
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead, Scorer

MAX_OPEN = 8
"""Heads that are read at a time; the one opened first gives way."""


class QualityHeads:
    """Trains heads on rewarded candidates and publishes them to the scorer."""

    def __init__(
        self,
        scorer: Scorer,
        ring: FeatureRing,
        *,
        hidden_size: int,
        model: str,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scorer = scorer
        self._ring = ring
        self._hidden_size = hidden_size
        self._model = model
        self._device = device
        self._clock = clock
        self._heads: dict[HeadKey, QualityHead] = {}
        self._open: OrderedDict[str, HeadBytes] = OrderedDict()
        """Bytes of the heads that readers are fetching, by reader."""
        self._copying: OrderedDict[tuple[str, HeadKey], Generator[None, None, HeadBytes]] = OrderedDict()
        """Copies of heads under way, by reader and head."""

    def take_features(self, keys: Sequence[StateKey]) -> tuple[torch.Tensor, list[int]]:
        """Features that are still there, [num_found, hidden_size], and their positions in `keys`.

        One that overflowed in the model is left out: a head refuses a whole batch with such a state in it.
        """
        last = [key for key in keys if key.at_end]
        if last:
            ended = self.scorer.take_last_states([key.request_id for key in last])
            if ended is not None:
                self._ring.put(ended.keys, ended.states)
        features, found = self._ring.take(keys)
        if last:  # of these the last one is known now
            reach = range(1 - self.scorer.num_last_states, self.scorer.num_last_states)
            self._ring.drop([key._replace(num_tokens=key.num_tokens + offset) for key in last for offset in reach])
        if not found:
            return features, found
        usable = is_usable(features)
        if usable.all():
            return features, found
        return features[usable], [position for position, ok in zip(found, usable.tolist(), strict=True) if ok]

    def learn(self, key: HeadKey, features: torch.Tensor, positives: Sequence[bool], weights: Sequence[float]) -> None:
        """Plan training on `features` [num_labels, hidden_size]; takes no optimizer step."""
        if not len(features) or (head := self._head(key)) is None:
            return
        head.add(features, torch.tensor(positives, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32))

    def train(self, budget_s: float) -> int:
        """Train for `budget_s` seconds; returns what is left, in steps (`QualityHead.num_left`)."""
        deadline = self._clock() + budget_s
        for key, head in self._heads.items():
            if head.num_left:
                version = head.version
                head.train(max(0.0, deadline - self._clock()))
                if head.version != version:
                    self._publish(key)
                break
        return sum(head.num_left for head in self._heads.values())

    def infos(self) -> list[HeadInfo]:
        return [self._info(key) for key in self._heads]

    def losses(self, key: HeadKey) -> list[float]:
        """Mean training loss of each version, oldest first."""
        head = self._heads.get(key)
        return [] if head is None else list(head.losses)

    def export(self, key: HeadKey) -> bytes | None:
        """The head as safetensors; None while there is none trained."""
        head = self._heads.get(key)
        return None if head is None or head.weights is None else head.to_safetensors()

    def open(self, reader: str, key: HeadKey) -> int | None:
        """Begin to read what `export` gives; returns how many bytes there are."""
        head = self._heads.get(key)
        return None if head is None or head.weights is None else self._opened(reader, head.export())

    def copy_state(self, reader: str, key: HeadKey) -> int | None:
        """Begin to read a head with its optimizer, or go on beginning; returns how many bytes there are, 0 while the
        head is not copied yet and the call is to be repeated."""
        if (reader, key) not in self._copying:
            head = self._heads.get(key)
            if head is None:
                return None
            self._copying[reader, key] = head.snapshot()
            if len(self._copying) > MAX_OPEN:
                self._copying.popitem(last=False)
        try:
            next(self._copying[reader, key])
        except StopIteration as done:
            del self._copying[reader, key]
            return self._opened(reader, done.value)
        return 0

    def read(self, reader: str, start: int, end: int) -> bytes:
        """A part of what this reader has opened; at the end it is closed."""
        data = self._open[reader]
        if end >= len(data):
            del self._open[reader]
        return data.read(start, end)

    def put(
        self, data: bytes, known: Sequence[int] = (), spare: int | None = None, adapter: str = BASE_MODEL
    ) -> HeadInfo:
        """Put a head in place of the adapter's one for its detection length.

        `known` are the detection lengths that are learned at for this adapter; a head for another one, when they are as
        many as there may be, takes the place of `spare`.
        Raises: HeadMismatch, ValueError (as `QualityHead.from_safetensors`, and for one head too many).
        """
        head = QualityHead.from_safetensors(data, hidden_size=self._hidden_size, model=self._model)
        length = head.detection_length
        if not head.version:
            raise ValueError("version must be at least 1, got 0, which stands for an untrained head")
        taken = {*known, *(key.detection_length for key in self._heads if key.adapter == adapter)}
        if length not in taken and len(taken) >= MAX_DETECTION_LENGTHS:
            if spare is None:
                raise ValueError(
                    f"at most {MAX_DETECTION_LENGTHS} different detection lengths are learned at, and rewards are "
                    f"awaited for all there are ({', '.join(map(str, sorted(taken)))}), got a head for {length}: post "
                    "those rewards first"
                )
            self.forget(HeadKey(spare, adapter))
        key = HeadKey(length, adapter)
        self._heads[key] = head
        self._publish(key)
        return self._info(key)

    def forget(self, key: HeadKey) -> None:
        """Remove the head of a detection length or adapter that is no longer used."""
        self._heads.pop(key, None)
        self.scorer.heads.pop(key, None)

    def state(self) -> list[tuple[str, bytes]]:
        """Saved heads with their optimizers, one (adapter, bytes) pair each."""
        return [(key.adapter, head.state()) for key, head in self._heads.items()]

    def restore(
        self, states: Sequence[tuple[str, bytes]], known: Sequence[HeadKey] = (), only_check: bool = False
    ) -> list[HeadKey]:
        """Put these heads, by adapter, in place of all there are; returns what they are for.

        `known`: what is learned, with or without a head. With `only_check` they are looked at, and nothing changes.
        Raises: HeadMismatch, ValueError, and nothing has changed.
        """
        heads = [QualityHead.restore(state, hidden_size=self._hidden_size, model=self._model) for _, state in states]
        keys = [HeadKey(head.detection_length, adapter) for (adapter, _), head in zip(states, heads, strict=True)]
        _check_keys([*(key for key in known if key not in keys), *keys])
        if only_check:
            return keys
        self._heads = dict(zip(keys, heads, strict=True))
        self.scorer.heads.clear()
        for key in keys:
            self._publish(key)
        return keys

    def _info(self, key: HeadKey) -> HeadInfo:
        head = self._heads[key]
        return HeadInfo(
            key.detection_length, self._hidden_size, head.version, head.num_steps, head.num_labels, key.adapter
        )

    def _opened(self, reader: str, data: HeadBytes) -> int:
        self._open.pop(reader, None)
        self._open[reader] = data
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return len(data)

    def _head(self, key: HeadKey) -> QualityHead | None:
        head = self._heads.get(key)
        if head is None and sum(other.adapter == key.adapter for other in self._heads) < MAX_DETECTION_LENGTHS:
            head = QualityHead(self._hidden_size, model=self._model, detection_length=key.detection_length)
            self._heads[key] = head
        return head

    def _publish(self, key: HeadKey) -> None:
        head = self._heads[key]
        if head.weights is not None:
            weights = HeadWeights(*(_sent_to(self._device, tensor) for tensor in head.weights))
            self.scorer.heads[key] = PublishedHead(head.version, weights)


def _sent_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device. From memory that is not pinned the host would wait for the step in flight."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _check_keys(keys: Sequence[HeadKey]) -> None:
    by_adapter: dict[str, list[int]] = {}
    for key in keys:
        by_adapter.setdefault(key.adapter, []).append(key.detection_length)
    for lengths in by_adapter.values():
        if len(set(lengths)) < len(lengths) or len(lengths) > MAX_DETECTION_LENGTHS:
            raise ValueError(
                f"heads must be for at most {MAX_DETECTION_LENGTHS} different detection lengths, got "
                f"{', '.join(map(str, lengths))}"
            )
