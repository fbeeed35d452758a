"""What viewers and files are told of groups of sessions: turns over time, and how each session ended.

Invariants: what is held for viewers is bounded, whatever harnesses do; groups that run are the last ones to be
forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_rollout.group.racing.sessions import Session
from vllm_rollout.server.sessions.groups import OpenGroup
from vllm_rollout.server.sessions.trajectory import Turn
from vllm_rollout.trace.session_rows import SessionGroupRow, TurnRow

MAX_SEEN_GROUPS, MAX_SEEN_SESSIONS = 64, 2048
"""That are told, with the sessions that their groups might have in all."""
MAX_SEEN_TURNS = 32
"""The last ones of each session."""


def recorded(group: OpenGroup) -> SessionGroupRow:
    """The row of a group that is over, with all turns of its sessions."""
    turns = {id: [_turn(group, turn) for turn in each.turns] for id, each in group.conversations.items()}
    return SessionGroupRow.model_validate(_row(group, turns))


def _row(group: OpenGroup, turns: Mapping[str, Sequence[TurnRow]]) -> dict[str, Any]:
    """The fields of a SessionGroupRow. `turns`: that have ended, by session."""
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
        "until": terms.until,
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
    """One of which viewers are told."""

    group: OpenGroup
    turns: dict[str, deque[TurnRow]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_SEEN_TURNS)))
    """By session: those that have ended."""

    def row(self) -> dict[str, Any]:
        return _row(self.group, self.turns)


class SeenSessions:
    """The groups that began last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, SeenGroup] = OrderedDict()
        """By the engine's name of the group: clients may give two the same id."""
        self._num_sessions = 0
        """The most that they may have."""
        self._changed: set[str] = set()
        """Those of which nobody was told since."""
        self._gone: list[str] = []
        """Likewise, forgotten."""

    def begun(self, group: OpenGroup) -> None:
        self._seen[group.engine_id] = SeenGroup(group)
        self._num_sessions += group.max_sessions
        self._changed.add(group.engine_id)
        while len(self._seen) > MAX_SEEN_GROUPS or (self._num_sessions > MAX_SEEN_SESSIONS and len(self._seen) > 1):
            over = (name for name, seen in self._seen.items() if seen.group.seconds is not None)
            self._forget(next(over, next(iter(self._seen))))

    def changed(self, group: OpenGroup) -> None:
        """Something of it has: a turn begins, or is left; sessions have ended."""
        if group.engine_id in self._seen:
            self._changed.add(group.engine_id)

    def turn_over(self, group: OpenGroup, session: Session, turn: Turn) -> None:
        if (seen := self._seen.get(group.engine_id)) is not None:
            seen.turns[session.id].append(_turn(group, turn))
            self.changed(group)

    def rows(self) -> list[dict[str, Any]]:
        """All groups that are known, as fields of a SessionGroupRow."""
        return [seen.row() for seen in self._seen.values()]

    def news(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows of what has changed since the last time, and names of those that were forgotten."""
        rows = [seen.row() for name, seen in self._seen.items() if name in self._changed]
        gone, self._gone = self._gone, []
        self._changed.clear()
        return rows, gone

    def _forget(self, name: str) -> None:
        self._num_sessions -= self._seen.pop(name).group.max_sessions
        self._changed.discard(name)
        self._gone = [*self._gone[-MAX_SEEN_GROUPS:], name]
