"""One group of a feed: a rollout of one prompt.

Invariant: the group's rollout is an ordinary one, so other parts race, prune and grade it as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm_rollout.kernel.http.answers import DoneEvent, GroupEvent, GroupRewards, Usage
from vllm_rollout.kernel.http.engine import CandidateEnd
from vllm_rollout.kernel.http.plan_port import GroupPart, GroupRecord, RolloutPart
from vllm_rollout.kernel.http.protocol import Prompt, RolloutRequest
from vllm_rollout.kernel.http.serialised import GroupsInJson
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.parts import face
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.parts.feeds.rules.bias import GroupSize


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """Output of a stopped group, from which its candidates go on."""

    packed: bytes
    indices: list[int]
    """Index of each packed candidate."""
    num_tokens: int


@dataclass(slots=True, eq=False)
class FeedRollout:
    """The group of one prompt while it runs, and after. A group that goes on has a new rollout."""

    prompt: Prompt
    turn: int
    """Number of the prompt among all that were put."""
    group_size: int
    born: int
    born_version: str | None
    rollout_id: str = ""
    event: GroupEvent | None = None
    """The end of the group. None while it runs, and for a group that was stopped."""
    json: bytes = b""
    """The complete group as JSON."""
    known_size: GroupSize | None = None
    """Length and reward of a group that was complete before the server started."""
    usage: Usage = field(default_factory=Usage)
    warnings: list[str] = field(default_factory=list)
    """Warnings of its rollout."""
    num_ended: int = 0
    """Candidates that have ended."""
    num_tokens: int = 0
    """New tokens of candidates that have ended."""
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

    @property
    def size(self) -> GroupSize:
        """Length and reward. For a group that was not returned: a lower bound of the length."""
        if self.known_size is not None:
            return self.known_size
        if self.event is None:
            return GroupSize((self.num_before + self.num_tokens) / max(self.group_size, self.num_ended))
        return GroupSize(self.event.lengths.mean, self._rewards.mean if self._rewards is not None else None)

    @property
    def num_before(self) -> int:
        """Tokens with which it goes on."""
        return 0 if self.before is None else self.before.num_tokens

    def again(self) -> FeedRollout:
        """The rollout in which it goes on."""
        names = self.prompt, self.turn, self.group_size, self.born, self.born_version
        return FeedRollout(*names, is_long=self.is_long, before=self.kept or self.before)

    @property
    def teaches(self) -> bool:
        return self._rewards is not None and self._rewards.teaches

    @property
    def _rewards(self) -> GroupRewards | None:
        return None if self.event is None else self.event.rewards

    async def run(
        self, rollouts: RolloutService, fields: Mapping[str, Any], labels: Mapping[str, Any], *, stops: bool
    ) -> None:
        """Run the group to its end. `stops`: it may be stopped, and go on later. Raises: RequestError."""
        body = {**fields, "prompts": [self.prompt.model_dump(mode="json", exclude_none=True)], "priority": self.born}
        rollout = await rollouts.prepare(RolloutRequest.model_validate(body))
        rollout.parts = [*rollout.parts, _Lengths(self)]
        if stops and (going_on := face("feeds", "going_on")) is not None:
            self.can_go_on, rollout.began_with = rollout.prompts[0].resume_refusal is None, self.began_with
            rollout.parts = [*rollout.parts, going_on(rollouts.engine, rollout, self)]
        rollout.labels = dict(labels)
        self.rollout_id = rollout.id
        groups = GroupsInJson()
        async with aclosing(rollouts.events(rollout)) as events:
            async for event in events:
                await groups.add(event)
                if isinstance(event, GroupEvent):
                    self.event, self.json = event, groups.of(event.prompt_id)
                elif isinstance(event, DoneEvent):
                    self.usage, self.warnings = event.usage, event.warnings


class _Lengths(RolloutPart):
    """Notes the beginning of a group, and counts its tokens. Overrides: group."""

    def __init__(self, feed_rollout: FeedRollout) -> None:
        self._rollout = feed_rollout

    def group(self, record: GroupRecord) -> GroupPart:
        self._rollout.group_id = record.id
        return _GroupLengths(self._rollout)


class _GroupLengths(GroupPart):
    """Overrides: ended, restarted."""

    def __init__(self, feed_rollout: FeedRollout) -> None:
        self._rollout = feed_rollout

    def ended(self, end: CandidateEnd) -> None:
        self._rollout.num_ended += 1
        self._rollout.num_tokens += end.ending.num_tokens - end.ending.num_resumed
        self._rollout.saw_bad_weights |= end.error == NOT_FINITE

    def restarted(self) -> None:
        self._rollout.num_ended = self._rollout.num_tokens = 0
