"""A group between two engines: what the one lets go of and the other takes up.

A group moves whole, since its verdicts need all siblings in one place. What has ended stays where it is: its reward
comes there. Everything else about the group is in one value, which is JSON-able by msgspec.

Invariant: at any time a group is in one engine, or in one `DetachedGroup`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vllm_rollout.group.judging.ledger import Scoring, Trial
from vllm_rollout.group.racing.lifecycle import Group
from vllm_rollout.group.racing.race import RacePlace
from vllm_rollout.group.types import Assessment, Observation

MoveOutcome = Literal["moved", "over", "stays", "failed", "lost"]
"""What became of a move.

moved   it goes on elsewhere
over    it ended before it could leave
stays   it cannot leave, for a reason
failed  it was not taken up elsewhere, and goes on where it was
lost    nor there: its candidates fail
"""
StayReason = Literal["over", "busy"]
"""Why a group does not move now.

over  it is not known here: it has ended, or was never here
busy  an event of it waits for the end of the step
"""


@dataclass(frozen=True, slots=True)
class DetachedScore:
    """How a running candidate is judged, and what is known of it already."""

    scoring: Scoring
    observation: Observation | None = None
    assessment: Assessment | None = None
    trials: dict[int, Trial] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DetachedGroup:
    """All that the rules know of a group that runs nowhere."""

    group_id: str
    group: Group
    scores: dict[int, DetachedScore]
    """How running candidates are scored, by index."""
    request_ids: dict[int, str]
    """Requests of running candidates, by index."""
    place: RacePlace | None
