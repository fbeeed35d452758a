"""The port of parts in the life of a rollout and of its groups: the face `plan`.

The service makes one `PlanPart` of each part. It gives one `RolloutPart` per request, which gives one `GroupPart` per
started group. Each of them may be None: the part then hears nothing of it.

    PlanPart     asked           a request has come, before its checks
                 rewarded        rewards were posted for a rollout that is over
    RolloutPart  choose          the request has a plan, before checks
                 check           nothing else is done yet
                 shape, audit    prompts are prepared, and all have the same plan; the plans are made
                 ready, begun    all checks are done; the first group may start
                 ended_before    a group that does not run was complete before an interruption
                 filtered        a group that was returned is taken out of the answer
                 rewarded        rewards were posted while it runs
                 finished, warn  all groups are over, and the client waits for the end
                 leave           no group is needed any more
                 over, close     nothing of it runs any more
    GroupPart    ordered         before its candidates are launched
                 launching       another way to launch them
                 ended, graded   a candidate
                 fields_of       the client is told of a candidate, or a part asks for its fields
                 launch_over     all candidates that were launched together have ended
                 restarted       all earlier reports are void
                 stopped         no reports follow
                 over            nothing more can come: another result, or a reason to defer it
                 decided         its result is final, and its last events are not sent yet
                 keep, account   the rollout's outcome has it; its very last event is not sent yet
                 told            its very last event was read

Invariant: the kernel has recorded a report before parts hear it. Parts hear one after the other, and wrap nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm_rollout.kernel.http.answers import Event, GroupAnswer, PartEvent, RedundancyBudget
from vllm_rollout.kernel.http.engine import CandidateEnd, Engine, GroupOrder, Happening, PreparedPrompt
from vllm_rollout.kernel.http.launch import Places
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.reports import Lost, Sources
from vllm_rollout.kernel.http.reward_door import RewardDoor
from vllm_rollout.kernel.rules.plan import GroupPlan, PromptPlan
from vllm_rollout.kernel.rules.rewards import Grade, Reward
from vllm_rollout.kernel.rules.types import Ending, GroupResult

ASKS_A_PART: Mapping[str, Callable[[RolloutRequest], bool]] = {
    "audit_ratio": lambda request: bool(request.audit_ratio),
    "redundancy": lambda request: request.tradeoff is not None,
    "reward": lambda request: request.reward is not None,
}
"""Field of a request that a part obeys -> True if its value needs the part. It is refused if the part is not there."""
Launch = Callable[[GroupOrder], AsyncGenerator[Happening, None]]
"""Launches the candidates of a group, and yields their tokens and ends."""
Tell = Callable[[Event], Awaitable[None]]
"""Waits until an event has its place among those of the rollout."""


@dataclass(slots=True)
class Draft:
    """A checked request that becomes a rollout. Parts change it."""

    request: RolloutRequest
    plan: GroupPlan
    """The plan of every prompt. With redundancy "auto" the plan has the largest number of candidates."""
    adapter: str
    """Name of the LoRA adapter (`Engine.adapter_name`)."""
    prompts: list[PreparedPrompt]
    plans: list[PromptPlan]
    """One plan per prompt."""
    positions: Sequence[int]
    """Prompts in the order in which they start."""
    warnings: list[str]
    budget: RedundancyBudget | None = None
    """None without redundancy "auto"."""


@dataclass(eq=False)
class GroupRecord:
    """One group of a running rollout, as the kernel knows it. Parts read the record."""

    position: int
    """Position of its prompt."""
    id: str
    """The engine's name for it."""
    prompt: PreparedPrompt
    plan: GroupPlan
    started_s: float
    """Seconds from the rollout's beginning until it got its places."""
    places: Places
    order: GroupOrder
    """The order to run it, as all parts have changed it."""
    sources: Sources = field(default_factory=Sources)
    """Where parts with `adds_sources` launch candidates and add reports."""
    ends: dict[int, CandidateEnd] = field(default_factory=dict)
    """Ends by candidate index."""
    grades: dict[int, Grade] = field(default_factory=dict)
    """Grades that have come, by candidate index."""
    void: set[int] = field(default_factory=set)
    """Indices of candidates that must not count."""
    lost: Lost | None = None
    """The last loss of candidates that do not run again."""
    parts: Sequence[GroupPart] = ()
    """Objects of parts, in the order in which they hear."""

    def rewards_of(self, indices: Iterable[int]) -> dict[int, float | None]:
        """Rewards by candidate index. None if there is none, or if the client left before it came."""
        grades = {index: self.grades.get(index) for index in indices}
        return {index: None if grade is None else grade.reward for index, grade in grades.items()}

    def fields_of(self, end: CandidateEnd, *, selected: bool = False) -> dict[str, Any]:
        """Fields of an answer about a candidate that follow from the group's plan, or that parts add."""
        fields: dict[str, Any] = {"inclusion_probability": 1.0} if selected and self.plan.returns_all else {}
        for part in self.parts:
            fields |= part.fields_of(end, selected=selected)
        return fields


@dataclass(slots=True)
class Over:
    """The end of a group."""

    result: GroupResult
    deferred_because: str | None = None
    """The reason if the group is deferred."""
    event: PartEvent | None = None
    """The last event of the group, in place of the kernel's."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields that parts add to the event of a group that is returned."""
    final: Sequence[Ending] = ()
    """Endings of candidates that do not go on in a later rollout. Set by `keep`, read by `account`."""


class GroupPart:
    """A part in the life of one group."""

    adds_sources = False
    """True if the part launches candidates or adds reports (`GroupRecord.sources`)."""

    def ordered(self, order: GroupOrder) -> GroupOrder:
        """The order to run the group, perhaps changed."""
        return order

    def launching(self, launch: Launch) -> Launch:
        """The function that launches the group, perhaps another one. It is called for each attempt."""
        return launch

    def ended(self, end: CandidateEnd) -> None:
        """A candidate has ended."""

    def fields_of(self, end: CandidateEnd, *, selected: bool) -> Mapping[str, Any]:
        """Fields to add to the answer about a candidate. `selected`: it is one of the group's trajectories."""
        return {}

    def graded(self, index: int, grade: Grade) -> None:
        """The grade of an ended candidate has come."""

    def restarted(self) -> None:
        """The engine has lost the group, which runs again."""

    def launch_over(self) -> None:
        """All candidates that were launched together have ended. Only called where a part adds sources."""

    def stopped(self) -> None:
        """No reports follow, because the group is over or its rollout has ended."""

    async def over(self, over: Over) -> None:
        """All candidates have ended. Change the group's result, or defer it."""

    def decided(self, over: Over) -> None:
        """The group's result is final."""

    async def keep(self, over: Over) -> None:
        """The group was counted. Keep what goes on in a later rollout."""

    async def account(self, over: Over) -> None:
        """The group was counted. Learn from it."""

    async def told(self, over: Over) -> None:
        """The client has the whole group."""


class RolloutPart:
    """A part in the life of one rollout."""

    async def choose(self, request: RolloutRequest, plan: GroupPlan, warnings: list[str]) -> GroupPlan:
        """The plan of every prompt, perhaps changed. Adds warnings. Raises: RequestError."""
        return plan

    def check(self, request: RolloutRequest, plan: GroupPlan) -> None:
        """Check a request before its prompts are prepared. Raises: RequestError that names the field."""

    async def shape(self, draft: Draft) -> None:
        """Give prompts plans of their own, or another order. Raises: RequestError."""

    def audit(self, draft: Draft) -> None:
        """Change plans to those of audit groups (`PromptPlan.audited`)."""

    async def ready(self, request: RolloutRequest, rollout: Any) -> None:
        """The request is checked. `rollout`: the `Rollout` that will run."""

    def begun(self, tell: Tell) -> None:
        """The rollout runs from now on. `tell`: adds an event to those of its groups."""

    def group(self, record: GroupRecord) -> GroupPart | None:
        """The part's object for a group that has its places."""
        return None

    def ended_before(self, group: GroupAnswer) -> None:
        """A group counts that was complete when its rollout was interrupted. It does not run."""

    def filtered(self, prompt_id: str) -> None:
        """A finished group is taken out of the answer."""

    def rewarded(self, rewards: Iterable[tuple[str, int, float]]) -> None:
        """Rewards of ended candidates were posted. Each is (prompt id, index, reward)."""

    async def finished(self) -> None:
        """All groups are over, and the client still reads. Its answer is made next."""

    async def warn(self) -> Sequence[str]:
        """Warnings for the answer, after those of the kernel."""
        return ()

    def leave(self) -> Collection[str]:
        """No group is needed any more. Returns the engine's names of groups that the part has launched besides: a
        collection that may still grow."""
        return ()

    def over(self, *, left: bool) -> None:
        """Nothing of the rollout runs any more. `left`: its client did not wait for the end."""

    async def close(self) -> None:
        """Give back what the part holds for the rollout, after `over` of all parts."""


@dataclass(frozen=True, slots=True)
class Given:
    """Values that the service of rollouts gives to each part."""

    engine: Engine
    metrics: Metrics
    clock: Callable[[], float]
    """In seconds."""
    rewards: RewardDoor
    """The door passes on rewards: those that clients post, and those that the server has computed."""
    audit_ratio: float
    """Audit ratio of requests that learn and set none."""


class PlanPart:
    """A part in the service of rollouts."""

    fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of a request that nobody else obeys (`ASKS_A_PART`)."""

    def __init__(self, given: Given) -> None:
        """Made once, with the service."""

    def asked(self, request: RolloutRequest) -> RolloutPart | None:
        """The part's object for the rollout that is being requested. Its checks may still fail."""
        return None

    def rewarded(self, rollout_id: str, rewards: Sequence[Reward]) -> None:
        """Rewards of a finished rollout were accepted."""
