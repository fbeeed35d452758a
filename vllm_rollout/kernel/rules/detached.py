"""The state of a group on its way between two engines.

A group moves whole, since its verdicts need all siblings in one place. Candidates that have ended stay where they are:
their rewards arrive there. Everything else about the group is in one value, which msgspec can encode as JSON.

Invariant: at any time a group is in one engine, or in one `DetachedGroup`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_rollout.kernel.rules.lifecycle import Group

StayReason = Literal["over", "busy"]
"""Reason why a group does not move now.

over  it is unknown here: it has ended, or was never here
busy  one of its events waits for the end of the step
"""


@dataclass(frozen=True, slots=True)
class DetachedGroup:
    """The state of a group that runs in no engine."""

    group_id: str
    group: Group
    request_ids: dict[int, str]
    """Request ids of running candidates, by index."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Values that parts took along, by part."""
