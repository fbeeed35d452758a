"""Observations of groups of sessions, for viewers and files: turns over time, and the end of each session.

Invariants: memory for viewers is bounded, whatever harnesses do. Running groups are forgotten last.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.page.http.events import event_of
from vllm_rollout.parts.page.http.plan import PagePlan
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.page.recording.session_rows import SessionGroupRow, SessionReward, SessionRewardRow, TurnRow
from vllm_rollout.parts.sessions.http.groups import Observer, OpenGroup
from vllm_rollout.parts.sessions.http.trajectory import Turn
from vllm_rollout.parts.sessions.rules import Session

MAX_SEEN_GROUPS, MAX_SEEN_SESSIONS = 64, 2048
"""Most groups that viewers can read, and most sessions that these groups might have in all."""
MAX_SEEN_TURNS = 32
"""Most turns that are kept of each session: the last ones."""


def observers(rollouts: RolloutService) -> list[Observer]:
    """The observers of all groups: one for viewers, and one for a recording if there is one."""
    page, seen = rollouts.part(PagePlan), SeenSessions()
    page.viewers.feeds.append(seen)
    return [seen] if page.recorder is None else [seen, RecordedSessions(page.recorder)]


class RecordedSessions(Observer):
    """Records each group once it is over. A group without sessions gets no row."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def over(self, group: OpenGroup) -> None:
        if group.race.sessions:
            self._recorder.append_first(group.engine_id, recorded(group))

    def rewarded(self, group: OpenGroup, session: Session) -> None:
        if session.reward is not None:
            reward = SessionReward(index=session.index, reward=session.reward)
            row = SessionRewardRow(name=group.engine_id, rewards=[reward])
            self._recorder.append_later(group.engine_id, row.model_dump_json())


def recorded(group: OpenGroup) -> SessionGroupRow:
    """The row of a group that is over, with all turns of its sessions."""
    turns = {id: [_turn(group, turn) for turn in each.turns] for id, each in group.conversations.items()}
    return SessionGroupRow.model_validate(_row(group, turns))


def _row(group: OpenGroup, turns: Mapping[str, Sequence[TurnRow]]) -> dict[str, Any]:
    """The fields of a SessionGroupRow. `turns`: ended turns by session id."""
    terms, limits = group.terms, group.terms.limits
    result = group.race.result if group.race.is_over else None
    return {
        "name": group.engine_id,
        "id": group.id,
        "model": group.model,
        "rank": group.rank,
        "group_size": terms.group_size,
        "num_candidates": terms.num_candidates,
        "max_sessions": group.max_sessions,
        "max_turns": limits.max_turns,
        "max_tokens": limits.max_tokens,
        "early_stop": terms.early_stop,
        "selection": terms.selection,
        "detection_length": None if terms.pruning is None else terms.pruning.detection_length,
        "pruning_turn": None if terms.pruning is None else terms.pruning_turn,
        "audit": terms.is_audit,
        "began": group.began,
        "seconds": group.seconds,
        "status": group.status,
        "reason": None if result is None else result.reason,
        "num_to_begin": 0 if result is not None else max(0, group.race.num_to_enter),
        "sessions": [_session(group, each, turns.get(each.id, ())) for each in group.race.sessions.values()],
        "selected": [] if result is None else list(result.selected),
    }


def _session(group: OpenGroup, session: Session, ended: Sequence[TurnRow]) -> dict[str, Any]:
    turns = list(ended)
    if (running := group.running.get(session.id)) is not None:
        turns.append(TurnRow(group.since(running.began_s)))
    return {**group.told(session), "turns": turns, "ended_s": group.ended_s.get(session.id)}


def _turn(group: OpenGroup, turn: Turn) -> TurnRow:
    return TurnRow(
        group.since(turn.began_s),
        group.since(turn.began_s + turn.seconds),
        turn.num_tokens,
        turn.num_prompt_tokens,
        turn.num_cached_tokens,
        turn.history,
    )


@dataclass(slots=True)
class SeenGroup:
    """A group that viewers can read."""

    group: OpenGroup
    turns: dict[str, deque[TurnRow]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_SEEN_TURNS)))
    """Ended turns by session id."""

    def row(self) -> dict[str, Any]:
        return _row(self.group, self.turns)


class SeenSessions(Observer):
    """The most recent groups, for viewers."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, SeenGroup] = OrderedDict()
        """Groups by the engine's names. Clients may give two groups the same id."""
        self._num_sessions = 0
        """Most sessions that these groups may have."""
        self._changed: set[str] = set()
        """Names of groups with changes that were not sent to viewers yet."""
        self._gone: list[str] = []
        """Names of forgotten groups that were not sent to viewers yet."""

    def begun(self, group: OpenGroup) -> None:
        self._seen[group.engine_id] = SeenGroup(group)
        self._num_sessions += group.max_sessions
        self._changed.add(group.engine_id)
        while len(self._seen) > MAX_SEEN_GROUPS or (self._num_sessions > MAX_SEEN_SESSIONS and len(self._seen) > 1):
            over = (name for name, seen in self._seen.items() if seen.group.seconds is not None)
            self._forget(next(over, next(iter(self._seen))))

    def changed(self, group: OpenGroup) -> None:
        if group.engine_id in self._seen:
            self._changed.add(group.engine_id)

    def turn_over(self, group: OpenGroup, session: Session, turn: Turn) -> None:
        if (seen := self._seen.get(group.engine_id)) is not None:
            seen.turns[session.id].append(_turn(group, turn))
            self.changed(group)

    def rows(self) -> list[dict[str, Any]]:
        """All known groups, as fields of a SessionGroupRow."""
        return [seen.row() for seen in self._seen.values()]

    def everything(self) -> list[bytes]:
        return [event_of("sessions", row) for row in self.rows()]

    def changes(self) -> list[bytes]:
        rows, gone = self.news()
        told = [event_of("sessions", row) for row in rows]
        return told + ([event_of("gone", {"rollout_ids": [], "sessions": gone})] if gone else [])

    def news(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows of groups that have changed since the last call, and names of forgotten groups."""
        rows = [seen.row() for name, seen in self._seen.items() if name in self._changed]
        gone, self._gone = self._gone, []
        self._changed.clear()
        return rows, gone

    def _forget(self, name: str) -> None:
        self._num_sessions -= self._seen.pop(name).group.max_sessions
        self._changed.discard(name)
        self._gone = [*self._gone[-MAX_SEEN_GROUPS:], name]
