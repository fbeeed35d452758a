"""An engine core's operations on learned data: rewards, heads, report, state.

With one data-parallel rank, everything is learned where it was observed. With several, rank 0 trains the heads, and the
API process passes its weights to the others. Every rank's calibration learns every label.

Invariant: as in calls.py. A detection length, or an adapter, that the judge forgets is forgotten by the worker before
its next call.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
from vllm.v1.engine.core import EngineCore

from vllm_rollout.config import CALL_BUDGET_S, MAX_ADAPTERS
from vllm_rollout.kernel.call_table import NAME_CHOICES, NamedChoices
from vllm_rollout.kernel.core.calls import call_worker
from vllm_rollout.kernel.core.ports import Answers, CorePart
from vllm_rollout.kernel.parts import face
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward, RewardStatus
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.memories.rules import PROMPTS_PER_ROW
from vllm_rollout.parts.pruning.calls import (
    HEADS,
    LEARN_FEATURES,
    LEARN_LABELS,
    LEARNED,
    LEARNING_WINDOW,
    OPEN_HEAD,
    OPEN_PROMPTS,
    OPEN_STATE,
    POST_REWARDS,
    PUT_HEAD,
    PUT_STATE,
    READ,
    TRAIN,
    TRIED_LENGTHS,
    HeadToPut,
    HeadToRead,
    LabelledFeatures,
    Learned,
    LearningWindow,
    PostedRewards,
    PromptsToRead,
    Refusal,
    RewardsProgress,
    StateToPut,
)
from vllm_rollout.parts.pruning.core.readings import MAX_PIECE_BYTES, Readings
from vllm_rollout.parts.pruning.rules.judge import Judge, Label
from vllm_rollout.parts.pruning.rules.known_prompts import prompt_rows
from vllm_rollout.parts.pruning.rules.length_trial import TriedCandidate
from vllm_rollout.parts.pruning.rules.memory import MEMORY, PruningMemory
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey
from vllm_rollout.parts.pruning.rules.report import HeadInfo
from vllm_rollout.parts.pruning.rules.step import PruningStep
from vllm_rollout.parts.pruning.saved_state import END, head_line, parse_state, state_header

REWARDS_AT_ONCE = 16
"""Rewards that are accounted for, with their features, between two looks at the clock."""

PROMPT_LENGTHS = face("pruning", "prompt_lengths")
"""Returns the lengths of prompts in a memory. None if no lengths are learned."""


class LearningCalls:
    """The operations. `worker` calls a method of the scoring rank's worker."""

    @classmethod
    def of(cls, core: EngineCore) -> LearningCalls:
        scheduler, model = core.scheduler, core.vllm_config.model_config.served_model_name
        judge = scheduler.group_steps.part(PruningStep).judge
        readings = scheduler.part(PruningCore).readings
        return cls(judge, readings, partial(call_worker, core), model=model)  # type: ignore[arg-type]

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

    def post_rewards(self, posted: PostedRewards) -> RewardsProgress:
        deadline = self._clock() + self._budget_s
        progress = RewardsProgress(set(), [])
        for start in range(0, len(posted.rewards), REWARDS_AT_ONCE):
            self._post_some(posted.rewards[start : start + REWARDS_AT_ONCE], posted.share, progress)
            if self._clock() >= deadline:
                break
        return progress

    def _post_some(self, rewards: Sequence[NamedReward], share: bool, progress: RewardsProgress) -> None:
        """Account for some more rewards. The results go into `progress`."""
        ledger = self._judge.ledger
        statuses: list[RewardStatus] = ["unknown"] * len(rewards)
        by_rollout: dict[str, dict[int, Reward]] = defaultdict(dict)
        for position, named in enumerate(rewards):
            if (place := ledger.find(named)) is not None:
                reward = named.reward._replace(prompt_id=place.prompt_id, index=place.index)
                by_rollout[place.rollout_id][position] = reward
        labels: dict[HeadKey, list[Label]] = defaultdict(list)
        """Labels by the head that scored them."""
        accepted: list[Label] = []
        for rollout_id, of_rollout in by_rollout.items():
            outcome = self._judge.record(rollout_id, list(of_rollout.values()))
            assert outcome is not None, "nothing is forgotten while a call runs"
            detection_length, its_statuses, its_labels = outcome
            progress.heads.add(HeadKey(detection_length, ledger.adapter(rollout_id)))
            for position, status in zip(of_rollout, its_statuses, strict=True):
                statuses[position] = status
            accepted.extend(its_labels)
            for label in its_labels:
                for length in label.scores:
                    labels[label.key._replace(detection_length=length)].append(label)
        self._judge.learn(accepted)
        if share:
            progress.labels.extend(accepted)
        progress.statuses.extend(statuses)
        for head, its_labels in labels.items():
            memory = self._judge.known(head.adapter)
            if memory is None:
                continue
            if share:
                num_found = self._take_features(head, its_labels, progress.features)
            else:
                num_found = len(
                    self._worker(
                        "rollout_learn",
                        head,
                        [_state_key(label, head.detection_length) for label in its_labels],
                        [label.positive for label in its_labels],
                        [label.weight for label in its_labels],
                    )
                )
            progress.num_training += num_found
            memory.num_evicted[head.detection_length] += len(its_labels) - num_found

    def _take_features(self, head: HeadKey, labels: Sequence[Label], taken: dict[HeadKey, LabelledFeatures]) -> int:
        """Add the remaining features of these labels to those taken before. Returns the number of features found."""
        keys = [_state_key(label, head.detection_length) for label in labels]
        features, found = self._worker("rollout_take_features", keys)
        if not found:
            return 0
        positives, weights = [labels[i].positive for i in found], [labels[i].weight for i in found]
        if (before := taken.get(head)) is not None:
            features = features._replace(data=before.features.data + features.data)
            positives, weights = before.positives + positives, before.weights + weights
        taken[head] = LabelledFeatures(head, features, positives, weights)
        return len(found)

    def name_choices(self, named: NamedChoices) -> None:
        self._judge.ledger.name(named.name, named.group_id, named.choices)

    def learn_labels(self, labels: Sequence[Label]) -> None:
        self._judge.learn(labels)

    def learn_features(self, labelled: LabelledFeatures) -> None:
        # The labels may arrive at this rank later. This creates the head's place.
        if self._judge.learning_of(labelled.head) is not None:
            self._worker(
                "rollout_learn_features", labelled.head, labelled.features, labelled.positives, labelled.weights
            )

    def train(self, budget_s: float) -> int:
        return self._worker("rollout_train", budget_s)

    def heads(self) -> list[HeadInfo]:
        return self._worker("rollout_heads")

    def put_head(self, put: HeadToPut) -> HeadInfo | Refusal:
        """Put a head in place of the one for its detection length. If the maximum of detection lengths is reached, it
        replaces a spare one.
        """
        awaits = partial(self._judge.ledger.awaits, adapter=put.adapter)
        if not self._judge.memories.has_place(put.adapter):
            return Refusal(
                "invalid",
                f"at most {MAX_ADAPTERS} adapters are learned of, and rewards are awaited for all there are, got a "
                f"head for {put.adapter!r:.200}: post those rewards first",
            )
        memory = self._judge.known(put.adapter) or PruningMemory()  # no memory is dropped for a head that is refused
        spare = memory.spare(awaits) if memory.is_full else None
        answer = self._worker("rollout_put_head", put.data, list(memory.learnings), spare, put.adapter)
        if isinstance(answer, HeadInfo):
            learning = self._judge.learning_of(answer.key)
            if learning is not None:
                learning.begin_head(answer.version)
        return answer

    def open_head(self, wanted: HeadToRead) -> bool:
        size = self._worker("rollout_open_head", wanted.reader, wanted.head)
        if size is None:
            return False
        self._readings.open(wanted.reader, self._opened(wanted.reader, size))
        return True

    def learned(self) -> list[Learned]:
        found = []
        for adapter, memory in self._judge.all().items():
            awaiting, evicted = self._judge.ledger.num_awaiting(adapter), memory.num_evicted
            found += [
                Learned(
                    HeadKey(length, adapter),
                    awaiting[length],
                    evicted[length],
                    learning.num_judged,
                    learning.num_pruned,
                )
                for length, learning in memory.learnings.items()
            ]
        return found

    def learning_window(self, head: HeadKey) -> LearningWindow | None:
        memory = self._judge.known(head.adapter)
        learning = None if memory is None else memory.learnings.get(head.detection_length)
        if learning is None:
            return None
        losses = self._worker("rollout_head_losses", head)
        return LearningWindow(learning.outcomes(), losses, learning.audit_report())

    def open_state(self, reader: str) -> None:
        self._readings.open(reader, self._state(reader))

    def tried_lengths(self, adapter: str) -> list[TriedCandidate]:
        memory = self._judge.known(adapter)
        return [] if memory is None else list(memory.tried)

    def open_prompts(self, wanted: PromptsToRead) -> None:
        memory, encode = self._judge.memories.known(wanted.adapter) or {}, msgspec.json.Encoder().encode
        learned = MEMORY.of(memory) or PruningMemory()
        lengths = None if PROMPT_LENGTHS is None else PROMPT_LENGTHS(memory)
        rows = prompt_rows(lengths, learned.successes, PROMPTS_PER_ROW)
        self._readings.open(wanted.reader, (encode(some) + b"\n" for some in rows))

    def put_state(self, put: StateToPut) -> Refusal | None:
        try:
            state = parse_state(put.data)
            if state.model != self._model:
                return Refusal(
                    "mismatch", f"the state is of model {state.model!r:.200}, this server's is {self._model!r}"
                )
            memories = self._judge.memories.restored(state.rows)
            learned = {name: MEMORY.of(memory) or PruningMemory() for name, memory in memories.all().items()}
            heads = state.heads(list(memories.all()))
        except ValueError as error:
            return Refusal("invalid", f"not a rollout state ({error})")
        known = [HeadKey(length, name) for name, memory in learned.items() for length in memory.learnings]
        answer = self._worker("rollout_restore_heads", heads, known, put.only_check)
        if isinstance(answer, Refusal):
            return answer
        if put.only_check:
            return None
        for head in answer:  # one may have been put before anything was judged at its length
            learned[head.adapter].learning(head.detection_length, lambda length: True)
        self._judge.memories.take_over(memories)
        return None

    def _state(self, reader: str) -> Iterator[bytes]:
        """The parts of a state (`saved_state.py`), made as they are read."""
        encode = msgspec.json.Encoder().encode
        yield encode(state_header(self._model)) + b"\n"
        written: set[HeadKey] = set()  # heads whose lengths have rows
        adapter = BASE_MODEL
        for row in self._judge.memories.to_state():
            match row:
                case ["adapter", name]:
                    adapter = name
                case ["learning", {"detection_length": length}]:
                    written.add(HeadKey(length, adapter))
            yield encode(row) + b"\n"
        num_heads = 0
        for head in self.heads():
            if head.key not in written:  # its length came after the rows, and may be one too many
                continue
            while (size := self._worker("rollout_copy_head_state", reader, head.key)) == 0:
                yield b""
            if size is not None:
                num_heads += 1
                yield encode(head_line(size, head.adapter)) + b"\n"
                yield from self._opened(reader, size)
        yield encode([END, num_heads]) + b"\n"

    def _opened(self, reader: str, size: int) -> Iterator[bytes]:
        """Pieces of data that the worker has opened."""
        for start in range(0, size, MAX_PIECE_BYTES):
            yield self._worker("rollout_read", reader, start, min(size, start + MAX_PIECE_BYTES))

    def _worker(self, method: str, *args: Any) -> Any:
        if forgotten := self._judge.take_forgotten():
            self._call_worker("rollout_forget_heads", forgotten)
        return self._call_worker(method, *args)


def _state_key(label: Label, length: int) -> tuple[str, int, bool]:
    """Key of the hidden state that was scored at this length (`parts/pruning/worker/feature_ring.py::StateKey`)."""
    return (label.request_id, label.num_tokens, True) if length == WHOLE else (label.request_id, length, False)


class PruningCore(CorePart):
    def __init__(self, scheduler: Any) -> None:
        self.readings = Readings()

    answers: ClassVar[Answers] = {
        READ: lambda core, reader: core.scheduler.part(PruningCore).readings.read(reader),
        POST_REWARDS: lambda core, posted: LearningCalls.of(core).post_rewards(posted),
        NAME_CHOICES: lambda core, named: LearningCalls.of(core).name_choices(named),
        LEARN_LABELS: lambda core, labels: LearningCalls.of(core).learn_labels(labels),
        LEARN_FEATURES: lambda core, labelled: LearningCalls.of(core).learn_features(labelled),
        TRAIN: lambda core, budget_s: LearningCalls.of(core).train(budget_s),
        HEADS: lambda core, _: LearningCalls.of(core).heads(),
        PUT_HEAD: lambda core, put: LearningCalls.of(core).put_head(put),
        OPEN_HEAD: lambda core, head: LearningCalls.of(core).open_head(head),
        LEARNED: lambda core, _: LearningCalls.of(core).learned(),
        LEARNING_WINDOW: lambda core, head: LearningCalls.of(core).learning_window(head),
        OPEN_STATE: lambda core, reader: LearningCalls.of(core).open_state(reader),
        TRIED_LENGTHS: lambda core, adapter: LearningCalls.of(core).tried_lengths(adapter),
        OPEN_PROMPTS: lambda core, wanted: LearningCalls.of(core).open_prompts(wanted),
        PUT_STATE: lambda core, put: LearningCalls.of(core).put_state(put),
    }
