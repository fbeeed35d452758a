"""Rules of a group whose candidates are sessions: conversations of many turns, whose client reports their end.

Runs in the API process: a session outlives the requests that are its turns, and may change its rank between turns.

Invariant: each session ends once, a session that has ended begins no turn, and one turn of a session runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.selection import conclude, deferred
from vllm_rollout.kernel.rules.types import EndedBy, Ending, EndReason, GroupResult, SessionState
from vllm_rollout.parts.rewards.rules.refill import num_to_refill

TRUNCATED_BY: frozenset[EndedBy] = frozenset({"length", "max_turns", "max_tokens"})


class SessionLimits(NamedTuple):
    """Limits of each session of a group."""

    max_turns: int | None = None
    max_tokens: int | None = None
    """Tokens that the policy generates in all turns together."""
    idle_timeout_s: float = 600.0
    """Longest time between two turns, in seconds."""
    cut_turn_ends: bool = True
    """True: a turn that is cut at its own max_tokens ends its session, as truncated."""


class SessionRefused(ValueError):
    """The state of the session forbids the request. The text says why, and what to do instead."""


@dataclass(slots=True)
class Session:
    """One candidate of a group of sessions."""

    id: str
    index: int
    since_s: float
    """Time when its last turn ended, or when it was created, in seconds."""
    num_turns: int = 0
    num_tokens: int = 0
    """Tokens that the policy generated in turns that have ended."""
    in_turn: bool = False
    ended_by: EndedBy | None = None
    reward: float | None = None
    is_void: bool = False
    in_grading: bool = False
    """True while its reward is computed, after its harness has finished it."""
    is_told: bool = False
    """True once its harness has finished it and sends nothing more."""

    @property
    def is_open(self) -> bool:
        return self.ended_by is None


class Settled(NamedTuple):
    """Consequences of the events since the last settlement."""

    lost: tuple[Session, ...] = ()
    """Sessions that were open and have lost. Their turns have to be stopped."""
    num_wanted: int = 0
    """Number of sessions to begin, in place of void ones."""


@dataclass(slots=True)
class SessionRace:
    """The sessions of one group. Times are seconds of any clock. No event takes a loop over the sessions."""

    plan: GroupPlan
    limits: SessionLimits
    max_sessions: int = 0
    """Most sessions that the group may ever have."""
    now_s: float = 0.0
    sessions: dict[str, Session] = field(default_factory=dict)
    is_over: bool = False
    is_cancelled: bool = False
    is_abandoned: bool = False
    """True if the group ended because no session of it ran for `idle_timeout_s`."""
    _group: Group = field(init=False)
    _num_places: int = field(init=False)
    """Number of sessions that the group may have now."""
    active_s: float = field(init=False)
    """Time of the last activity of any session, in seconds."""
    _by_index: list[Session] = field(default_factory=list)
    _ended: list[Session] = field(default_factory=list)
    """Sessions that ended since the last `take_ended`."""
    _num_pruned: int = 0

    def __post_init__(self) -> None:
        self._group = Group(self.plan.terms)
        self._num_places = self.plan.num_candidates
        self.max_sessions = max(self.max_sessions, self._num_places)
        self.active_s = self.now_s

    @property
    def num_to_enter(self) -> int:
        """Free places for new sessions."""
        return self._num_places - len(self.sessions)

    def state(self, session: Session) -> SessionState:
        if session.is_open:
            return "turn" if session.in_turn else "between_turns"
        if session.is_void:
            return "void"
        state = self._group.state(session.index)
        if state in ("pruned", "surplus", "deferred"):
            return state
        return "truncated" if session.ended_by in TRUNCATED_BY else "finished"

    def enter(self, session_id: str, now_s: float) -> Session:
        """Begin a session. If the group is over, the session has already lost.

        Raises: SessionRefused when all places are taken, or the group was given up.
        """
        if (self.max_sessions - len(self.sessions) if self.is_over else self.num_to_enter) <= 0:
            if self.is_abandoned:
                raise SessionRefused(
                    f"this group is over: nobody ran a session of it for {self.limits.idle_timeout_s:g} s "
                    "(idle_timeout_s). Name another group."
                )
            raise SessionRefused(
                f"this group has its {len(self.sessions)} sessions. Ask for more by rollout_num_candidates "
                "(redundancy), or name another group."
            )
        session = Session(session_id, self._group.launch(), now_s)
        self.sessions[session_id] = session
        self._by_index.append(session)
        self.active_s = now_s
        if self.is_over:
            self._group.settle()
            self._group.give_up([session.index])  # a group that pruning left with fewer is over, and not closed
            self._lose([session.index])
        return session

    def tokens_left(self, session: Session) -> int | None:
        """Tokens that the session's next turn may generate. None: the group sets no limit.

        Raises: SessionRefused when another turn runs, or the session is being graded. The caller has checked `is_open`.
        """
        if session.in_grading:
            raise SessionRefused(f"session {session.id!r} was finished, and is being graded: no turn follows.")
        if session.in_turn:
            raise SessionRefused(
                f"session {session.id!r} has a turn on its way: one may run at a time. Wait for its answer, or give "
                "each conversation a session of its own. If X-Session-ID is there for a router only, send "
                "X-Correlation-ID in its place: it makes no session."
            )
        most = self.limits.max_tokens
        return None if most is None else most - session.num_tokens

    def begin_turn(self, session: Session) -> None:
        """Begin a turn. Raises: SessionRefused as `tokens_left`."""
        self.tokens_left(session)
        session.in_turn = True

    def leave_turn(self, session: Session, now_s: float) -> None:
        """Close a turn without an answer: its client left, or it failed. The client may repeat it."""
        session.in_turn, session.since_s = False, now_s
        self.active_s = now_s

    def end_turn(
        self,
        session: Session,
        num_tokens: int,
        now_s: float,
        *,
        cut: bool = False,
        last: bool = False,
        pruned: bool = False,
    ) -> None:
        """Record the end of a turn.

        `cut`: it reached its max_tokens. `last`: its client said that no turn follows. `pruned`: its score stopped it.
        """
        self.leave_turn(session, now_s)
        session.num_turns += 1
        session.num_tokens += num_tokens
        if not session.is_open:
            return
        limits = self.limits
        if pruned:
            session.ended_by = "score"
            self._num_pruned += 1
            self._group.rule_out([session.index], "pruned")
            self._ended.append(session)
        elif limits.max_tokens is not None and session.num_tokens >= limits.max_tokens:
            self._end(session, "last_turn" if last and not cut else "max_tokens")
        elif cut and limits.cut_turn_ends:
            self._end(session, "length")
        elif last:
            self._end(session, "last_turn")
        elif limits.max_turns is not None and session.num_turns >= limits.max_turns:
            self._end(session, "max_turns")

    def check_finish(self, session: Session) -> None:
        """Raises: SessionRefused when the session was finished before, or a turn runs. A session that lost may be
        finished."""
        if session.in_turn and session.is_open:
            raise SessionRefused(f"session {session.id!r} has a turn on its way. Finish it when that has ended.")
        if session.in_grading or session.ended_by == "finish" or session.is_void or session.reward is not None:
            raise SessionRefused(f"session {session.id!r} was finished before. Finish each session once.")

    def finish(self, session: Session, now_s: float, *, reward: float | None = None, void: bool = False) -> None:
        """Finish a session for its harness. A session that ended by a limit or its last turn gets its reward.

        Raises: SessionRefused as `check_finish`.
        """
        self.check_finish(session)
        self.active_s = now_s
        session.is_told, session.reward = True, reward
        if session.is_open:
            self._end(session, "finish", void=void)
        if self.is_over or session.is_void or self._group.state(session.index) != "finished":
            return
        if void:  # though a limit ended it
            session.is_void = True
            self._group.withdraw(session.index)

    @property
    def has_open(self) -> bool:
        """True if any session is open, or is being graded."""
        return any(session.is_open or session.in_grading for session in self.sessions.values())

    def is_silent(self, now_s: float, heard_s: float = -inf) -> bool:
        """True if no session is open, and none was active for `idle_timeout_s`. `heard_s`: as of `expire`."""
        return not self.has_open and now_s - max(self.active_s, heard_s) > self.limits.idle_timeout_s

    def expire(self, now_s: float, heard_s: float = -inf) -> bool:
        """End silent sessions, and abandon a group without activity. Returns True if anything ended.

        heard_s: time of the last activity of this group's server elsewhere, in seconds.
        """
        timeout_s = self.limits.idle_timeout_s
        silent = [
            session
            for session in self.sessions.values()
            if session.is_open and not (session.in_turn or session.in_grading) and now_s - session.since_s > timeout_s
        ]
        for session in silent:
            self._end(session, "idle", void=True)
        if not self.is_over and self.is_silent(now_s, heard_s):
            self.is_abandoned = True
            self.max_sessions = len(self.sessions)
            self._set_places(self.max_sessions)
            return True
        return bool(silent)

    def cancel(self) -> Settled:
        """Cancel the group. Returns its open sessions as lost."""
        lost = self._group.cancel()
        self.is_over = self.is_cancelled = True
        return Settled(self._lose(lost, "cancel"))

    def settle(self) -> Settled:
        """Decide on all events since the last settlement."""
        if self.is_over:
            return Settled()
        settlement = self._group.settle()
        alive = self._group.num_finished + self._group.num_running + self.num_to_enter
        if self.plan.pruning is not None and self.plan.pruning.allow_fewer:
            alive += self._num_pruned
        num_wanted = num_to_refill(self.plan.group_size, self.max_sessions, self._num_places, alive)
        self.is_over = self._group.closed
        if num_wanted and not self.is_over:
            self._set_places(self._num_places + num_wanted)
        if not self._group.num_running and self.num_to_enter <= 0:
            self.is_over = True
        lost = self._lose((*settlement.stop, *settlement.lost_ties))
        return Settled(lost, 0 if self.is_over else num_wanted)

    def take_ended(self) -> list[Session]:
        """Sessions that ended since the last call, by index."""
        ended, self._ended = sorted(self._ended, key=lambda session: session.index), []
        return ended

    @property
    def result(self) -> GroupResult:
        """The result of the group, as far as its sessions have ended."""
        result = conclude(self.plan, self.endings, void=[s.index for s in self.sessions.values() if s.is_void])
        return deferred(result, "it was cancelled") if self.is_cancelled else result

    @property
    def endings(self) -> list[Ending]:
        """Endings of the sessions that are not open."""
        return [
            Ending(
                session.index,
                self._group.state(session.index),
                session.num_tokens,
                truncated=session.ended_by in TRUNCATED_BY,
                end_step=self._group.end_step(session.index),
            )
            for session in self.sessions.values()
            if not session.is_open
        ]

    def _set_places(self, num_places: int) -> None:
        self._num_places = num_places
        self._group.terms = replace(self._group.terms, num_candidates=num_places)

    def _end(self, session: Session, by: EndedBy, *, void: bool = False) -> None:
        session.ended_by, session.is_void = by, void
        reason: EndReason = "failed" if void else "length" if by in TRUNCATED_BY else "stop"
        self._group.end(session.index, reason, session.num_tokens)
        self._ended.append(session)

    def _lose(self, indices: Iterable[int], by: EndedBy = "race") -> tuple[Session, ...]:
        """End those of these sessions that are open, and return them."""
        lost = tuple(self._by_index[index] for index in indices if self._by_index[index].is_open)
        for session in lost:
            session.ended_by = by
            self._ended.append(session)
        return lost
