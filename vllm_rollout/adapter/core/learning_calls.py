"""What an engine core is asked about learning. Invariant: a call takes bounded time, because the engine makes no step
meanwhile.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from typing import Any

from vllm_rollout.adapter.wire import label_of
from vllm_rollout.group.judge import Judge
from vllm_rollout.group.memory import Memory, rows_of_format_1

STATE_FORMAT = 1


class LearningCalls:
    """The operations. `worker` calls a method of the scoring rank's worker.

    With one data-parallel rank everything is learned where it was observed. With several, rank 0 trains the heads and
    the API process hands its weights to the others; every rank's calibration learns every label.
    """

    def __init__(self, judge: Judge, worker: Callable[..., Any], *, model: str, rank: int) -> None:
        self._judge = judge
        self._worker = worker
        self._model = model
        self._rank = rank

    def rewards(self, rollout_id: str, rewards: Sequence[Sequence[Any]], share: bool) -> list[Any] | None:
        """Account for (prompt id, index, reward, positive) of a rollout that ran here.

        Answers `[detection_length, statuses, num_training, shared]`; None when the rollout is not known here. With
        `share`, labels come with their features, for `teach` on every rank; without, they are learned here and now.
        """
        outcome = self._judge.reward(rollout_id, [tuple(reward) for reward in rewards])
        if outcome is None:
            return None
        detection_length, statuses, labels = outcome
        num_training, shared = 0, []
        for length in sorted({label.detection_length for label in labels}):  # several only among joined requests
            alike = [label for label in labels if label.detection_length == length]
            request_ids = [label.request_id for label in alike]
            if share:
                features, found = self._worker("rollout_take_features", request_ids)
                shared.append([[astuple(label) for label in alike], features, found])
            else:
                positives, weights = [label.positive for label in alike], [label.weight for label in alike]
                found = self._worker("rollout_learn", length, request_ids, positives, weights)
            self._judge.num_evicted[length] += len(alike) - len(found)
            num_training += len(found)
        return [detection_length, statuses, num_training, shared]

    def teach(self, origin: int, shared: Sequence[Sequence[Any]]) -> None:
        """Learn labels that rank `origin` shared: calibration on every other rank, the head on rank 0."""
        for labels, features, found in shared:
            labels = [label_of(label) for label in labels]
            if self._rank != origin:
                self._judge.learn(labels)
            if self._rank == 0 and found:
                self._worker(
                    "rollout_learn_features",
                    labels[0].detection_length,
                    features,
                    [labels[i].positive for i in found],
                    [labels[i].weight for i in found],
                )

    def train(self, budget_s: float) -> int:
        """One slice of training; returns how many optimizer steps are left."""
        return self._worker("rollout_train", budget_s)

    def heads(self) -> list[list[Any]]:
        return self._worker("rollout_heads")

    def export_head(self, detection_length: int) -> bytes | None:
        return self._worker("rollout_export_head", detection_length)

    def put_head(self, data: bytes) -> list[Any]:
        return self._worker("rollout_put_head", data)

    def receive_head(self, data: bytes) -> list[Any]:
        """As `put_head`, on every rank but rank 0, where the head comes from."""
        return ["ok", None] if self._rank == 0 else self.put_head(data)

    def report(self) -> list[list[Any]]:
        """`[detection length, num_awaiting, num_evicted, report]` for each detection length."""
        awaiting, evicted = self._judge.ledger.num_awaiting(), self._judge.num_evicted
        return [
            [length, awaiting[length], evicted[length], asdict(learning.report())]
            for length, learning in self._judge.memory.learnings.items()
        ]

    def state(self) -> bytes:
        """Calibration, heads and lengths as JSON."""
        state = {
            "format": STATE_FORMAT,
            "model": self._model,
            "learnings": [learning.to_state() for learning in self._judge.memory.learnings.values()],
            "heads": [b64encode(head).decode() for head in self._worker("rollout_head_states")],
            "lengths": self._judge.memory.lengths.to_state(),
        }
        return json.dumps(state, allow_nan=False).encode()

    def set_state(self, data: bytes) -> list[Any]:
        """Answers `["ok", None]`, or what is wrong: `["mismatch" | "invalid", message]`; then nothing has changed."""
        try:
            state = json.loads(data)
            if state["format"] != STATE_FORMAT:
                return ["invalid", f"format must be {STATE_FORMAT}, got {state['format']!r}"]
            if state["model"] != self._model:
                return ["mismatch", f"the state is of model {state['model']!r}, this server's is {self._model!r}"]
            memory = Memory.from_state(rows_of_format_1(state))
            heads = [b64decode(head, validate=True) for head in state["heads"]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            return ["invalid", f"not a rollout state ({type(error).__name__}: {error})"]
        answer = self._worker("rollout_restore_heads", heads)
        if answer[0] == "ok":
            self._judge.memory = memory
        return answer


LEARNING_OPERATIONS = (
    LearningCalls.rewards,
    LearningCalls.teach,
    LearningCalls.train,
    LearningCalls.heads,
    LearningCalls.export_head,
    LearningCalls.put_head,
    LearningCalls.receive_head,
    LearningCalls.report,
    LearningCalls.state,
    LearningCalls.set_state,
)
