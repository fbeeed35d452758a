"""Values that the rules exchange. Invariant: nothing here knows an engine, a device or a request body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

CandidateState = Literal["running", "finished", "pruned", "surplus", "deferred", "failed"]
"""`running` is the only state that can change. The others are end states."""

StopState = Literal["pruned", "surplus", "deferred"]
"""End states of stopped candidates. `pruned`: stopped by its score. `surplus`: enough siblings finished. `deferred`:
the rest of the group is not wanted now, which is no verdict on the candidate."""
STOP_STATES: tuple[StopState, ...] = get_args(StopState)

EndReason = Literal["stop", "length", "failed"]
"""Cause of an end without a verdict: ended by itself, cut at `max_tokens`, or lost (error, client abort)."""

NOT_FINITE = "the model's logits were NaN or infinite. Check the weights that were loaded last, and their dtype."
"""Error of candidates whose tokens would be random."""

ABORTED = "a client aborted its request by name."
"""Error of candidates that `POST /abort_requests` has stopped."""

GroupStatus = Literal["complete", "incomplete", "deferred"]
"""`deferred`: the group is not wanted now, whether it was complete or not."""

SessionState = Literal["turn", "between_turns", "finished", "truncated", "void", "pruned", "surplus", "deferred"]
"""The first two states are open. `void`: the session does not count, and another one may replace it. `pruned`:
stopped by its score. `surplus`: it lost the race. `deferred`: the group was cancelled."""

EndedBy = Literal["finish", "last_turn", "length", "max_turns", "max_tokens", "idle", "score", "race", "cancel"]
"""Cause of a session's end.

finish                 its harness finished it
last_turn              its harness marked a turn as the last one
length                 a turn was cut at its own max_tokens
max_turns, max_tokens  it reached a limit of the group
idle                   it was silent for too long
score                  its score stopped it
race                   its siblings decided the group without it
cancel                 the group was cancelled
"""


class CandidateId(NamedTuple):
    group_id: str
    index: int  # type: ignore[assignment]  # of a tuple's methods nobody here needs `index`


BASE_MODEL = ""
"""Value in place of an adapter's name: the base model."""


Signal = Literal["head", "confidence"]
"""Signal that candidates are judged by: the quality head's logit, or trace confidence (DeepConf)."""


@dataclass(frozen=True, slots=True)
class TooLate:
    """A part's value for a group that completed after as many other groups as were wanted."""


def is_too_late(values: Mapping[str, Any]) -> bool:
    """True if a value of a part says so of the group."""
    return any(isinstance(value, TooLate) for value in values.values())


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one candidate, as the engine recorded it."""

    index: int
    state: CandidateState
    num_tokens: int
    truncated: bool = False
    """True if cut at `max_tokens` (finish reason `length` or `repetition`), False if ended by itself."""
    end_step: int = 0
    """The group's step in which it ended. Orders candidates by their ends."""
    ended_by_itself: bool = False
    """True if its length is exact. Also true for a surplus candidate that ended too late to count (a lost tie)."""
    num_resumed: int = 0
    """Number of its tokens that come from an earlier round."""
    num_preemptions: int = 0
    """Number of times that it lost its KV cache and waited."""

    @property
    def valid(self) -> bool:
        """True if it ended by itself: usable without reservation."""
        return self.state == "finished" and not self.truncated


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Result of a group that is over."""

    status: GroupStatus
    reason: str | None
    """Reason why the group is not complete. None when it is complete."""
    selected: tuple[int, ...]
    """Indices of the returned trajectories, ascending. Exactly `group_size` of them when complete."""
    endings: tuple[Ending, ...]
    """Endings of all candidates, ascending by index."""

    @property
    def generated_tokens(self) -> int:
        """Output tokens of all candidates, without those from earlier rounds."""
        return sum(ending.num_tokens - ending.num_resumed for ending in self.endings)

    @property
    def resumed_tokens(self) -> int:
        """Output tokens of all candidates that come from earlier rounds."""
        return sum(ending.num_resumed for ending in self.endings)

    @property
    def returned_tokens(self) -> int:
        """Output tokens of the returned trajectories."""
        selected = set(self.selected)
        return sum(ending.num_tokens for ending in self.endings if ending.index in selected)

    @property
    def wasted_tokens(self) -> int:
        """Output tokens that are not returned: generated + resumed - returned."""
        return self.generated_tokens + self.resumed_tokens - self.returned_tokens


class GroupCounts(NamedTuple):
    """Groups that a rank remembers, by state."""

    num_running: int
    """Groups in which a candidate runs or waits to run."""
    num_idle: int
    """Groups without a running candidate that wait for siblings, which come as single requests."""


class RankCounts(NamedTuple):
    """Counts of one rank since its start, and the groups that it holds."""

    groups: GroupCounts
    num_unmet: int = 0
    """Joined groups whose siblings did not come to this rank."""
    num_internal_errors: int = 0
    """Exceptions of our own code that were caught, and failed candidates or groups."""
    num_weight_changes: int = 0
