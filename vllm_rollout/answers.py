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
from vllm_rollout.kernel.parts import faces

OF_PARTS = {each.__name__: each for _, classes in faces("answers") for each in classes}
__all__ = [
    "Candidate",
    "CandidateEvent",
    "DoneEvent",
    "ErrorEvent",
    "Event",
    "GroupAnswer",
    "GroupEvent",
    "GroupStream",
    "RanksFreeEvent",
    "RestartedEvent",
    "RewardEvent",
    "RolloutAnswer",
    "StoppedCandidate",
    "TokensEvent",
    "Trajectory",
    "TrajectoryEvent",
    "Usage",
    *OF_PARTS,
]


def __getattr__(name: str) -> type:
    if name not in OF_PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return OF_PARTS[name]
