"""Judges candidates by their scores, and improves its rules by rewards.

Invariant: a candidate is judged once, while it runs, by earlier observations and rewards only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp

from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.rewards import Reward, RewardStatus
from vllm_rollout.kernel.rules.types import BASE_MODEL, Signal
from vllm_rollout.parts.memories.rules import Memories, Memory
from vllm_rollout.parts.pruning.rules.assessment import Assessment
from vllm_rollout.parts.pruning.rules.learning import Learning, Siblings, label_weight
from vllm_rollout.parts.pruning.rules.ledger import Ledger, LedgerEntry, Scoring, Trial
from vllm_rollout.parts.pruning.rules.length_trial import TriedCandidate
from vllm_rollout.parts.pruning.rules.memory import MEMORY, PruningMemory
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey, Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.race_bias import LabelOrigin
from vllm_rollout.parts.pruning.rules.report import RewardedCandidate
from vllm_rollout.parts.pruning.rules.success import MAX_LABEL_WEIGHT


@dataclass(frozen=True, slots=True)
class Label:
    """A rewarded candidate, with the data for calibration and head."""

    detection_length: int
    request_id: str
    """Name of its features in the worker."""
    prompt_id: str
    observation: Observation | None
    """None: it ended before `detection_length`, and has no scores or those at other lengths. Then `assessment` is None
    too."""
    assessment: Assessment | None
    num_tokens: int
    positive: bool
    active: bool
    """True if pruning was active, so that the candidate survived with its survival probability."""
    prompt_key: str = ""
    """`Scoring.prompt_key` of the candidate."""
    origin: LabelOrigin = "plain"
    trials: Mapping[int, Trial] = field(default_factory=dict)
    """Its scores at other lengths, by length."""
    tried_lengths: tuple[int, ...] = ()
    """All detection lengths of its plan, if there are several. Else empty."""
    adapter: str = BASE_MODEL
    num_resumed: int = 0
    survival_before: float = 1.0
    """`adapter`, `num_resumed` and `survival_before` are those of `Scoring`."""

    @property
    def key(self) -> HeadKey:
        """Key of the head that learns from the label."""
        return HeadKey(self.detection_length, self.adapter)

    @property
    def weight(self) -> float:
        """Weight of its loss: 1 / probability of survival in earlier rounds and, with active pruning, in this one."""
        at_stake = self.assessment if self.active else None
        return label_weight(self.survival_before * (1.0 if at_stake is None else at_stake.survival_probability))

    @property
    def whole_length(self) -> int:
        """Tokens, with those of earlier rounds."""
        return self.num_resumed + self.num_tokens

    @property
    def scores(self) -> dict[int, Trial]:
        """All its scores, by length."""
        if self.observation is None or self.assessment is None:
            return dict(self.trials)
        return {self.detection_length: Trial(self.observation, self.assessment), **self.trials}


@dataclass(slots=True)
class JudgedGroup:
    """A group with pruning, and its scores."""

    group: Group
    plan: PruningPlan
    """Pruning plan of the candidates."""
    audit: bool = False
    """True for an audit group (`parts/pruning/rules/step.py`)."""
    places: set[int] = field(default_factory=set)
    """Candidates of an audit group that have a place."""
    assessments: dict[int, Assessment] = field(default_factory=dict)
    """Decisions on scored candidates, by index."""
    trials: dict[int, dict[int, Assessment]] = field(default_factory=dict)
    """Decisions that each trial length would have made, by length and index."""
    finals: dict[int, Assessment] = field(default_factory=dict)
    """Assessments of finished candidates that were scored at their end, by index."""

    @property
    def num_holders(self) -> int:
        """Number of running and finished candidates that have a place."""
        return sum(self.group.state(index) in ("running", "finished") for index in self.places)

    def num_needed(self, num_due: int, at_least: int) -> int:
        """Number of `num_due` running candidates to keep, so that `at_least` candidates can finish.

        Candidates that shadow mode marked count as stopped. So later verdicts are those that active mode would give.
        """
        group, marked = self.group, {i for i, assessment in self.assessments.items() if not assessment.keep}
        num_able = sum(group.state(i) in ("running", "finished") and i not in marked for i in group.indices)
        num_others = num_able - num_due + group.num_to_come
        return min(num_due, max(0, at_least - num_others))

    def num_unjudged(self, assessments: Mapping[int, Assessment]) -> int:
        """Number of candidates that run or are to come, and have no assessment among these."""
        return self.group.num_to_come + sum(index not in assessments for index in self.group.running)


class Judge:
    """Judges the candidates of one engine, and keeps those that may still get a reward."""

    def __init__(self, memories: Memories | None = None) -> None:
        """`memories`: of the engine. None: the judge has its own."""
        self.ledger = Ledger()
        self._forgotten: list[HeadKey] = []
        """Heads of adapters that were given up."""
        self.remember_in(memories or Memories({MEMORY.part: PruningMemory}))

    def remember_in(self, memories: Memories) -> None:
        """Learn in these memories from now on."""
        self.memories = memories
        memories.awaits.append(self.ledger.awaits_any)
        memories.on_given_up.append(self._given_up)

    @property
    def memory(self) -> PruningMemory:
        """Memory of the base model."""
        memory = self.known(BASE_MODEL)
        assert memory is not None, "it is never given up"
        return memory

    def known(self, adapter: str) -> PruningMemory | None:
        """Memory of this served name without any use of it. None if there is none."""
        memory = self.memories.known(adapter)
        return None if memory is None else MEMORY.of(memory)

    def judge(
        self, group: JudgedGroup, scoring: Scoring, due: Mapping[int, tuple[LedgerEntry, Observation]]
    ) -> list[int]:
        """Judge running siblings that are due in one step. Returns those to stop.

        No score is judged at a new length if `MAX_DETECTION_LENGTHS` lengths still await rewards, nor for a new adapter
        beyond `MAX_ADAPTERS`. No candidate is judged twice, though an engine may drop a token and sample it again.
        """
        plan = group.plan
        for length in plan.tried_lengths:
            tried = group.trials.setdefault(length, {})
            here = {i: seen for i, seen in due.items() if seen[1].detection_length == length and i not in tried}
            if here:
                for index, assessment in self._assess(length, group, plan, scoring, here, tried).items():
                    entry, observation = here[index]
                    entry.tried(length, observation, assessment)
        due = {
            index: seen
            for index, seen in due.items()
            if index not in group.assessments and seen[1].detection_length in (None, plan.detection_length)
        }
        assessments = self._assess(plan.detection_length, group, plan, scoring, due, group.assessments)
        for index, assessment in assessments.items():
            entry, observation = due[index]
            entry.observation, entry.assessment = observation, assessment
        if plan.mode == "shadow":
            return []
        return [index for index, assessment in assessments.items() if not assessment.keep]

    def _assess(
        self,
        length: int,
        group: JudgedGroup,
        plan: PruningPlan,
        scoring: Scoring,
        due: Mapping[int, tuple[LedgerEntry, Observation]],
        earlier: dict[int, Assessment],
    ) -> dict[int, Assessment]:
        """Assess siblings at this length. `earlier`: assessments of other siblings, to which the results are added.

        Empty if there is no memory for this length.
        """
        memory, learning = self._at(HeadKey(length, scoring.adapter))
        if memory is None or learning is None or not due:
            return {}
        siblings = Siblings(
            scoring.seed,
            scoring.prompt_id,
            at_least=group.num_needed(len(due), 1 if plan.allow_fewer else group.group.terms.group_size),
            earlier=earlier,
            num_to_come=group.num_unjudged(earlier) - len(due),
            past=memory.successes.of(scoring.prompt_key),
        )
        observations = {index: observation for index, (_, observation) in due.items()}
        assessments = learning.assess(plan, observations, siblings)
        earlier.update(assessments)
        return assessments

    def value(self, entry: LedgerEntry, observation: Observation) -> Assessment | None:
        """Score a finished candidate by its last token. None if there is no memory for such scores."""
        learning = self.learning_of(HeadKey(WHOLE, entry.adapter))
        if learning is None:
            return None
        survived = entry.assessment if entry.plan.mode == "active" else None
        assessment = learning.value(observation, 1.0 if survived is None else survived.survival_probability)
        entry.tried(WHOLE, observation, assessment)
        return assessment

    def reward(self, rollout_id: str, rewards: Sequence[Reward]) -> tuple[int, list[RewardStatus], list[Label]] | None:
        """Record rewards as `record` does, and learn from them."""
        if (recorded := self.record(rollout_id, rewards)) is not None:
            self.learn(recorded[2])
        return recorded

    def record(self, rollout_id: str, rewards: Sequence[Reward]) -> tuple[int, list[RewardStatus], list[Label]] | None:
        """Record rewards, from which `learn` has yet to learn.

        Returns the rollout's detection length, the status of each reward, and labels for calibration and head. None if
        the rollout is unknown.
        """
        detection_length = self.ledger.detection_length(rollout_id)
        if detection_length is None:
            return None
        statuses: list[RewardStatus] = []
        labels: list[Label] = []
        for prompt_id, index, reward, positive in rewards:
            status, entry = self.ledger.reward(rollout_id, prompt_id, index, reward)
            statuses.append(status)
            if entry is not None and (entry.is_scored or entry.prompt_key):
                labels.append(_label(rollout_id, entry, positive))
        return detection_length, statuses, labels

    def learn(self, labels: Sequence[Label]) -> None:
        """Update calibration, the prompts' success rates, and the statistics of the report."""
        predicted = [self._predicted(label) for label in labels]  # the first label that is added changes the tables
        for label, its in zip(labels, predicted, strict=True):
            # A label without scores takes no place of a detection length.
            memory, learning = self._at(label.key) if label.scores else (self.memory_of(label.adapter), None)
            rewarded = {
                length: self._learn_at(length, label, *seen, its.get(length)) for length, seen in label.scores.items()
            }
            if memory is not None and label.tried_lengths and label.scores:
                memory.tried.append(
                    TriedCandidate(
                        label.tried_lengths,
                        tuple({} if (r := rewarded.get(at)) is None else r.scores for at in label.tried_lengths),
                        label.positive,
                        label.whole_length,
                        label.prompt_key or label.prompt_id,
                    )
                )
            if memory is not None and label.prompt_key:
                answers, learning = 1.0, learning or memory.learnings.get(label.detection_length)
                if label.positive and label.origin == "race" and learning is not None:
                    answers = exp(learning.most_audited.intercept.value)
                weight = min(MAX_LABEL_WEIGHT, label.weight * answers)
                memory.successes.observe(label.prompt_key, label.positive, weight)

    def _predicted(self, label: Label) -> dict[int, dict[Signal, float]]:
        """Success of a candidate as each signal predicts it, by length, for lengths that are learned already."""
        memory = self.known(label.adapter)
        learnings = {} if memory is None else memory.learnings
        return {at: learnings[at].predicted(*seen) for at, seen in label.scores.items() if at in learnings}

    def _learn_at(
        self,
        length: int,
        label: Label,
        observation: Observation,
        assessment: Assessment,
        predicted: Mapping[Signal, float] | None,
    ) -> RewardedCandidate | None:
        learning = self.learning_of(label.key._replace(detection_length=length))
        if learning is None:
            return None
        return learning.reward(
            observation,
            assessment,
            label.whole_length,
            positive=label.positive,
            group_key=label.prompt_id,
            active=label.active,
            origin=label.origin,
            survival_before=label.survival_before,
            predicted=predicted,
        )

    def all(self) -> dict[str, PruningMemory]:
        """All memories by served name, the base model's first."""
        return {adapter: memory for adapter in self.memories.all() if (memory := self.known(adapter)) is not None}

    def memory_of(self, adapter: str) -> PruningMemory | None:
        """Memory of this served name. None if rewards are awaited for the largest number of other names."""
        memory = self.memories.of(adapter)
        return None if memory is None else MEMORY.of(memory)

    def take_forgotten(self) -> list[HeadKey]:
        """Detection lengths and adapters that were given up since the last call. Their heads may be dropped too."""
        taken, self._forgotten = self._forgotten, []
        for adapter, memory in self.all().items():
            taken += [HeadKey(length, adapter) for length in memory.forgotten]
            memory.forgotten.clear()
        return taken

    def _given_up(self, adapter: str, memory: Memory) -> None:
        if (learned := MEMORY.of(memory)) is not None:
            self._forgotten += [HeadKey(length, adapter) for length in {*learned.forgotten, *learned.learnings}]

    def learning_of(self, key: HeadKey) -> Learning | None:
        """Learning of this key. None if rewards are awaited for the largest number of other lengths, or of adapters."""
        return self._at(key)[1]

    def _at(self, key: HeadKey) -> tuple[PruningMemory | None, Learning | None]:
        memory = self.memory_of(key.adapter)
        if memory is None:
            return None, None
        return memory, memory.learning(key.detection_length, partial(self.ledger.awaits, adapter=key.adapter))


def _label(rollout_id: str, entry: LedgerEntry, positive: bool) -> Label:
    return Label(
        detection_length=entry.plan.detection_length,
        request_id=entry.request_id,
        prompt_id=f"{rollout_id}/{entry.prompt_id}",
        observation=entry.observation,
        assessment=entry.assessment,
        num_tokens=entry.num_tokens,
        positive=positive,
        active=entry.plan.mode == "active",
        prompt_key=entry.prompt_key,
        origin=entry.origin,
        trials=entry.trials,
        tried_lengths=entry.plan.scored_lengths if entry.plan.tried_lengths else (),
        adapter=entry.adapter,
        num_resumed=entry.num_resumed,
        survival_before=entry.survival_before,
    )
