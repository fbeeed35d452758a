"""Answers and events of the clients, and `GroupStream`, which makes groups of a stream's events.

`answers.pyi` has their types. Write it anew by `python -m docs_tools.stub --write`.
"""

from vllm_rollout.kernel.client.groups import GroupStream
from vllm_rollout.kernel.http.answers import (
    Candidate,
    CandidateEvent,
    DoneEvent,
    ErrorEvent,
    Event,
    GroupAnswer,
    GroupEvent,
    RanksFreeEvent,
    RestartedEvent,
    RewardEvent,
    RolloutAnswer,
    StoppedCandidate,
    TokensEvent,
    Trajectory,
    TrajectoryEvent,
    Usage,
)
from vllm_rollout.parts.rounds.http.answers import DeferredEvent, FilteredEvent, RoundAnswer, RoundDoneEvent, RoundEvent

__all__ = [
    "Candidate",
    "CandidateEvent",
    "DeferredEvent",
    "DoneEvent",
    "ErrorEvent",
    "Event",
    "FilteredEvent",
    "GroupAnswer",
    "GroupEvent",
    "GroupStream",
    "RanksFreeEvent",
    "RestartedEvent",
    "RewardEvent",
    "RolloutAnswer",
    "RoundAnswer",
    "RoundDoneEvent",
    "RoundEvent",
    "StoppedCandidate",
    "TokensEvent",
    "Trajectory",
    "TrajectoryEvent",
    "Usage",
]
