"""The state of a group on its way between two engines.

A group moves whole, since its verdicts need all siblings in one place. Candidates that have ended stay where they are:
their rewards arrive there. Everything else about the group is in one value, which msgspec can encode as JSON.

Invariant: at any time a group is in one engine, or in one `DetachedGroup`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.types import Assessment, Observation
from vllm_rollout.parts.pruning.rules.ledger import Scoring, Trial
from vllm_rollout.parts.rounds.rules.race import RacePlace

MoveOutcome = Literal["moved", "over", "stays", "failed", "lost"]
"""Result of a move.

moved   the group goes on in the other engine
over    the group ended before it could leave
stays   the group cannot leave, for a reason
failed  the other engine did not take it, and it goes on where it was
lost    neither engine could take it: its candidates fail
"""
StayReason = Literal["over", "busy"]
"""Reason why a group does not move now.

over  it is unknown here: it has ended, or was never here
busy  one of its events waits for the end of the step
"""


@dataclass(frozen=True, slots=True)
class DetachedScore:
    """Scoring of a running candidate, with its observation and assessments so far."""

    scoring: Scoring
    observation: Observation | None = None
    assessment: Assessment | None = None
    trials: dict[int, Trial] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DetachedGroup:
    """The state of a group that runs in no engine."""

    group_id: str
    group: Group
    scores: dict[int, DetachedScore]
    """Scoring of running candidates, by index."""
    request_ids: dict[int, str]
    """Request ids of running candidates, by index."""
    place: RacePlace | None
