"""What viewers are told of groups of sessions: turns over time, and how each session ended. It knows of no viewer.

Invariants: what is held is bounded, whatever harnesses do; groups that run are the last ones to be forgotten.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_rollout.group.racing.sessions import Session
from vllm_rollout.server.sessions.groups import OpenGroup, OpenTurn

MAX_SEEN_GROUPS, MAX_SEEN_SESSIONS = 64, 2048
"""That are told, with the sessions that their groups might have in all."""
MAX_SEEN_TURNS = 32
"""The last ones of each session."""


class SeenTurn(NamedTuple):
    """A turn that has ended. Seconds are those since its group began."""

    began_s: float
    ended_s: float
    num_tokens: int


@dataclass(slots=True)
class SeenGroup:
    """What its clients are not told: when what was."""

    group: OpenGroup
    began: float
    """Unix seconds."""
    turns: dict[str, deque[SeenTurn]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_SEEN_TURNS)))
    """By session."""
    ended_s: dict[str, float] = field(default_factory=dict)
    """Likewise, of those that have ended."""

    def row(self) -> dict[str, Any]:
        group = self.group
        result = group.race.result if group.race.is_over else None
        return {
            "name": group.engine_id,
            "id": group.id,
            "status": group.status,
            "reason": None if result is None else result.reason,
            "group_size": group.terms.group_size,
            "began": self.began,
            "seconds": group.seconds,
            "num_to_begin": 0 if result is not None else max(0, group.race.num_to_enter),
            "sessions": [self._session(session) for session in group.race.sessions.values()],
            "selected": [] if result is None else list(result.selected),
        }

    def _session(self, session: Session) -> dict[str, Any]:
        running = self.group.running.get(session.id)
        turns: list[tuple[float, float | None, int | None]] = list(self.turns.get(session.id, ()))
        if running is not None:
            turns.append((self.since(running.began_s), None, None))
        return {**self.group.told(session), "turns": turns, "ended_s": self.ended_s.get(session.id)}

    def since(self, now_s: float) -> float:
        """To the millisecond."""
        return round(now_s - self.group.began_s, 3)


class SeenSessions:
    """The groups that began last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, SeenGroup] = OrderedDict()
        """By the engine's name of the group: clients may give two the same id."""
        self._num_sessions = 0
        """The most that they may have."""
        self._changed: set[str] = set()
        """Those of which nobody was told since."""
        self._gone: list[str] = []
        """Likewise, forgotten."""

    def begun(self, group: OpenGroup) -> None:
        self._seen[group.engine_id] = SeenGroup(group, time.time())
        self._num_sessions += group.max_sessions
        self._changed.add(group.engine_id)
        while len(self._seen) > MAX_SEEN_GROUPS or (self._num_sessions > MAX_SEEN_SESSIONS and len(self._seen) > 1):
            over = (name for name, seen in self._seen.items() if seen.group.seconds is not None)
            self._forget(next(over, next(iter(self._seen))))

    def changed(self, group: OpenGroup) -> None:
        """Something of it has: a turn begins, or is left."""
        if group.engine_id in self._seen:
            self._changed.add(group.engine_id)

    def turn_over(self, turn: OpenTurn, num_tokens: int) -> None:
        if (seen := self._seen.get(turn.group.engine_id)) is not None:
            ended_s = seen.since(self._clock())
            seen.turns[turn.session.id].append(SeenTurn(seen.since(turn.began_s), ended_s, num_tokens))
            self.changed(turn.group)

    def settled(self, group: OpenGroup) -> None:
        """It was decided which of its sessions have ended."""
        if (seen := self._seen.get(group.engine_id)) is not None:
            now_s = seen.since(self._clock())
            for session in group.race.sessions.values():
                if not session.is_open:
                    seen.ended_s.setdefault(session.id, now_s)
            self.changed(group)

    def rows(self) -> list[dict[str, Any]]:
        """Of all that are known."""
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
