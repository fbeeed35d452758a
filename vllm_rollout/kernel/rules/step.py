"""The order of one engine step: events in, verdicts out.

    launch, ended            events, while the step is processed
    cancel, give_up          the rest of a group, or some of its candidates, are no longer needed
    detach, attach           between two steps: a group leaves for another engine, or arrives from one
    close_step               1. groups record what ended            2. parts say who has no place (`told`)
                             3. groups with events settle           4. parts rule candidates out (`settled`)
                             5. candidates that are too long stop   6. candidates that were given up stop
                             7. parts decide on groups (`groups`)   8. cancelled groups stop
                             9. parts write down ends (`ends`)     10. groups that are over are forgotten

vLLM's scheduler, the simulator and the tests' engine translate their events into these calls and obey the verdicts.
None of them has an order of its own, and no part has one.

Invariant: every candidate that was launched gets exactly one end, and no verdict names one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar

from vllm_rollout.config import MAX_IDLE_GROUPS
from vllm_rollout.kernel.rules.detached import DetachedGroup, StayReason
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.sibling_table import SiblingTable
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import BASE_MODEL, CandidateId, EndReason, GroupCounts, StopState

P = ParamSpec("P")
T = TypeVar("T")
Part = TypeVar("Part", bound="StepPart")

Phase = Literal["told", "settled", "groups", "ends"]
"""Moment of a step at which a part decides. `GroupSteps.close_step` has their order.

told     groups know which candidates ended, and none is settled: `Step.no_place`
settled  groups are settled: `Step.rule_out`, after which a group is settled again
groups   all candidates of the step have their verdicts: `Step.cancel`
ends     every candidate of the step has its end. No verdicts

Several parts in one phase run in the order of the list, which must not matter.
"""


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
    broken: Mapping[str, Exception] = field(default_factory=dict)
    """Groups whose rules raised an exception. They are forgotten, and `stop` and `lost_ties` name none of their
    candidates."""


NO_VERDICTS = Verdicts()


class Ended(NamedTuple):
    """A candidate that ended without a verdict."""

    id: CandidateId
    group: Group
    reason: EndReason
    num_tokens: int
    seen: Mapping[str, Any]
    """Observations of its last token, by part."""


class Entered(NamedTuple):
    """A candidate that has entered its group."""

    request_id: str
    adapter: str
    """Name of its LoRA adapter, as the engine states it. `BASE_MODEL`: none."""
    said: Any | None
    """Its own value for a part, beside the group's terms."""


class StepPart:
    """A part in the engine core, for all groups of one engine. It has what it has learned, and nothing of vLLM."""

    name: ClassVar[str]

    def fresh(self) -> StepPart:
        """This part without any group, but with all that it has learned."""
        return type(self)()

    def remember_in(self, memories: Any) -> None:
        """Learn in these memories of the engine from now on."""

    def phases(self) -> Mapping[Phase, Callable[[Step], None]]:
        return {}

    def enter(self, id: CandidateId, group: Group, entered: Entered, steps: GroupSteps) -> None:
        """A candidate entered its group.

        Called if the candidate or the group's terms have a value for this part.
        """

    def differing(self, ours: Any | None, theirs: Any | None) -> tuple[str, object, object]:
        """The field in which the terms of a sibling differ, as clients write it, and both values."""
        return self.name, ours, theirs

    def note(self, id: CandidateId, group: Group) -> Any | None:
        """A value for the last output of a candidate that has ended. Called if the group has a value of this part."""
        return None

    def take(self, group_id: str, group: Group) -> Any | None:
        """Let go of a group that leaves this engine. Returns the value that `put` needs elsewhere."""
        return None

    def put(self, detached: DetachedGroup, value: Any, steps: GroupSteps) -> None:
        """Take a group up that has arrived, with the value that `take` returned."""

    def drop(self, group_id: str) -> None:
        """Forget a group in any state."""


@dataclass(slots=True)
class Step:
    """One step that is being closed, as parts see it."""

    steps: GroupSteps
    touched: dict[str, Group]
    """Groups with an event."""
    ended: Sequence[Ended]
    seen: Mapping[str, Mapping[CandidateId, Any]]
    """Observations of running candidates, by part."""
    num_tokens: Callable[[CandidateId], int]
    """Output tokens of a candidate that has not ended by itself."""
    stop: dict[CandidateId, StopState] = field(default_factory=dict)
    """Candidates that were stopped in this step."""
    lost_ties: set[CandidateId] = field(default_factory=set)
    without_place: dict[str, list[int]] = field(default_factory=dict)

    def alone(self, group_id: str, rule: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run a rule for one group, unless that group is broken. Its exception breaks this group only."""
        return self.steps.alone(group_id, rule, *args, **kwargs)

    def no_place(self, group_id: str, indices: Iterable[int]) -> None:
        """In `told`: these candidates lose, unless their group is closed already."""
        self.without_place.setdefault(group_id, []).extend(indices)

    def rule_out(self, group_id: str, indices: Sequence[int], state: StopState) -> None:
        """In `settled`: stop candidates. Their group is settled again, as if it had been so when the step began."""
        self.touched[group_id].rule_out(indices, state)
        self.stopped(group_id, indices, state)
        self.settle(group_id, self.touched[group_id])

    def cancel(self, group_id: str) -> None:
        """In `groups`: the rest of this group stops as `deferred`."""
        self.steps.cancel(group_id)

    def stopped(self, group_id: str, indices: Iterable[int], state: StopState) -> None:
        self.stop.update((CandidateId(group_id, index), state) for index in indices)

    def settle(self, group_id: str, group: Group) -> None:
        settlement = group.settle(self.without_place.get(group_id, ()))
        self.stopped(group_id, settlement.stop, settlement.stop_as)
        self.lost_ties.update(CandidateId(group_id, index) for index in settlement.lost_ties)


class GroupSteps:
    """All groups of one engine, step by step."""

    def __init__(
        self,
        parts: Iterable[StepPart] = (),
        max_idle: int = MAX_IDLE_GROUPS,
        *,
        contains: bool = False,
        memories: Any = None,
    ) -> None:
        """`contains`: an exception in the rules of one group breaks that group (`Verdicts.broken`), not the step.
        `memories`: of the engine. None: each part has its own."""
        self.parts = {part.name: part for part in parts}
        self.memories = memories
        if memories is not None:
            for part in self.parts.values():
                part.remember_in(memories)
        self._phases: dict[Phase, list[Callable[[Step], None]]] = {}
        for part in self.parts.values():
            for phase, decide in part.phases().items():
                self._phases.setdefault(phase, []).append(decide)
        self._max_idle = max_idle
        self._table: SiblingTable[Group] = SiblingTable(max_idle)
        self._ended: list[Ended] = []
        """Candidates that ended since the last step closed. The next two attributes also cover that time."""
        self._touched: dict[str, Group] = {}
        self._cancelled: dict[str, Group] = {}
        self._given_up: dict[str, set[int]] = {}
        """Indices of candidates that were given up, by group."""
        self._capped: dict[str, Group] = {}
        """Groups with a length cap and a running candidate."""
        self._forgotten: list[str] = []
        """Groups that waited for siblings and made place for others, since the last step closed."""
        self._contains = contains
        self._contained = (Exception,) if contains else ()
        self._broken: dict[str, Exception] = {}
        """Groups whose rules raised an exception since the last step closed."""

    def fresh(self) -> GroupSteps:
        """Steps of the same parts, without any group."""
        parts = [part.fresh() for part in self.parts.values()]
        return GroupSteps(parts, self._max_idle, contains=self._contains, memories=self.memories)

    def part(self, kind: type[Part]) -> Part:
        """The part of this class. Raises: LookupError if it is left out."""
        if (part := self.find(kind)) is None:
            raise LookupError(f"no part has {kind.__name__} in this engine core")
        return part

    def find(self, kind: type[Part]) -> Part | None:
        """The part of this class. None if it is left out."""
        part = self.parts.get(kind.name)
        return part if isinstance(part, kind) else None

    def __len__(self) -> int:
        """Number of groups that are not over."""
        return len(self._table)

    @property
    def group_counts(self) -> GroupCounts:
        return GroupCounts(len(self._table) - self._table.num_waiting, self._table.num_waiting)

    @property
    def has_events(self) -> bool:
        """True if `close_step` has work to do, even if nothing was seen."""
        return bool(self._touched or self._capped)

    def launch(
        self,
        group_id: str,
        terms: GroupTerms,
        index: int | None = None,
        *,
        request_id: str = "",
        adapter: str = BASE_MODEL,
        said: Mapping[str, Any] | None = None,
    ) -> tuple[CandidateId, Group]:
        """Add a candidate to the group with this id. The first candidate creates the group. Without an index it gets
        the next.

        `adapter`: as of `Entered`. `said`: values of the candidate for parts, by part.

        Raises: LaunchRefused when the group has other terms, or already has that index.
        """
        group = self._table.find(group_id)
        if group is not None and group.terms != terms:
            raise LaunchRefused(self._disagreement(group.terms, terms))
        if group is not None and index is not None and group.has(index):
            raise LaunchRefused(f"index {index} of this group is taken. Name another group.")
        if group is None:
            group = Group(terms)
        self._table.put(group_id, group)
        candidate_id = CandidateId(group_id, group.launch(index))
        if group.length_cap is not None:
            self._capped[group_id] = group
        if said or terms.parts:
            its = said or {}
            for name, part in self.parts.items():
                if name in its or name in terms.parts:
                    part.enter(candidate_id, group, Entered(request_id, adapter, its.get(name)), self)
        if group.closed:
            self._touched[group_id] = group  # the next step stops the candidate
        return candidate_id, group

    def ended(
        self,
        candidate_id: CandidateId,
        group: Group,
        reason: EndReason,
        num_tokens: int,
        seen: Mapping[str, Any] | None = None,
    ) -> None:
        """Record that a candidate ended without a verdict. `seen`: observations of its last token, by part."""
        self._ended.append(Ended(candidate_id, group, reason, num_tokens, seen or {}))
        self._touched[candidate_id.group_id] = group

    def settle_next(self, group_id: str) -> None:
        """Let the next step settle this group."""
        group = self._table.find(group_id)
        if group is not None:
            self._touched[group_id] = group

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

    def running(self, group_id: str) -> list[CandidateId]:
        """Running candidates of a group. Empty if the group is unknown or over."""
        group = self._table.find(group_id)
        return [] if group is None else [CandidateId(group_id, index) for index in group.running]

    def notes(self, id: CandidateId, group: Group) -> dict[str, Any]:
        """Values of parts for the last output of a candidate, by part."""
        notes = {name: self.parts[name].note(id, group) for name in group.parts if name in self.parts}
        return {name: note for name, note in notes.items() if note is not None}

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
        taken = {name: part.take(group_id, group) for name, part in self.parts.items()}
        group.parts.clear()
        values = {name: value for name, value in taken.items() if value is not None}
        return DetachedGroup(group_id, group, dict(request_ids), values)

    def attach(self, detached: DetachedGroup, now_s: float = 0.0) -> Group:
        """Add a group that this or another engine detached. `now_s` as in `close_step`."""
        group_id, group = detached.group_id, detached.group
        assert self._table.find(group_id) is None, f"group {group_id} is here already"
        self._table.put(group_id, group)
        if group.length_cap is not None:
            self._capped[group_id] = group
        for name, value in detached.parts.items():
            if name in self.parts:
                self.parts[name].put(detached, value, self)
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

    def close_step(
        self,
        seen: Mapping[str, Mapping[CandidateId, Any]],
        num_tokens: Callable[[CandidateId], int],
        now_s: float = 0.0,
    ) -> Verdicts:
        """Decide on everything since the last call.

        Args:
            seen: observations of candidates in this step, by part. For ended candidates they are ignored.
            num_tokens: output tokens of a candidate that has not ended by itself.
            now_s: time for groups that wait for siblings, in seconds. Without it they may wait for ever.
        """
        if not (self.has_events or seen):
            return NO_VERDICTS
        for ended in self._ended:
            self.alone(ended.id.group_id, ended.group.end, ended.id.index, ended.reason, ended.num_tokens)
        still_seen = {name: self._running(observed) for name, observed in seen.items()}
        step = Step(self, self._touched, self._ended, still_seen, num_tokens)
        self._run("told", step)
        for group_id, group in self._touched.items():
            self.alone(group_id, step.settle, group_id, group)
        step.without_place.clear()
        self._run("settled", step)
        self._stop_long_ones(step)
        for group_id, indices in self._given_up.items():
            self.alone(group_id, self._stop_given_up, step, group_id, indices)
        self._drop_broken(step)
        self._run("groups", step)
        for group_id, group in self._cancelled.items():
            self.alone(group_id, self._stop_rest, step, group_id, group)
        self._run("ends", step)
        over = tuple(
            group_id
            for group_id, group in self._touched.items()
            if self.alone(group_id, self._release, group_id, group, now_s)
        )
        over, self._forgotten = (*over, *self._forgotten), []
        self._ended, self._touched = [], {}
        self._cancelled.clear()
        self._given_up.clear()
        self._drop_broken(step)
        broken, self._broken = self._broken, {}
        lost_ties = frozenset(id for id in step.lost_ties if id.group_id not in broken)
        return Verdicts(step.stop, lost_ties, over, broken)

    def alone(self, group_id: str, rule: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run a rule for one group, unless that group is broken. With `contains`, an exception breaks the group."""
        if group_id in self._broken:
            return None
        try:
            return rule(*args, **kwargs)
        except self._contained as error:
            self._broken[group_id] = error
            return None

    def drop(self, group_id: str) -> None:
        """Forget a group in any state. Rewards that come for it later are unknown."""
        if self._table.find(group_id) is not None:
            self._table.remove(group_id)
        for waiting in (self._touched, self._cancelled, self._given_up, self._capped):
            waiting.pop(group_id, None)
        self._ended = [each for each in self._ended if each.id.group_id != group_id]
        for part in self.parts.values():
            part.drop(group_id)

    def _run(self, phase: Phase, step: Step) -> None:
        for decide in self._phases.get(phase, ()):
            decide(step)

    def _running(self, observed: Mapping[CandidateId, Any]) -> dict[CandidateId, Any]:
        """Observations of candidates that still run. Marks their groups as touched."""
        running = {}
        for id, observation in observed.items():
            group = self._table.find(id.group_id)
            if group is not None and group.has(id.index) and group.state(id.index) == "running":
                running[id] = observation
                self._touched[id.group_id] = group
        return running

    def _stop_long_ones(self, step: Step) -> None:
        for group_id, group in self._touched.items():
            if group.length_cap is not None:
                self._capped[group_id] = group
        for group_id, group in self._capped.items():
            self.alone(group_id, self._stop_too_long, step, group_id, group)

    def _stop_too_long(self, step: Step, group_id: str, group: Group) -> None:
        lengths = {index: step.num_tokens(CandidateId(group_id, index)) for index in group.running}
        if too_long := group.too_long(lengths):
            step.stopped(group_id, too_long, "surplus")
            self._touched[group_id] = group

    def _stop_given_up(self, step: Step, group_id: str, indices: set[int]) -> None:
        step.stopped(group_id, self._touched[group_id].give_up(indices), "surplus")

    def _stop_rest(self, step: Step, group_id: str, group: Group) -> None:
        step.stopped(group_id, group.cancel(), "deferred")

    def _drop_broken(self, step: Step) -> None:
        for group_id in self._broken:
            self.drop(group_id)
        step.ended = self._ended
        for id in [id for id in step.stop if id.group_id in self._broken]:
            del step.stop[id]

    def _release(self, group_id: str, group: Group, now_s: float) -> bool:
        """Forget a group that is over, and return True. A group without running candidates starts to wait for
        siblings."""
        if not group.num_running:
            self._capped.pop(group_id, None)
        if self._table.find(group_id) is not group:
            return False  # it waited, and others took its place
        if group.over:
            self._table.remove(group_id)
        elif not group.num_running and (forgotten := self._table.wait(group_id, now_s)) is not None:
            self._forgotten.append(forgotten)
        return group.over

    def _disagreement(self, terms: GroupTerms, others: GroupTerms) -> str:
        """Message about the first term in which a candidate that joins a group disagrees."""
        name, known, named = next(self._differences(terms, others))
        return (
            f"{name} of this group is {known!r}, as its first candidate said, got {named!r}. Every candidate "
            "of a group must say the same: change it, or name another group."
        )

    def _differences(self, terms: GroupTerms, others: GroupTerms) -> Iterator[tuple[str, object, object]]:
        for each in fields(GroupTerms):
            if each.name != "parts" and getattr(terms, each.name) != getattr(others, each.name):
                yield each.name, getattr(terms, each.name), getattr(others, each.name)
        for name in [*self.parts, *terms.parts, *others.parts]:
            ours, theirs = terms.parts.get(name), others.parts.get(name)
            if ours != theirs:
                yield self.parts[name].differing(ours, theirs) if name in self.parts else (name, ours, theirs)
