"""Values that the rules exchange. Invariant: nothing here knows an engine, a device or a request body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

CandidateState = Literal["running", "finished", "pruned", "surplus", "failed"]
"""`running` is the only state that can change; the other four are end states."""

EndReason = Literal["stop", "length", "failed"]
"""Why a candidate ended without a verdict: by itself, cut at `max_tokens`, or lost (error, client abort)."""

GroupStatus = Literal["complete", "incomplete"]


class CandidateId(NamedTuple):
    group_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How one candidate ended, as the engine saw it."""

    index: int
    state: CandidateState
    num_tokens: int
    truncated: bool = False
    """Cut at `max_tokens` (finish reason `length` or `repetition`) instead of ended by itself."""
    end_step: int = 0
    """Engine step in which it ended: the order of finishing."""

    @property
    def valid(self) -> bool:
        """Ended by itself: usable without reservation."""
        return self.state == "finished" and not self.truncated


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a group that is over gives back."""

    status: GroupStatus
    reason: str | None
    """Why the group is incomplete; None when it is complete."""
    selected: tuple[int, ...]
    """Indices of the returned trajectories, ascending; exactly `group_size` of them when complete."""
    endings: tuple[Ending, ...]
    """Every candidate, ascending by index."""
