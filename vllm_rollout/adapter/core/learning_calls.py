"""What an engine core is asked about learning: rewards, heads, report, state.

With one data-parallel rank everything is learned where it was observed. With several, rank 0 trains the heads and the
API process hands its weights to the others; every rank's calibration learns every label.

Invariant: as of calls.py. A detection length that the judge forgets is forgotten by the worker before its next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from vllm_rollout.adapter.call_table import (
    HeadToRead,
    LabelledFeatures,
    Learned,
    LearningWindow,
    PostedRewards,
    Refusal,
    RewardsProgress,
)
from vllm_rollout.adapter.core.readings import MAX_PIECE_BYTES, Readings
from vllm_rollout.adapter.saved_state import END, HEAD, parse_state, state_header
from vllm_rollout.config import CALL_BUDGET_S
from vllm_rollout.group.judge import Judge, Label
from vllm_rollout.group.ledger import Reward
from vllm_rollout.group.memory import Memory
from vllm_rollout.group.report import HeadInfo

REWARDS_AT_ONCE = 16
"""Rewards that are accounted for, with their features, before time is looked at again."""


class LearningCalls:
    """The operations. `worker` calls a method of the scoring rank's worker."""

    def __init__(
        self,
        judge: Judge,
        readings: Readings,
        worker: Callable[..., Any],
        *,
        model: str,
        clock: Callable[[], float] = time.perf_counter,
        budget_s: float = CALL_BUDGET_S,
    ) -> None:
        self._judge = judge
        self._readings = readings
        self._call_worker = worker
        self._model = model
        self._clock = clock
        self._budget_s = budget_s

    def post_rewards(self, posted: PostedRewards) -> RewardsProgress | None:
        detection_length = self._judge.ledger.detection_length(posted.rollout_id)
        if detection_length is None:
            return None
        deadline = self._clock() + self._budget_s
        progress = RewardsProgress(detection_length, [], 0, [], None)
        for start in range(0, len(posted.rewards), REWARDS_AT_ONCE):
            some = posted.rewards[start : start + REWARDS_AT_ONCE]
            progress = self._post_some(posted.rollout_id, some, posted.share, progress)
            if self._clock() >= deadline:
                break
        return progress

    def _post_some(
        self, rollout_id: str, rewards: Sequence[Reward], share: bool, so_far: RewardsProgress
    ) -> RewardsProgress:
        outcome = self._judge.reward(rollout_id, rewards)
        assert outcome is not None, "nothing is forgotten while a call runs"
        detection_length, statuses, labels = outcome
        features, num_found = so_far.features, 0
        if labels and share:
            found, features = self._take_features(labels, features)
            num_found = len(found)
        elif labels:
            num_found = len(
                self._worker(
                    "rollout_learn",
                    detection_length,
                    [label.request_id for label in labels],
                    [label.positive for label in labels],
                    [label.weight for label in labels],
                )
            )
        self._judge.num_evicted[detection_length] += len(labels) - num_found
        return RewardsProgress(
            detection_length,
            [*so_far.statuses, *statuses],
            so_far.num_training + num_found,
            [*so_far.labels, *labels] if share else [],
            features,
        )

    def _take_features(
        self, labels: Sequence[Label], before: LabelledFeatures | None
    ) -> tuple[list[int], LabelledFeatures]:
        """Positions of labels whose features were still there, and these added to those before."""
        features, found = self._worker("rollout_take_features", [label.request_id for label in labels])
        positives = [labels[i].positive for i in found]
        weights = [labels[i].weight for i in found]
        if before is not None:
            features = features._replace(data=before.features.data + features.data)
            positives, weights = before.positives + positives, before.weights + weights
        return found, LabelledFeatures(labels[0].detection_length, features, positives, weights)

    def learn_labels(self, labels: Sequence[Label]) -> None:
        self._judge.learn(labels)

    def learn_features(self, labelled: LabelledFeatures) -> None:
        # The labels may still be on their way to this rank: the head must find its place.
        self._judge.memory.learning(labelled.detection_length, self._judge.ledger.awaits)
        self._worker(
            "rollout_learn_features",
            labelled.detection_length,
            labelled.features,
            labelled.positives,
            labelled.weights,
        )

    def train(self, budget_s: float) -> int:
        return self._worker("rollout_train", budget_s)

    def heads(self) -> list[HeadInfo]:
        return self._worker("rollout_heads")

    def put_head(self, data: bytes) -> HeadInfo | Refusal:
        """In place of the one for its detection length, or, beyond as many as are learned at, of one to spare."""
        memory, awaits = self._judge.memory, self._judge.ledger.awaits
        spare = memory.spare(awaits) if memory.is_full else None
        answer = self._worker("rollout_put_head", data, list(memory.learnings), spare)
        if isinstance(answer, HeadInfo):
            memory.learning(answer.detection_length, awaits)
        return answer

    def open_head(self, head: HeadToRead) -> bool:
        size = self._worker("rollout_open_head", head.reader, head.detection_length)
        if size is None:
            return False
        self._readings.open(head.reader, self._opened(head.reader, size))
        return True

    def learned(self) -> list[Learned]:
        awaiting, evicted = self._judge.ledger.num_awaiting(), self._judge.num_evicted
        return [
            Learned(length, awaiting[length], evicted[length], learning.num_judged, learning.num_pruned)
            for length, learning in self._judge.memory.learnings.items()
        ]

    def learning_window(self, detection_length: int) -> LearningWindow | None:
        learning = self._judge.memory.learnings.get(detection_length)
        if learning is None:
            return None
        return LearningWindow(learning.outcomes(), self._worker("rollout_head_losses", detection_length))

    def open_state(self, reader: str) -> None:
        self._readings.open(reader, self._state(reader))

    def put_state(self, data: bytes) -> Refusal | None:
        try:
            state = parse_state(data)
            if state.model != self._model:
                return Refusal(
                    "mismatch", f"the state is of model {state.model!r:.200}, this server's is {self._model!r}"
                )
            memory = Memory.from_state(state.rows)
            heads = state.heads()
        except ValueError as error:
            return Refusal("invalid", f"not a rollout state ({error})")
        answer = self._worker("rollout_restore_heads", heads, list(memory.learnings))
        if isinstance(answer, Refusal):
            return answer
        for detection_length in answer:  # a head may have been put before anything was judged at its length
            memory.learning(detection_length, lambda length: True)
        self._judge.memory = memory
        return None

    def _state(self, reader: str) -> Iterator[bytes]:
        """The parts of a state (`saved_state.py`), made as they are read."""
        encode = msgspec.json.Encoder().encode
        yield encode(state_header(self._model)) + b"\n"
        for row in self._judge.memory.to_state():
            yield encode(row) + b"\n"
        num_heads = 0
        for head in self.heads():
            while (size := self._worker("rollout_copy_head_state", reader, head.detection_length)) == 0:
                yield b""
            if size is not None:
                num_heads += 1
                yield encode([HEAD, size]) + b"\n"
                yield from self._opened(reader, size)
        yield encode([END, num_heads]) + b"\n"

    def _opened(self, reader: str, size: int) -> Iterator[bytes]:
        """What the worker has opened."""
        for start in range(0, size, MAX_PIECE_BYTES):
            yield self._worker("rollout_read", reader, start, min(size, start + MAX_PIECE_BYTES))

    def _worker(self, method: str, *args: Any) -> Any:
        forgotten = self._judge.memory.forgotten
        if forgotten:
            self._call_worker("rollout_forget_heads", list(forgotten))
            forgotten.clear()
        return self._call_worker(method, *args)
