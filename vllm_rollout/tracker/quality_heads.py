"""The quality heads of one worker, by detection length: fed from the feature ring, shown to the tracker when trained.

Invariant: candidates are scored by published weights only; training, and a training that fails, leaves them alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence

import torch

from vllm_rollout.config import MAX_DETECTION_LENGTHS
from vllm_rollout.group.report import HeadInfo
from vllm_rollout.tracker.feature_ring import FeatureRing
from vllm_rollout.tracker.quality_head import HeadWeights, QualityHead
from vllm_rollout.tracker.quality_head_file import HeadBytes
from vllm_rollout.tracker.replay import is_usable
from vllm_rollout.tracker.tracker import CandidateTracker, PublishedHead

MAX_OPEN = 8
"""Heads that are read at a time; the one opened first gives way."""


class QualityHeads:
    """Trains heads on rewarded candidates and publishes them to the tracker."""

    def __init__(
        self,
        tracker: CandidateTracker,
        ring: FeatureRing,
        *,
        hidden_size: int,
        model: str,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = tracker
        self._ring = ring
        self._hidden_size = hidden_size
        self._model = model
        self._device = device
        self._clock = clock
        self._heads: dict[int, QualityHead] = {}
        self._open: OrderedDict[str, HeadBytes] = OrderedDict()
        """What is being read, by reader."""
        self._copying: OrderedDict[tuple[str, int], Generator[None, None, HeadBytes]] = OrderedDict()
        """What will be read, by reader and detection length."""

    def take_features(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
        """Features that are still there, [num_found, hidden_size], and their positions in `request_ids`.

        One that overflowed in the model is left out: a head refuses a whole batch with such a state in it.
        """
        features, found = self._ring.take(request_ids)
        if not found:
            return features, found
        usable = is_usable(features)
        if usable.all():
            return features, found
        return features[usable], [position for position, ok in zip(found, usable.tolist(), strict=True) if ok]

    def learn(
        self, detection_length: int, features: torch.Tensor, positives: Sequence[bool], weights: Sequence[float]
    ) -> None:
        """Plan training on `features` [num_labels, hidden_size]; takes no optimizer step."""
        if not len(features) or (head := self._head(detection_length)) is None:
            return
        head.add(features, torch.tensor(positives, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32))

    def train(self, budget_s: float) -> int:
        """Train for `budget_s` seconds; returns what is left, in steps (`QualityHead.num_left`)."""
        deadline = self._clock() + budget_s
        for head in self._heads.values():
            if head.num_left:
                version = head.version
                head.train(max(0.0, deadline - self._clock()))
                if head.version != version:
                    self._publish(head)
                break
        return sum(head.num_left for head in self._heads.values())

    def infos(self) -> list[HeadInfo]:
        return [self._info(head) for head in self._heads.values()]

    def losses(self, detection_length: int) -> list[float]:
        """Mean training loss of each version, oldest first."""
        head = self._heads.get(detection_length)
        return [] if head is None else list(head.losses)

    def export(self, detection_length: int) -> bytes | None:
        """The head as safetensors; None while there is none trained."""
        head = self._heads.get(detection_length)
        return None if head is None or head.weights is None else head.to_safetensors()

    def open(self, reader: str, detection_length: int) -> int | None:
        """Begin to read what `export` gives; returns how many bytes there are."""
        head = self._heads.get(detection_length)
        return None if head is None or head.weights is None else self._opened(reader, head.export())

    def copy_state(self, reader: str, detection_length: int) -> int | None:
        """Begin to read a head with its optimizer, or go on beginning; returns how many bytes there are, 0 while the
        head is not copied yet and the call is to be repeated."""
        if (reader, detection_length) not in self._copying:
            head = self._heads.get(detection_length)
            if head is None:
                return None
            self._copying[reader, detection_length] = head.snapshot()
            if len(self._copying) > MAX_OPEN:
                self._copying.popitem(last=False)
        try:
            next(self._copying[reader, detection_length])
        except StopIteration as done:
            del self._copying[reader, detection_length]
            return self._opened(reader, done.value)
        return 0

    def read(self, reader: str, start: int, end: int) -> bytes:
        """A part of what this reader has opened; at the end it is closed."""
        data = self._open[reader]
        if end >= len(data):
            del self._open[reader]
        return data.read(start, end)

    def put(self, data: bytes, known: Sequence[int] = (), spare: int | None = None) -> HeadInfo:
        """Put a head in place of the one for its detection length.

        `known` are the detection lengths that are learned at; a head for another one, when they are as many as there
        may be, takes the place of `spare`.
        Raises: HeadMismatch, ValueError (as `QualityHead.from_safetensors`, and for one head too many).
        """
        head = QualityHead.from_safetensors(data, hidden_size=self._hidden_size, model=self._model)
        length = head.detection_length
        if not head.version:
            raise ValueError("version must be at least 1, got 0, which stands for an untrained head")
        taken = {*known, *self._heads}
        if length not in taken and len(taken) >= MAX_DETECTION_LENGTHS:
            if spare is None:
                raise ValueError(
                    f"at most {MAX_DETECTION_LENGTHS} different detection lengths are learned at, and rewards are "
                    f"awaited for all there are ({', '.join(map(str, sorted(taken)))}), got a head for {length}: post "
                    "those rewards first"
                )
            self.forget(spare)
        self._heads[length] = head
        self._publish(head)
        return self._info(head)

    def forget(self, detection_length: int) -> None:
        """Nobody uses this detection length any more."""
        self._heads.pop(detection_length, None)
        self._tracker.heads.pop(detection_length, None)

    def state(self) -> list[bytes]:
        """Heads with their optimizers."""
        return [head.state() for head in self._heads.values()]

    def restore(self, states: Sequence[bytes], known: Sequence[int] = ()) -> list[int]:
        """Put these heads in place of all there are; returns their detection lengths.

        `known`: detection lengths that are learned at, with or without a head.
        Raises: HeadMismatch, ValueError, and nothing has changed.
        """
        heads = [QualityHead.restore(state, hidden_size=self._hidden_size, model=self._model) for state in states]
        lengths = [head.detection_length for head in heads]
        _check_lengths([*(length for length in known if length not in lengths), *lengths])
        self._heads = {head.detection_length: head for head in heads}
        self._tracker.heads.clear()
        for head in heads:
            self._publish(head)
        return lengths

    def _info(self, head: QualityHead) -> HeadInfo:
        return HeadInfo(head.detection_length, self._hidden_size, head.version, head.num_steps, head.num_labels)

    def _opened(self, reader: str, data: HeadBytes) -> int:
        self._open.pop(reader, None)
        self._open[reader] = data
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return len(data)

    def _head(self, detection_length: int) -> QualityHead | None:
        head = self._heads.get(detection_length)
        if head is None and len(self._heads) < MAX_DETECTION_LENGTHS:
            head = QualityHead(self._hidden_size, model=self._model, detection_length=detection_length)
            self._heads[detection_length] = head
        return head

    def _publish(self, head: QualityHead) -> None:
        if head.weights is not None:
            weights = HeadWeights(*(tensor.to(self._device) for tensor in head.weights))
            self._tracker.heads[head.detection_length] = PublishedHead(head.version, weights)


def _check_lengths(detection_lengths: Sequence[int]) -> None:
    if len(set(detection_lengths)) < len(detection_lengths) or len(detection_lengths) > MAX_DETECTION_LENGTHS:
        raise ValueError(
            f"heads must be for at most {MAX_DETECTION_LENGTHS} different detection lengths, got "
            f"{', '.join(map(str, detection_lengths))}"
        )
