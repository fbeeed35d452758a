"""A group whose candidates are sessions: whole conversations of many turns, which end by saying so.

Invariant: each session ends once, no turn begins of one that has ended, and one turn of a session runs at a time.

Runs in the API process: a session outlives the requests that are its turns, and may change its rank between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, NamedTuple

from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.racing.lifecycle import Group
from vllm_rollout.group.racing.selection import conclude, deferred
from vllm_rollout.group.rewards.until import GroupRewards, UntilTerms, num_to_refill
from vllm_rollout.group.types import Ending, EndReason, GroupResult, GroupStatus

SessionState = Literal["turn", "between_turns", "finished", "truncated", "void", "pruned", "surplus", "deferred"]
"""The first two are open. `void`: it counts for nothing, and another one may take its place. `pruned`: it was stopped
by its score. `surplus`: it lost the race. `deferred`: nobody wants the group any more."""
EndedBy = Literal["finish", "last_turn", "length", "max_turns", "max_tokens", "idle", "score", "race", "cancel"]
"""What ended a session: its harness, by `finish` or with its last turn; a turn that was cut at its max_tokens; a limit
of the group; silence; its score; its siblings; whoever cancelled the group."""
TRUNCATED_BY: frozenset[EndedBy] = frozenset({"length", "max_turns", "max_tokens"})


class SessionLimits(NamedTuple):
    """Bounds of each session of a group."""

    max_turns: int | None = None
    max_tokens: int | None = None
    """That the policy generates in all turns."""
    idle_timeout_s: float = 600.0
    """So long a session may be between two turns."""
    cut_turn_ends: bool = True
    """A turn that was cut at its own max_tokens ends its session, as truncated."""


class SessionRefused(ValueError):
    """The session's state forbids what was asked. The text says what, and what to do."""


@dataclass(slots=True)
class Session:
    """One candidate."""

    id: str
    index: int
    since_s: float
    """When its last turn ended, or it was made."""
    num_turns: int = 0
    num_tokens: int = 0
    """That the policy generated, in turns that have ended."""
    in_turn: bool = False
    ended_by: EndedBy | None = None
    reward: float | None = None
    is_void: bool = False
    in_grading: bool = False
    """Its harness has said that it is over, and its reward is being found."""
    is_told: bool = False
    """Its harness has said that it is over, and will say nothing more of it."""

    @property
    def is_open(self) -> bool:
        return self.ended_by is None


class Settled(NamedTuple):
    """What follows from what has happened since the last time."""

    lost: tuple[Session, ...] = ()
    """Sessions that were open: their turns are to be stopped."""
    num_wanted: int = 0
    """Sessions that are to begin in the place of void ones, or until rewards differ."""


@dataclass(slots=True)
class SessionRace:
    """The sessions of one group. Time is any clock's, in seconds. No event takes a loop over the sessions."""

    plan: GroupPlan
    limits: SessionLimits
    until: UntilTerms | None = None
    """The group ends when its rewards differ (`group/rewards/until.py`); None: when it has its trajectories."""
    max_sessions: int = 0
    """The most that it may ever have."""
    now_s: float = 0.0
    sessions: dict[str, Session] = field(default_factory=dict)
    is_over: bool = False
    is_cancelled: bool = False
    is_abandoned: bool = False
    """It ended because nobody was heard of."""
    _group: Group = field(init=False)
    _num_places: int = field(init=False)
    """Sessions that it may have now."""
    active_s: float = field(init=False)
    """When a session was last heard of."""
    _returned: tuple[int, ...] | None = None
    """Indices, where the rewards decide."""
    _rewards: GroupRewards | None = None
    """Likewise."""
    _by_index: list[Session] = field(default_factory=list)
    _ended: list[Session] = field(default_factory=list)
    """Since `take_ended` was asked last."""
    _num_pruned: int = 0

    def __post_init__(self) -> None:
        terms = self.plan.terms
        if self.until is not None:
            terms = replace(terms, early_stop=False)
        self._group = Group(terms)
        self._num_places = self.plan.num_candidates
        self.max_sessions = max(self.max_sessions, self._num_places)
        self.active_s = self.now_s
        if self.until is not None:
            self._rewards = GroupRewards(self.until)
            self._rewards.launched(range(self._num_places))

    @property
    def num_to_enter(self) -> int:
        """Places that no session has taken."""
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
        """A session begins; when the group is over it has lost.

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
            self._lose([session.index])
        return session

    def tokens_left(self, session: Session) -> int | None:
        """That its next turn may generate at most; None: no limit of the group.

        Raises: SessionRefused when another turn runs. The caller has asked `is_open`.
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
        """Raises: SessionRefused as `tokens_left`."""
        self.tokens_left(session)
        session.in_turn = True

    def leave_turn(self, session: Session, now_s: float) -> None:
        """The turn came to no end: its client left, or it failed. It may be asked again."""
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
        """A turn has ended. `cut`: at its max_tokens; `last`: its client said that no other follows; `pruned`: its
        score stopped it."""
        self.leave_turn(session, now_s)
        session.num_turns += 1
        session.num_tokens += num_tokens
        if not session.is_open:
            return
        limits = self.limits
        if pruned:
            session.ended_by = "score"
            self._num_pruned += 1
            self._group.prune([session.index])
            self._has_ended(session)
        elif limits.max_tokens is not None and session.num_tokens >= limits.max_tokens:
            self._end(session, "last_turn" if last and not cut else "max_tokens")
        elif cut and limits.cut_turn_ends:
            self._end(session, "length")
        elif last:
            self._end(session, "last_turn")
        elif limits.max_turns is not None and session.num_turns >= limits.max_turns:
            self._end(session, "max_turns")

    def check_finish(self, session: Session) -> None:
        """Raises: SessionRefused when it has been finished, or amid a turn. One that lost may be finished."""
        if session.in_turn and session.is_open:
            raise SessionRefused(f"session {session.id!r} has a turn on its way. Finish it when that has ended.")
        if session.in_grading or session.ended_by == "finish" or session.is_void or session.reward is not None:
            raise SessionRefused(f"session {session.id!r} was finished before. Finish each session once.")

    def finish(self, session: Session, now_s: float, *, reward: float | None = None, void: bool = False) -> None:
        """Its harness says that it is over. One that a limit or its last turn has ended gets its reward.

        Raises: SessionRefused as `check_finish`.
        """
        self.check_finish(session)
        self.active_s = now_s
        session.is_told, session.reward = True, reward
        if session.is_open:
            self._end(session, "finish", void=void)
        if self.is_over or session.is_void or self._group.state(session.index) != "finished":
            return
        if void or (self.until is not None and reward is None):
            self._withdraw(session)  # a limit ended it, and it is worth nothing; or rewards decide, and it has none
        elif self._rewards is not None and reward is not None:
            self._rewards.graded(session.index, reward)

    @property
    def has_open(self) -> bool:
        """A session of it has begun and not ended, or is being graded."""
        return any(session.is_open or session.in_grading for session in self.sessions.values())

    def expire(self, now_s: float, heard_s: float = -inf) -> bool:
        """Ends sessions that have been silent for too long, and a group of which nobody is heard; whether any did.

        heard_s: when whoever serves this group was last heard of elsewhere.
        """
        timeout_s = self.limits.idle_timeout_s
        silent = [
            session
            for session in self.sessions.values()
            if session.is_open and not (session.in_turn or session.in_grading) and now_s - session.since_s > timeout_s
        ]
        for session in silent:
            self._end(session, "idle", void=True)
        if not (self.has_open or self.is_over) and now_s - max(self.active_s, heard_s) > timeout_s:
            self.is_abandoned = True
            self.max_sessions = len(self.sessions)
            self._set_places(self.max_sessions)
            for session in self.sessions.values() if self.until is not None else ():
                if session.reward is None and self._group.state(session.index) == "finished":
                    self._withdraw(session)
            return True
        return bool(silent)

    def cancel(self) -> Settled:
        """Nobody wants the rest."""
        lost = self._group.cancel()
        self.is_over = self.is_cancelled = True
        return Settled(self._lose(lost, "cancel"))

    def settle(self) -> Settled:
        """Decide on all that has happened since the last time."""
        if self.is_over:
            return Settled()
        settlement = self._group.settle()
        lost, num_wanted = [*settlement.stop, *settlement.lost_ties], 0
        if self._rewards is None:
            alive = self._group.num_finished + self._group.num_running + self.num_to_enter
            if self.plan.pruning is not None and self.plan.pruning.allow_fewer:
                alive += self._num_pruned
            num_wanted = num_to_refill(self.plan.group_size, self.max_sessions, self._num_places, alive)
            self.is_over = self._group.closed
        else:
            decision = self._rewards.decision()
            lost += self._group.give_up(set(decision.stop)) if decision.stop else []
            num_wanted = min(decision.launch, self.max_sessions - self._num_places)
            if decision.kind != "wait":
                self.is_over, self._returned = True, decision.returned
        if num_wanted and not self.is_over:
            self._set_places(self._num_places + num_wanted)
        nothing_comes = not self._group.num_running and self.num_to_enter <= 0 and not self._awaited
        if nothing_comes and not self.is_over:
            self.is_over, self._returned = True, self._graded
        return Settled(self._lose(lost), 0 if self.is_over else num_wanted)

    def take_ended(self) -> list[Session]:
        """Sessions that have ended since this was asked last, by index."""
        ended, self._ended = sorted(self._ended, key=lambda session: session.index), []
        return ended

    @property
    def result(self) -> GroupResult:
        """What it gives back, as far as it has come."""
        result = conclude(self.plan, self.endings, void=[s.index for s in self.sessions.values() if s.is_void])
        if self.is_cancelled:
            return deferred(result, "it was cancelled")
        if self._returned is None:
            return result
        status: GroupStatus = "complete" if len(self._returned) >= self.plan.group_size else "incomplete"
        return replace(result, status=status, selected=self._returned)

    @property
    def endings(self) -> list[Ending]:
        """How the sessions that are over have ended."""
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

    @property
    def _awaited(self) -> bool:
        """Some session has ended, and its reward is to come and decides."""
        return self._rewards is not None and self._group.num_finished > self._rewards.num_graded

    @property
    def _graded(self) -> tuple[int, ...] | None:
        """All that have a reward, where rewards decide."""
        return None if self._rewards is None else tuple(self._rewards.indices[: self.plan.group_size])

    def _set_places(self, num_places: int) -> None:
        if self._rewards is not None:
            self._rewards.launched(range(self._num_places, num_places))
        self._num_places = num_places
        self._group.terms = replace(self._group.terms, num_candidates=num_places)

    def _withdraw(self, session: Session) -> None:
        session.is_void = True
        self._group.withdraw(session.index)
        if self._rewards is not None:
            self._rewards.gone(session.index)

    def _end(self, session: Session, by: EndedBy, *, void: bool = False) -> None:
        session.ended_by, session.is_void = by, void
        reason: EndReason = "failed" if void else "length" if by in TRUNCATED_BY else "stop"
        self._group.end(session.index, reason, session.num_tokens)
        self._has_ended(session)

    def _lose(self, indices: Iterable[int], by: EndedBy = "race") -> tuple[Session, ...]:
        """The open ones of these have ended."""
        lost = tuple(self._by_index[index] for index in indices if self._by_index[index].is_open)
        for session in lost:
            session.ended_by = by
            self._has_ended(session)
        return lost

    def _has_ended(self, session: Session) -> None:
        self._ended.append(session)
        if self._rewards is not None and self._group.state(session.index) != "finished":
            self._rewards.gone(session.index)
