"""Groups from a stream, each when it is over. Invariant: a group is the same as in the answer of `rollout`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from vllm_rollout.kernel.http.answers import (
    Candidate,
    CandidateEvent,
    DoneEvent,
    Event,
    GroupAnswer,
    GroupEvent,
    GroupSummary,
    RestartedEvent,
    RewardEvent,
    RewardFields,
    Trajectory,
    TrajectoryEvent,
)


class GroupStream:
    """Iterate this over a stream of a rollout or of a round. It yields groups in the order in which they end.

        groups = GroupStream(client.stream(prompts, 8, reward="math"))
        for group in groups:            # a GroupAnswer, graded
            learn(group)
        groups.summary.usage            # what the stream's last event said

    Trajectories of a group that is deferred or runs again are dropped. Raises: whatever the stream raises.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events = events
        self._ended: defaultdict[str, dict[int, Trajectory]] = defaultdict(dict)
        self._others: defaultdict[str, list[Candidate]] = defaultdict(list)
        self.summary: DoneEvent | None = None
        """Last event of the stream. None until the stream is over."""

    def __iter__(self) -> Iterator[GroupAnswer]:
        for event in self._events:
            if (group := self.take(event)) is not None:
                yield group

    def take(self, event: Event) -> GroupAnswer | None:
        """Account for the next event. Returns the group that this event ends, if any."""
        match event:
            case TrajectoryEvent():
                self._ended[event.group_id][event.trajectory.index] = event.trajectory
            case RewardEvent() if (its := self._ended[event.group_id].get(event.index)) is not None:
                for name in RewardFields.model_fields:
                    setattr(its, name, getattr(event, name))
            case CandidateEvent():
                self._others[event.group_id].append(event.candidate)
            case RestartedEvent():
                self._ended.pop(event.group_id, None)
                self._others.pop(event.group_id, None)
            case GroupEvent():
                said = {name: getattr(event, name) for name in GroupSummary.model_fields}
                mine = self._ended.pop(event.group_id, {})
                chosen = [mine[index] for index in event.selected]
                others = self._others.pop(event.group_id, [])
                return GroupAnswer.model_construct(**said, trajectories=chosen, candidates=others)
            case DoneEvent():
                self.summary = event
        return None
