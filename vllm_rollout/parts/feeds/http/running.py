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
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.parts.feeds.rules.bias import GroupSize


@dataclass(slots=True, eq=False)
class FeedRollout:
    """The group of one prompt while it runs, and after."""

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
    """Tokens of candidates that have ended."""
    has_begun: bool = False
    """True once it has places in the engine."""
    saw_bad_weights: bool = False
    """True if a candidate failed because logits were not finite."""

    @property
    def size(self) -> GroupSize:
        """Length and reward. For a group that was not returned: a lower bound of the length."""
        if self.known_size is not None:
            return self.known_size
        if self.event is None:
            return GroupSize(self.num_tokens / max(self.group_size, self.num_ended))
        return GroupSize(self.event.lengths.mean, self._rewards.mean if self._rewards is not None else None)

    @property
    def teaches(self) -> bool:
        return self._rewards is not None and self._rewards.teaches

    @property
    def _rewards(self) -> GroupRewards | None:
        return None if self.event is None else self.event.rewards

    async def run(self, rollouts: RolloutService, fields: Mapping[str, Any], labels: Mapping[str, Any]) -> None:
        """Run the group to its end. Raises: RequestError."""
        body = {**fields, "prompts": [self.prompt.model_dump(mode="json", exclude_none=True)], "priority": self.born}
        rollout = await rollouts.prepare(RolloutRequest.model_validate(body))
        rollout.parts = [*rollout.parts, _Lengths(self)]
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
        self._rollout.has_begun = True
        return _GroupLengths(self._rollout)


class _GroupLengths(GroupPart):
    """Overrides: ended, restarted."""

    def __init__(self, feed_rollout: FeedRollout) -> None:
        self._rollout = feed_rollout

    def ended(self, end: CandidateEnd) -> None:
        self._rollout.num_ended += 1
        self._rollout.num_tokens += end.ending.num_tokens
        self._rollout.saw_bad_weights |= end.error == NOT_FINITE

    def restarted(self) -> None:
        self._rollout.num_ended = self._rollout.num_tokens = 0
