"""The order of one engine step: events in, verdicts out.

    launch, ended            events, while the step is processed
    cancel, give_up          nobody wants the rest of a group; whoever launched candidates needs them no more
    detach, attach           between two steps: a group leaves for another engine, or comes from one
    close_step               1. what ended is told to its group     2. each race that had an event is settled
                             3. scores of the step are judged       4. races are settled again, where that pruned
                             5. what is too long is given up        6. what nobody needs is given up
                             7. races of groups are settled         8. cancelled groups stop
                             9. the ledger is written, groups that are over are forgotten

vLLM's scheduler, the simulator and the tests' engine translate their events into these calls and obey the verdicts;
none of them has an order of its own.

Invariant: every candidate that was launched gets exactly one end, and no verdict names one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import ParamSpec, TypeVar

from vllm_rollout.config import MAX_IDLE_GROUPS
from vllm_rollout.group.judging.audit import draw_audit
from vllm_rollout.group.judging.judge import Judge
from vllm_rollout.group.judging.ledger import LedgerEntry, Scoring
from vllm_rollout.group.judging.race_bias import LabelOrigin
from vllm_rollout.group.plans.pruning_plan import PruningPlan
from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.group.racing.lifecycle import Group
from vllm_rollout.group.racing.race import RacePlace, RaceTable
from vllm_rollout.group.racing.sibling_table import SiblingTable
from vllm_rollout.group.step.moving import DetachedGroup, DetachedScore, StayReason
from vllm_rollout.group.types import CandidateId, EndReason, HeldGroups, Observation, StopState

P = ParamSpec("P")
T = TypeVar("T")


class LaunchRefused(ValueError):
    """A candidate cannot enter the group it names. The text is for the client: what, value, allowed, remedy."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a step decided."""

    stop: Mapping[CandidateId, StopState] = field(default_factory=dict)
    """Running candidates to stop now, and as what."""
    lost_ties: frozenset[CandidateId] = frozenset()
    """Candidates that ended by themselves in this step, but after `group_size` others: surplus, with all tokens."""
    over: tuple[str, ...] = ()
    """Groups that are over since this step."""
    lost_groups: frozenset[str] = frozenset()
    """Groups that completed in this step, but after as many others as their race wanted."""
    broken: Mapping[str, Exception] = field(default_factory=dict)
    """Groups whose rules raised: they are forgotten, and none of their candidates is named above."""


NO_VERDICTS = Verdicts()


@dataclass(slots=True)
class _Scored:
    """What judging a candidate needs."""

    scoring: Scoring
    entry: LedgerEntry
    """The place where what its reward will need is written."""


class GroupSteps:
    """All groups of one engine."""

    def __init__(self, judge: Judge, max_idle: int = MAX_IDLE_GROUPS, *, contains: bool = False) -> None:
        """`contains`: an exception in the rules of one group breaks that group (`Verdicts.broken`), not the step."""
        self.judge = judge
        self.races = RaceTable()
        self._table: SiblingTable[Group] = SiblingTable(max_idle)
        self._scored: dict[CandidateId, _Scored] = {}
        """Candidates that are scored, from launch to end."""
        self._ended: list[tuple[CandidateId, Group, EndReason, int, Observation | None]] = []
        """Candidates that ended since the last step was closed; the next two tell of that time, too."""
        self._touched: dict[str, Group] = {}
        self._cancelled: dict[str, Group] = {}
        self._given_up: dict[str, set[int]] = {}
        """Candidates that nobody needs, by group."""
        self._capped: dict[str, Group] = {}
        """Groups whose running candidates are given up when they reach a length; in each something runs."""
        self._contained = (Exception,) if contains else ()
        self._broken: dict[str, Exception] = {}
        """Groups whose rules raised since the last step was closed."""

    def __len__(self) -> int:
        """Groups that are not over."""
        return len(self._table)

    @property
    def held(self) -> HeldGroups:
        return HeldGroups(len(self._table) - self._table.num_waiting, self._table.num_waiting, len(self.races))

    @property
    def has_events(self) -> bool:
        """Whether `close_step` has anything to do, even if nothing is due."""
        return bool(self._touched or self._capped)

    def launch(
        self,
        group_id: str,
        terms: GroupTerms,
        index: int | None = None,
        *,
        request_id: str = "",
        scoring: Scoring | None = None,
        place: RacePlace | None = None,
    ) -> tuple[CandidateId, Group]:
        """A candidate enters the group of that id, which its first candidate makes; without an index it takes the next.

        Raises: LaunchRefused when the group was made on other terms, or has that index already.
        """
        group = self._table.find(group_id)
        if group is not None and group.terms != terms:
            raise LaunchRefused(_disagreement(group.terms, terms))
        if group is not None and index is not None and group.has(index):
            raise LaunchRefused(f"index {index} of this group is taken. Name another group.")
        if group is None:
            group = Group(terms, scoring is not None and draw_audit(terms.audit_ratio, scoring.seed, group_id))
        self._table.put(group_id, group)
        candidate_id = CandidateId(group_id, group.launch(index))
        if group.length_cap is not None:
            self._capped[group_id] = group
        if scoring is not None:
            self._remember(candidate_id, scoring, request_id, group)
        if place is not None and self.races.enter(group_id, group, place):
            self.cancel(group_id)
        if group.is_unwanted(candidate_id.index):
            self._touched[group_id] = group  # the next step says so
        return candidate_id, group

    def ended(
        self,
        candidate_id: CandidateId,
        group: Group,
        reason: EndReason,
        num_tokens: int,
        last: Observation | None = None,
    ) -> None:
        """A candidate ended without a verdict. `last`: what its last token showed, where that is wanted."""
        self._ended.append((candidate_id, group, reason, num_tokens, last))
        self._touched[candidate_id.group_id] = group

    def cancel(self, group_id: str) -> bool:
        """Nobody wants the rest of this group now: what runs at the end of the step stops as `deferred`.

        False when there is no such group, for example because it is over.
        """
        group = self._table.find(group_id)
        if group is None:
            return False
        self._touched[group_id] = self._cancelled[group_id] = group
        return True

    def give_up(self, group_id: str, indices: Iterable[int]) -> None:
        """Whoever launched these candidates needs them no more: who runs at the end of the step stops as `surplus`."""
        group = self._table.find(group_id)
        if group is not None:
            self._touched[group_id] = group
            self._given_up.setdefault(group_id, set()).update(indices)

    def cut(self, race_id: str) -> None:
        """Enough groups of this race are complete, here and elsewhere: the others stop as `deferred`, those that are on
        their way here included."""
        for group_id in self.races.cut(race_id):
            self.cancel(group_id)

    def running(self, group_id: str) -> list[CandidateId]:
        """Candidates of a group that is known here and not over."""
        group = self._table.find(group_id)
        return [] if group is None else [CandidateId(group_id, index) for index in group.running]

    def stays_because(self, group_id: str) -> StayReason | None:
        """Why this group cannot be detached now; None when it can."""
        if self._table.find(group_id) is None:
            return "over"
        return "busy" if group_id in self._touched else None

    def detach(self, group_id: str, request_ids: Mapping[int, str]) -> DetachedGroup:
        """Let go of a group that nothing keeps here (`stays_because`). `request_ids`: of its running candidates."""
        group = self._table.remove(group_id)
        for waiting in (self._touched, self._cancelled, self._given_up, self._capped):
            waiting.pop(group_id, None)
        scores = {}
        for index in group.running:
            scored = self._scored.pop(CandidateId(group_id, index), None)
            if scored is None:
                continue
            entry = self.judge.ledger.take(scored.scoring.rollout_id, scored.scoring.prompt_id, index)
            scores[index] = (
                DetachedScore(scored.scoring)
                if entry is None
                else DetachedScore(scored.scoring, entry.observation, entry.assessment, dict(entry.trials))
            )
        return DetachedGroup(group_id, group, scores, dict(request_ids), self.races.leave(group_id))

    def attach(self, detached: DetachedGroup, now_s: float = 0.0) -> Group:
        """Take up a group that another engine let go of, or this one; `now_s` as in `close_step`."""
        group_id, group = detached.group_id, detached.group
        assert self._table.find(group_id) is None, f"group {group_id} is here already"
        self._table.put(group_id, group)
        for index, score in detached.scores.items():
            candidate_id = CandidateId(group_id, index)
            entry = self._remember(candidate_id, score.scoring, detached.request_ids[index], group)
            entry.observation, entry.assessment = score.observation, score.assessment
            for length, trial in score.trials.items():
                entry.tried(length, *trial)
        if group.length_cap is not None:
            self._capped[group_id] = group
        if detached.place is not None and self.races.enter(group_id, group, detached.place):
            self.cancel(group_id)
        self._release(group_id, group, now_s)  # it may wait for siblings here as it did there
        return group

    def forget_waiting(self, now_s: float) -> list[str]:
        """Forgets groups that wait for siblings and have waited too long; returns which."""
        return self._table.forget_waiting(now_s)

    def unmet(self, now_s: float) -> list[Group]:
        """Joined groups of which nothing runs, and siblings have not come for a while; each of them once."""
        overdue = (self._table.find(group_id) for group_id in self._table.overdue(now_s))
        return [group for group in overdue if group is not None and group.joined and group.num_to_come]

    def _remember(self, candidate_id: CandidateId, scoring: Scoring, request_id: str, group: Group) -> LedgerEntry:
        """The ledger's entry of a candidate, for the reward that may come."""
        plan = group.pruning
        assert plan is not None  # nothing else scores
        entry = self.judge.ledger.open(scoring, candidate_id, request_id, plan, _origin(group, plan))
        self._scored[candidate_id] = _Scored(scoring, entry)
        return entry

    def close_step(
        self, due: Mapping[CandidateId, Observation], num_tokens: Callable[[CandidateId], int], now_s: float = 0.0
    ) -> Verdicts:
        """Decide on everything since the last call.

        Args:
            due: what the step showed of candidates that reached their detection length; of those that have ended it is
                ignored.
            num_tokens: output tokens of a candidate that has not ended by itself.
            now_s: by which groups wait for siblings; without it they may wait for ever.
        """
        if not (self.has_events or due):
            return NO_VERDICTS
        for candidate_id, group, reason, length, _ in self._ended:
            self._alone(candidate_id.group_id, group.end, candidate_id.index, reason, length)
        siblings = self._still_due(due)
        stop: dict[CandidateId, StopState] = {}
        lost_ties: set[CandidateId] = set()

        def settle(group_id: str, group: Group) -> None:
            settlement = group.settle()
            stop.update((CandidateId(group_id, index), settlement.stop_as) for index in settlement.stop)
            lost_ties.update(CandidateId(group_id, index) for index in settlement.lost_ties)
            if group.length_cap is not None:
                self._capped[group_id] = group

        def judge(group_id: str, group: Group) -> None:
            if pruned := self._judge(group_id, group, siblings[group_id]):
                stop.update((CandidateId(group_id, index), "pruned") for index in pruned)
                settle(group_id, group)

        def cap(group_id: str, group: Group) -> None:
            too_long = group.too_long({index: num_tokens(CandidateId(group_id, index)) for index in group.running})
            if too_long:
                stop.update((CandidateId(group_id, index), "surplus") for index in too_long)
                self._touched[group_id] = group

        def give_up(group_id: str, indices: set[int]) -> None:
            given_up = self._touched[group_id].give_up(indices)
            stop.update((CandidateId(group_id, index), "surplus") for index in given_up)

        def cancel(group_id: str, group: Group) -> None:
            stop.update((CandidateId(group_id, index), "deferred") for index in group.cancel())

        for group_id, group in self._touched.items():
            self._alone(group_id, settle, group_id, group)
        for group_id in self._in_order(siblings):
            self._alone(group_id, judge, group_id, self._touched[group_id])
        for group_id, group in self._capped.items():
            self._alone(group_id, cap, group_id, group)
        for group_id, indices in self._given_up.items():
            self._alone(group_id, give_up, group_id, indices)
        self._drop_broken(stop)
        lost_groups, too_late = self.races.settle(self._touched)
        for group_id in too_late:
            self.cancel(group_id)
        for group_id, group in self._cancelled.items():
            self._alone(group_id, cancel, group_id, group)
        over = self._forget(stop, num_tokens, now_s)
        self._drop_broken(stop)
        broken, self._broken = self._broken, {}
        lost_ties = {id for id in lost_ties if id.group_id not in broken}
        return Verdicts(stop, frozenset(lost_ties), over, frozenset(lost_groups), broken)

    def _alone(self, group_id: str, rule: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What concerns one group only, if it is not broken: an exception breaks it, where that is contained."""
        if group_id in self._broken:
            return None
        try:
            return rule(*args, **kwargs)
        except self._contained as error:
            self._broken[group_id] = error
            return None

    def _drop_broken(self, stop: dict[CandidateId, StopState]) -> None:
        for group_id in self._broken:
            self.drop(group_id)
        for id in [id for id in stop if id.group_id in self._broken]:
            del stop[id]

    def drop(self, group_id: str) -> None:
        """Forget a group, whatever state it is in. Its rewards, if any come, are unknown."""
        if self._table.find(group_id) is not None:
            self._table.remove(group_id)
        self.races.leave(group_id)
        for waiting in (self._touched, self._cancelled, self._given_up, self._capped):
            waiting.pop(group_id, None)
        self._ended = [each for each in self._ended if each[0].group_id != group_id]
        for id in [id for id in self._scored if id.group_id == group_id]:
            del self._scored[id]

    def _still_due(self, due: Mapping[CandidateId, Observation]) -> dict[str, dict[int, Observation]]:
        """What still runs of what is due, by group; touches these groups."""
        siblings: dict[str, dict[int, Observation]] = {}
        for id, observation in due.items():
            group = self._table.find(id.group_id)
            if group is not None and id in self._scored and group.state(id.index) == "running":
                siblings.setdefault(id.group_id, {})[id.index] = observation
                self._touched[id.group_id] = group
        return siblings

    def _in_order(self, siblings: Mapping[str, Mapping[int, Observation]]) -> list[str]:
        """Groups learn from each other's scores: the order in which they are judged must not be that of the batch."""
        return sorted(
            siblings, key=lambda group_id: (self._scoring_of(group_id, siblings[group_id]).prompt_id, group_id)
        )

    def _judge(self, group_id: str, group: Group, siblings: Mapping[int, Observation]) -> list[int]:
        """Which of these to prune."""
        if group.closed:
            return []
        due = {
            index: (self._scored[CandidateId(group_id, index)].entry, observation)
            for index, observation in siblings.items()
        }
        return self.judge.judge(group, self._scoring_of(group_id, siblings), due)

    def _scoring_of(self, group_id: str, siblings: Mapping[int, object]) -> Scoring:
        """Requests that join a group may bring different seeds: the first one's counts."""
        return self._scored[CandidateId(group_id, min(siblings))].scoring

    def _forget(
        self, stop: Mapping[CandidateId, StopState], num_tokens: Callable[[CandidateId], int], now_s: float
    ) -> tuple[str, ...]:
        """Write down the ends of this step; returns the groups that are over."""
        for candidate_id, group, _, length, last in self._ended:
            self._alone(candidate_id.group_id, self._write, candidate_id, group, length, last)
        for candidate_id in stop:
            group = self._touched[candidate_id.group_id]
            self._alone(candidate_id.group_id, self._write, candidate_id, group, num_tokens(candidate_id))
        over = tuple(
            group_id
            for group_id, group in self._touched.items()
            if self._alone(group_id, self._release, group_id, group, now_s)
        )
        self._ended.clear()
        self._touched.clear()
        self._cancelled.clear()
        self._given_up.clear()
        return over

    def _release(self, group_id: str, group: Group, now_s: float) -> bool:
        """Forget a group that is over (True); one in which nothing runs waits for siblings."""
        if not group.num_running:
            self._capped.pop(group_id, None)
        if self._table.find(group_id) is not group:
            return False  # it waited, and others took its place
        if group.over:
            self._table.remove(group_id)
        elif not group.num_running:
            self._table.wait(group_id, now_s)
        return group.over

    def _write(self, candidate_id: CandidateId, group: Group, num_tokens: int, last: Observation | None = None) -> None:
        scored = self._scored.pop(candidate_id, None)
        if scored is None:
            return
        index, entry = candidate_id.index, scored.entry
        entry.state, entry.num_tokens = group.state(index), num_tokens
        if last is not None and entry.state == "finished":
            assessment = self.judge.value(entry, last)
            if assessment is not None:
                group.finals[index] = assessment


def _origin(group: Group, plan: PruningPlan) -> LabelOrigin:
    """The kind of group that its labels are of."""
    if plan.audit:
        return "audit" if plan.is_instead_of_race else "plain_audit"
    return "race" if group.terms.races else "plain"


def _disagreement(terms: GroupTerms, others: GroupTerms) -> str:
    """What a candidate that joins a group says differently."""
    known, named = _fields(terms), _fields(others)
    name = next(name for name in known if known[name] != named[name])
    return (
        f"{name} of this group is {known[name]!r}, as its first candidate said, got {named[name]!r}. Every candidate "
        "of a group must say the same: change it, or name another group."
    )


def _fields(terms: GroupTerms) -> dict[str, object]:
    """The terms by name; those of a plan that is not there are None."""
    said = {each.name: getattr(terms, each.name) for each in fields(GroupTerms) if each.name != "pruning"}
    plan = terms.pruning
    return said | {f"pruning.{each.name}": plan and getattr(plan, each.name) for each in fields(PruningPlan)}
