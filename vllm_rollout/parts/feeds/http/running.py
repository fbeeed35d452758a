"""Groups of a feed while they run.

Invariant: a group's rollout is an ordinary one, so other parts race, prune and grade it as any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from vllm_rollout.kernel.http.answers import DoneEvent, GroupEvent, RewardEvent, Usage
from vllm_rollout.kernel.http.engine import CandidateEnd, RequestError
from vllm_rollout.kernel.http.plan_port import GroupPart, GroupRecord, Over, RolloutPart
from vllm_rollout.kernel.http.protocol import Prompt, RolloutRequest
from vllm_rollout.kernel.http.serialised import GroupsInJson
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.parts import face
from vllm_rollout.kernel.rules.types import ABORTED, NOT_FINITE
from vllm_rollout.parts.feeds.http.body import FeedRequest
from vllm_rollout.parts.feeds.rules.bias import GroupSize


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """Output of a stopped group, from which its candidates go on."""

    packed: bytes
    indices: list[int]
    """Index of each packed candidate."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """The end of a group that was not stopped."""

    size: GroupSize
    is_complete: bool = True
    reason: str | None = None
    """Reason why it is not complete, or why none of its answers has a reward."""
    teaches: bool = False
    """True if its rewards differ."""


@dataclass(slots=True, eq=False)
class AdmittedGroup:
    """The group of one prompt, from its admission to its batch. A group that goes on is a new object."""

    prompt: Prompt
    turn: int
    """Number of the prompt among all that were put."""
    group_size: int
    born: int
    born_version: str | None
    rollout_id: str | None = None
    """Name of its rollout. None for a group of sessions."""
    end: GroupEnd | None = None
    """None while it runs, and for a group that was stopped."""
    json: bytes = b""
    """The complete group as JSON."""
    usage: Usage = field(default_factory=Usage)
    warnings: list[str] = field(default_factory=list)
    """Warnings of its rollout."""
    num_ended: int = 0
    """Candidates that have ended."""
    num_tokens: int = 0
    """New tokens of candidates that have ended."""
    priority: int = 0
    """Minus the updates since its birth, for its next start or turn. Other rollouts have 0."""
    is_long: bool = False
    """True for a group of a long batch, which has no spare candidates."""
    version: int = 0
    """Weights updates of the feed before this rollout."""
    began_with: str | None = None
    """Name of the weights at that time."""
    before: KeptOutput | None = None
    """Output with which it goes on. None: it begins."""
    group_id: str | None = None
    """The engine's name for the group. None until it has places."""
    can_go_on: bool = False
    """True if the engine can continue candidates of its prompt."""
    is_stopping: bool = False
    """True once it was told to stop, so that it goes on later."""
    was_stopped: bool = False
    kept: KeptOutput | None = None
    """Output to go on with, of a stopped group."""
    saw_bad_weights: bool = False
    """True if a candidate failed because logits were not finite."""
    no_fault: str | None = None
    """Reason why it is not complete, if its prompt is not at fault: no rank took it, or a client has aborted it."""

    @property
    def size(self) -> GroupSize:
        """Length and reward. For a group that was not returned: a lower bound of the length."""
        if self.end is not None:
            return self.end.size
        return GroupSize((self.num_before + self.num_tokens) / max(self.group_size, self.num_ended))

    @property
    def is_complete(self) -> bool:
        return self.end is not None and self.end.is_complete

    @property
    def teaches(self) -> bool:
        return self.end is not None and self.end.teaches

    @property
    def num_before(self) -> int:
        """Tokens with which it goes on."""
        return 0 if self.before is None else self.before.num_tokens

    def again(self) -> AdmittedGroup:
        """The group in which it goes on."""
        names = self.prompt, self.turn, self.group_size, self.born, self.born_version
        return AdmittedGroup(*names, is_long=self.is_long, before=self.kept or self.before)


class GroupRunner(Protocol):
    """Runs the groups of one feed."""

    @property
    def is_ready(self) -> bool:
        """False while no harness is there to run its sessions."""

    @property
    def num_harnesses(self) -> int:
        """Clients that run sessions."""

    async def run(self, number: int, group: AdmittedGroup) -> None:
        """Run a group to its end. Raises: RequestError."""

    def events(self, name: str | None) -> AsyncGenerator[Any, None]:
        """Events for the harness of this name. Raises: RequestError, 409 without sessions, 429 with many harnesses."""

    def close(self) -> None:
        """The feed is deleted."""


class RolloutRunner:
    """Runs each group as a rollout of one prompt."""

    is_ready, num_harnesses = True, 0

    def __init__(self, rollouts: RolloutService, feed_id: str, request: FeedRequest) -> None:
        self._rollouts, self._feed_id, self._request = rollouts, feed_id, request

    async def run(self, number: int, group: AdmittedGroup) -> None:
        fields: Mapping[str, Any] = self._request.rollout_fields(is_long=group.is_long)
        prompts = [group.prompt.model_dump(mode="json", exclude_none=True)]
        body = {**fields, "prompts": prompts, "priority": group.priority}
        rollout = await self._rollouts.prepare(RolloutRequest.model_validate(body))
        rollout.parts = [*rollout.parts, _Lengths(group)]
        if self._request.on_update == "stop" and (going_on := face("feeds", "going_on")) is not None:
            group.can_go_on = rollout.prompts[0].resume_refusal is None
            rollout.began_with = group.began_with
            rollout.parts = [*rollout.parts, going_on(self._rollouts.engine, rollout, group)]
        rollout.source = self
        rollout.labels = {"feed": self._feed_id, "group": number}
        group.rollout_id = rollout.id
        groups, ungraded = GroupsInJson(), None
        async with aclosing(self._rollouts.events(rollout)) as events:
            async for event in events:
                await groups.add(event)
                if isinstance(event, RewardEvent):
                    ungraded = event.reward_reason or ungraded
                elif isinstance(event, GroupEvent):
                    group.end, group.json = _end_of(event, ungraded), groups.of(event.prompt_id)
                elif isinstance(event, DoneEvent):
                    group.usage, group.warnings = event.usage, event.warnings
        if group.no_fault is not None:
            raise RequestError(group.no_fault, status=HTTPStatus.SERVICE_UNAVAILABLE)

    def events(self, name: str | None) -> AsyncGenerator[Any, None]:
        raise RequestError(
            f"feed {self._feed_id!r} has no sessions, so no harness runs them. Create a feed with sessions.",
            status=HTTPStatus.CONFLICT,
        )

    def close(self) -> None:
        pass


def _end_of(event: GroupEvent, ungraded: str | None) -> GroupEnd:
    """`ungraded`: reason why a trajectory has no reward."""
    rewards = event.rewards
    size = GroupSize(event.lengths.mean, None if rewards is None else rewards.mean)
    return GroupEnd(size, event.status == "complete", event.reason or ungraded, rewards is not None and rewards.teaches)


class _Lengths(RolloutPart):
    """Notes the beginning of a group, and counts its tokens. Overrides: group."""

    def __init__(self, group: AdmittedGroup) -> None:
        self._group = group

    def group(self, record: GroupRecord) -> GroupPart:
        self._group.group_id = record.id
        return _GroupLengths(self._group, record)


class _GroupLengths(GroupPart):
    """Overrides: ended, restarted, decided."""

    def __init__(self, group: AdmittedGroup, record: GroupRecord) -> None:
        self._group, self._record, self._was_aborted = group, record, False

    def ended(self, end: CandidateEnd) -> None:
        has_failed = end.ending.state == "failed"
        self._was_aborted |= has_failed and (end.error or end.finish_reason) in (ABORTED, "abort")
        self._group.num_ended += 1
        self._group.num_tokens += end.ending.num_tokens - end.ending.num_resumed
        self._group.saw_bad_weights |= end.error == NOT_FINITE

    def restarted(self) -> None:
        self._group.num_ended = self._group.num_tokens = 0

    def decided(self, over: Over) -> None:
        lost, result = self._record.lost, over.result
        prompt_is_at_fault = not self._was_aborted and (lost is None or not lost.no_rank)
        if result.status == "incomplete" and not prompt_is_at_fault:
            self._group.no_fault = result.reason
