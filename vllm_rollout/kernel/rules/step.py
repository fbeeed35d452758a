"""The order of one engine step: events in, verdicts out.

    launch, ended            events, while the step is processed
    cancel, give_up          the rest of a group, or some of its candidates, are no longer needed
    detach, attach           between two steps: a group leaves for another engine, or arrives from one
    close_step               1. groups record what ended            2. groups with events settle
                             3. scores of the step are judged, and groups that pruned settle again
                             4. candidates that are too long stop   5. candidates that were given up stop
                             6. races between groups settle         7. cancelled groups stop
                             8. the ledger is written, and groups that are over are forgotten

vLLM's scheduler, the simulator and the tests' engine translate their events into these calls and obey the verdicts.
None of them has an order of its own.

Invariant: every candidate that was launched gets exactly one end, and no verdict names one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import ParamSpec, TypeVar

from vllm_rollout.config import MAX_IDLE_GROUPS
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.sibling_table import SiblingTable
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import CandidateId, EndReason, HeldGroups, Observation, StopState
from vllm_rollout.parts.moving.rules.detached import DetachedGroup, DetachedScore, StayReason
from vllm_rollout.parts.pruning.rules.audit import draw_audit
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.ledger import LedgerEntry, Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.race_bias import LabelOrigin
from vllm_rollout.parts.rounds.rules.race import RacePlace, RaceTable

P = ParamSpec("P")
T = TypeVar("T")


class LaunchRefused(ValueError):
    """A candidate cannot enter the group it names. The text is for the client: what, value, allowed, remedy."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Decisions of a step."""

    stop: Mapping[CandidateId, StopState] = field(default_factory=dict)
    """Running candidates to stop now, with their end states."""
    lost_ties: frozenset[CandidateId] = frozenset()
    """Candidates that ended by themselves in this step, but after `group_size` others: surplus, with all tokens."""
    over: tuple[str, ...] = ()
    """Groups that ended in this step."""
    lost_groups: frozenset[str] = frozenset()
    """Groups that completed in this step, but after as many others as their race wanted."""
    broken: Mapping[str, Exception] = field(default_factory=dict)
    """Groups whose rules raised an exception. They are forgotten, and `stop` and `lost_ties` name none of their
    candidates."""


NO_VERDICTS = Verdicts()


@dataclass(slots=True)
class _Scored:
    """Scoring and ledger entry of a candidate."""

    scoring: Scoring
    entry: LedgerEntry
    """Ledger entry that keeps the data for the candidate's reward."""


class GroupSteps:
    """All groups of one engine, step by step."""

    def __init__(self, judge: Judge, max_idle: int = MAX_IDLE_GROUPS, *, contains: bool = False) -> None:
        """`contains`: an exception in the rules of one group breaks that group (`Verdicts.broken`), not the step."""
        self.judge = judge
        self.races = RaceTable()
        self._table: SiblingTable[Group] = SiblingTable(max_idle)
        self._scored: dict[CandidateId, _Scored] = {}
        """Scored candidates, from launch to end."""
        self._ended: list[tuple[CandidateId, Group, EndReason, int, Observation | None]] = []
        """Candidates that ended since the last step closed. The next two attributes also cover that time."""
        self._touched: dict[str, Group] = {}
        self._cancelled: dict[str, Group] = {}
        self._given_up: dict[str, set[int]] = {}
        """Indices of candidates that were given up, by group."""
        self._capped: dict[str, Group] = {}
        """Groups with a length cap and a running candidate."""
        self._contained = (Exception,) if contains else ()
        self._broken: dict[str, Exception] = {}
        """Groups whose rules raised an exception since the last step closed."""

    def __len__(self) -> int:
        """Number of groups that are not over."""
        return len(self._table)

    @property
    def held(self) -> HeldGroups:
        return HeldGroups(len(self._table) - self._table.num_waiting, self._table.num_waiting, len(self.races))

    @property
    def has_events(self) -> bool:
        """True if `close_step` has work to do, even if no score is due."""
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
        """Add a candidate to the group with this id. The first candidate creates the group. Without an index it gets
        the next.

        Raises: LaunchRefused when the group has other terms, or already has that index.
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
        """Record that a candidate ended without a verdict. `last`: the observation of its last token, if it is
        scored."""
        self._ended.append((candidate_id, group, reason, num_tokens, last))
        self._touched[candidate_id.group_id] = group

    def cancel(self, group_id: str) -> bool:
        """Cancel the rest of this group: candidates that run at the end of the step stop as `deferred`.

        Returns False when there is no such group, for example because it is over.
        """
        group = self._table.find(group_id)
        if group is None:
            return False
        self._touched[group_id] = self._cancelled[group_id] = group
        return True

    def give_up(self, group_id: str, indices: Iterable[int]) -> None:
        """Give up these candidates: those that run at the end of the step stop as `surplus`."""
        group = self._table.find(group_id)
        if group is not None:
            self._touched[group_id] = group
            self._given_up.setdefault(group_id, set()).update(indices)

    def cut(self, race_id: str) -> None:
        """End a race, because enough groups of all engines are complete. The other groups stop as `deferred`, also
        those that arrive later."""
        for group_id in self.races.cut(race_id):
            self.cancel(group_id)

    def running(self, group_id: str) -> list[CandidateId]:
        """Running candidates of a group. Empty if the group is unknown or over."""
        group = self._table.find(group_id)
        return [] if group is None else [CandidateId(group_id, index) for index in group.running]

    def stays_because(self, group_id: str) -> StayReason | None:
        """Reason why this group cannot be detached now. None if it can."""
        if self._table.find(group_id) is None:
            return "over"
        return "busy" if group_id in self._touched else None

    def detach(self, group_id: str, request_ids: Mapping[int, str]) -> DetachedGroup:
        """Remove and return a group that can leave (`stays_because`). `request_ids`: of its running candidates, by
        index."""
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
        """Add a group that this or another engine detached. `now_s` as in `close_step`."""
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
        """Forget groups that have waited too long for siblings, and return their ids."""
        return self._table.forget_waiting(now_s)

    def unmet(self, now_s: float) -> list[Group]:
        """Joined groups without a running candidate, whose siblings have not come for a while. Each is returned
        once."""
        overdue = (self._table.find(group_id) for group_id in self._table.overdue(now_s))
        return [group for group in overdue if group is not None and group.joined and group.num_to_come]

    def _remember(self, candidate_id: CandidateId, scoring: Scoring, request_id: str, group: Group) -> LedgerEntry:
        """Open the ledger's entry of a candidate, for a later reward."""
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
            due: observations of candidates that reached their detection length in this step. For ended candidates
                they are ignored.
            num_tokens: output tokens of a candidate that has not ended by itself.
            now_s: time for groups that wait for siblings, in seconds. Without it they may wait for ever.
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
        """Run a rule for one group, unless that group is broken. With `contains`, an exception breaks the group."""
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
        """Forget a group in any state. Rewards that come for it later are unknown."""
        if self._table.find(group_id) is not None:
            self._table.remove(group_id)
        self.races.leave(group_id)
        for waiting in (self._touched, self._cancelled, self._given_up, self._capped):
            waiting.pop(group_id, None)
        self._ended = [each for each in self._ended if each[0].group_id != group_id]
        for id in [id for id in self._scored if id.group_id == group_id]:
            del self._scored[id]

    def _still_due(self, due: Mapping[CandidateId, Observation]) -> dict[str, dict[int, Observation]]:
        """Observations of candidates that still run, by group. Marks these groups as touched."""
        siblings: dict[str, dict[int, Observation]] = {}
        for id, observation in due.items():
            group = self._table.find(id.group_id)
            if group is not None and id in self._scored and group.state(id.index) == "running":
                siblings.setdefault(id.group_id, {})[id.index] = observation
                self._touched[id.group_id] = group
        return siblings

    def _in_order(self, siblings: Mapping[str, Mapping[int, Observation]]) -> list[str]:
        """Order in which groups are judged. Groups learn from each other's scores, so the batch must not set the
        order."""
        return sorted(
            siblings, key=lambda group_id: (self._scoring_of(group_id, siblings[group_id]).prompt_id, group_id)
        )

    def _judge(self, group_id: str, group: Group, siblings: Mapping[int, Observation]) -> list[int]:
        """Judge due candidates of a group, and return those to prune."""
        if group.closed:
            return []
        due = {
            index: (self._scored[CandidateId(group_id, index)].entry, observation)
            for index, observation in siblings.items()
        }
        return self.judge.judge(group, self._scoring_of(group_id, siblings), due)

    def _scoring_of(self, group_id: str, siblings: Mapping[int, object]) -> Scoring:
        """Scoring of the sibling with the lowest index. Requests that join a group may bring different seeds."""
        return self._scored[CandidateId(group_id, min(siblings))].scoring

    def _forget(
        self, stop: Mapping[CandidateId, StopState], num_tokens: Callable[[CandidateId], int], now_s: float
    ) -> tuple[str, ...]:
        """Write the endings of this step to the ledger, and return the groups that are over."""
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
        """Forget a group that is over, and return True. A group without running candidates starts to wait for
        siblings."""
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
    """Kind of group that the labels come from."""
    if plan.audit:
        return "audit" if plan.is_instead_of_race else "plain_audit"
    return "race" if group.terms.races else "plain"


def _disagreement(terms: GroupTerms, others: GroupTerms) -> str:
    """Message about the first term in which a candidate that joins a group disagrees."""
    known, named = _fields(terms), _fields(others)
    name = next(name for name in known if known[name] != named[name])
    return (
        f"{name} of this group is {known[name]!r}, as its first candidate said, got {named[name]!r}. Every candidate "
        "of a group must say the same: change it, or name another group."
    )


def _fields(terms: GroupTerms) -> dict[str, object]:
    """Terms by name. Fields of a missing pruning plan are None."""
    said = {each.name: getattr(terms, each.name) for each in fields(GroupTerms) if each.name != "pruning"}
    plan = terms.pruning
    return said | {f"pruning.{each.name}": plan and getattr(plan, each.name) for each in fields(PruningPlan)}
