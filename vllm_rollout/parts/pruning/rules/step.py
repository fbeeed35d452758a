"""Pruning in an engine's step: audits, verdicts by scores, and the ledger of candidates whose reward may come.

In an audit group with early stop the first `group_size` candidates that arrive get places, and only the others are
stopped. Candidates are exchangeable before they begin, so those with places are a plain sample of the policy. A lost
candidate frees its place.

Invariant: every scored candidate has one entry in the ledger, in the engine in which it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from vllm_rollout.kernel.rules.detached import DetachedGroup
from vllm_rollout.kernel.rules.keys import Key
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.step import Ended, Entered, GroupSteps, Phase, Step, StepPart
from vllm_rollout.kernel.rules.types import CandidateId
from vllm_rollout.parts.memories.rules import Memories
from vllm_rollout.parts.pruning.rules.assessment import NO_SCORES, Assessment, Scores
from vllm_rollout.parts.pruning.rules.audit import draw_audit
from vllm_rollout.parts.pruning.rules.judge import Judge, JudgedGroup
from vllm_rollout.parts.pruning.rules.ledger import LedgerEntry, Scoring, Trial
from vllm_rollout.parts.pruning.rules.pruning_plan import Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.race_bias import LabelOrigin
from vllm_rollout.parts.pruning.rules.terms import PruningTerms

PRUNING = "pruning"


@dataclass(frozen=True, slots=True)
class TakenScore:
    """Scoring of a running candidate, with its observation and assessments so far."""

    scoring: Scoring
    observation: Observation | None = None
    assessment: Assessment | None = None
    trials: dict[int, Trial] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """State of a group with pruning that moves to another engine."""

    audit: bool
    places: list[int]
    assessments: dict[int, Assessment]
    trials: dict[int, dict[int, Assessment]]
    finals: dict[int, Assessment]
    scores: dict[int, TakenScore]
    """Scoring of running candidates, by index."""


TERMS: Key[PruningTerms] = Key(PRUNING)
SCORING: Key[Scoring] = Key(PRUNING)
SCORES: Key[Scores] = Key(PRUNING)
JUDGED: Key[JudgedGroup] = Key(PRUNING)

ON_THE_WIRE: Mapping[str, Any] = {"terms": PruningTerms, "said": Scoring, "note": Scores, "taken": TakenGroup}
"""Types of the values of this part that go from process to process."""


class _Scored(NamedTuple):
    """Scoring and ledger entry of a candidate, from launch to end."""

    scoring: Scoring
    entry: LedgerEntry


class PruningStep(StepPart):
    """Scores in, verdicts out, for all groups of one engine."""

    name = PRUNING

    def __init__(self, judge: Judge | None = None) -> None:
        self.judge = judge or Judge()
        self._scored: dict[CandidateId, _Scored] = {}
        self._without_place: dict[str, list[int]] = {}
        """Candidates of audit groups that found no place since the last step."""

    def fresh(self) -> PruningStep:
        for scored in self._scored.values():
            scored.entry.state = "failed"
        return PruningStep(self.judge)

    def remember_in(self, memories: Memories) -> None:
        if self.judge.memories is not memories:
            self.judge.remember_in(memories)

    def phases(self) -> Mapping[Phase, Callable[[Step], None]]:
        return {"told": self._say_who_has_no_place, "settled": self._judge, "ends": self._write}

    def enter(self, id: CandidateId, group: Group, entered: Entered, steps: GroupSteps) -> None:
        terms = TERMS.of(group.terms.parts)
        if terms is None or entered.said is None:
            return
        scoring: Scoring = replace(entered.said, adapter=entered.adapter)
        judged = JUDGED.of(group.parts)
        if judged is None:
            audit = draw_audit(terms.audit_ratio, scoring.seed, id.group_id)
            judged = group.parts[PRUNING] = judged_group(group, terms, audit=audit)
        if judged.audit and group.terms.early_stop:
            if judged.num_holders < group.terms.group_size:
                judged.places.add(id.index)
            else:
                self._without_place.setdefault(id.group_id, []).append(id.index)
                steps.settle_next(id.group_id)
        self._remember(id, judged, scoring, entered.request_id)

    def differing(self, ours: PruningTerms | None, theirs: PruningTerms | None) -> tuple[str, object, object]:
        for each in fields(PruningPlan):
            known, said = (terms and getattr(terms.plan, each.name) for terms in (ours, theirs))
            if known != said:
                return f"pruning.{each.name}", known, said
        known_ratio, said_ratio = (0.0 if terms is None else terms.audit_ratio for terms in (ours, theirs))
        return "audit_ratio", known_ratio, said_ratio

    def note(self, id: CandidateId, group: Group) -> Scores | None:
        if (judged := JUDGED.of(group.parts)) is None:
            return None
        scores = Scores(judged.assessments.get(id.index), judged.finals.get(id.index))
        return None if scores == NO_SCORES else scores

    def take(self, group_id: str, group: Group) -> TakenGroup | None:
        judged = JUDGED.of(group.parts)
        if judged is None:
            return None
        scores = {}
        for index in group.running:
            scored = self._scored.pop(CandidateId(group_id, index), None)
            if scored is not None:
                entry = self.judge.ledger.take(scored.scoring.rollout_id, scored.scoring.prompt_id, index)
                seen = () if entry is None else (entry.observation, entry.assessment, dict(entry.trials))
                scores[index] = TakenScore(scored.scoring, *seen)
        return TakenGroup(judged.audit, sorted(judged.places), judged.assessments, judged.trials, judged.finals, scores)

    def put(self, detached: DetachedGroup, value: TakenGroup, steps: GroupSteps) -> None:
        group, terms = detached.group, TERMS.of(detached.group.terms.parts)
        assert terms is not None
        judged = group.parts[PRUNING] = judged_group(group, terms, audit=value.audit)
        judged.places.update(value.places)
        judged.assessments, judged.trials, judged.finals = value.assessments, value.trials, value.finals
        for index, score in value.scores.items():
            id = CandidateId(detached.group_id, index)
            entry = self._remember(id, judged, score.scoring, detached.request_ids[index])
            entry.observation, entry.assessment = score.observation, score.assessment
            for length, trial in score.trials.items():
                entry.tried(length, *trial)

    def drop(self, group_id: str) -> None:
        self._without_place.pop(group_id, None)
        for id in [id for id in self._scored if id.group_id == group_id]:
            self._scored.pop(id).entry.state = "failed"  # no reward is awaited any more

    def _remember(self, id: CandidateId, judged: JudgedGroup, scoring: Scoring, request_id: str) -> LedgerEntry:
        """Open the ledger's entry of a candidate, for a later reward."""
        entry = self.judge.ledger.open(scoring, id, request_id, judged.plan, _origin(judged))
        self._scored[id] = _Scored(scoring, entry)
        return entry

    def _say_who_has_no_place(self, step: Step) -> None:
        for group_id, indices in self._without_place.items():
            step.no_place(group_id, indices)
        self._without_place.clear()

    def _judge(self, step: Step) -> None:
        siblings: dict[str, dict[int, Observation]] = {}
        for id, observation in step.seen.get(PRUNING, {}).items():
            if id in self._scored:
                siblings.setdefault(id.group_id, {})[id.index] = observation
        # Groups learn from each other's scores, so the batch must not set the order.
        scoring = {id: self._scored[CandidateId(id, min(seen))].scoring for id, seen in siblings.items()}
        for group_id in sorted(siblings, key=lambda id: (scoring[id].prompt_id, id)):
            step.alone(group_id, self._judge_group, step, group_id, scoring[group_id], siblings[group_id])

    def _judge_group(self, step: Step, group_id: str, scoring: Scoring, siblings: Mapping[int, Observation]) -> None:
        """Judge due candidates of a group. `scoring`: of the sibling with the lowest index, since requests that join a
        group may bring different seeds."""
        group = step.touched[group_id]
        judged = JUDGED.of(group.parts)
        if group.closed or judged is None:
            return
        due = {index: (self._scored[CandidateId(group_id, index)].entry, seen) for index, seen in siblings.items()}
        if pruned := self.judge.judge(judged, scoring, due):
            step.rule_out(group_id, pruned, "pruned")

    def _write(self, step: Step) -> None:
        """Write the ends of this step to the ledger."""
        for ended in step.ended:
            step.alone(ended.id.group_id, self._write_ended, ended)
        for id in step.stop:
            step.alone(id.group_id, self._write_end, id, step.touched[id.group_id], step.num_tokens(id))

    def _write_ended(self, ended: Ended) -> None:
        self._write_end(ended.id, ended.group, ended.num_tokens, ended.seen.get(PRUNING))

    def _write_end(self, id: CandidateId, group: Group, num_tokens: int, last: Observation | None = None) -> None:
        scored = self._scored.pop(id, None)
        if scored is None:
            return
        entry, judged = scored.entry, JUDGED.of(group.parts)
        entry.state, entry.num_tokens = group.state(id.index), num_tokens
        if last is not None and judged is not None and judged.plan.final_score and entry.state == "finished":
            assessment = self.judge.value(entry, last)
            if assessment is not None:
                judged.finals[id.index] = assessment


def judged_group(group: Group, terms: PruningTerms, *, audit: bool = False) -> JudgedGroup:
    """A group with its plan. In an audit group pruning stops no candidate."""
    return JudgedGroup(group, terms.plan.audited(group.terms.races) if audit else terms.plan, audit)


def _origin(judged: JudgedGroup) -> LabelOrigin:
    """Kind of group that the labels come from."""
    if judged.plan.audit:
        return "audit" if judged.plan.is_instead_of_race else "plain_audit"
    return "race" if judged.group.terms.races else "plain"
