"""A group of sessions as its clients know it: its race, its trajectories, and who reads what becomes of it.

Invariant: each end of a session is told once, before that of its group.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, Protocol

from vllm_rollout.group.plans.fields import SelectionRule, Until
from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.plans.pruning_plan import PruningPlan
from vllm_rollout.group.racing.sessions import Session, SessionLimits, SessionRace
from vllm_rollout.group.types import GroupStatus
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.grading.body import RewardOptions
from vllm_rollout.server.sessions.body import (
    GroupOverEvent,
    SegmentAnswer,
    SessionAnswer,
    SessionEvent,
    SessionGroupAnswer,
    TrajectoryAnswer,
    TurnAnswer,
)
from vllm_rollout.server.sessions.trajectory import Comparison, Continuation, Conversation

MAX_EVENTS = 1024
"""How many may wait for a reader of a group's events, who is left when there are more."""
MAX_READERS = 64
"""How many may read the events of one group."""

Key = tuple[str, str]
"""Namespace of a client, and a name that it chose."""
Event = SessionEvent | GroupOverEvent
Status = GroupStatus | Literal["running"]


class Watcher(Protocol):
    """Who declares groups and waits for them, such as a round of a run. Nobody else may cancel them."""

    def heard_s(self, now_s: float) -> float:
        """When their harness was last heard of, in any of its groups."""

    def told(self, event: Event) -> None:
        """Takes an event of this group."""

    def over(self, group: OpenGroup) -> None: ...

    def finished(self, group: OpenGroup) -> None:
        """Its harness has said of a session that it is over."""

    def counted(self) -> None:
        """The last turn of a group that was over has ended, so that its tokens can be counted."""


class Terms(NamedTuple):
    """What a group was made with."""

    group_size: int
    num_candidates: int
    limits: SessionLimits
    early_stop: bool = True
    selection: SelectionRule = "first"
    is_rewritable: bool = False
    """Its turns may tell another history than the turns before."""
    until: Until = "complete"
    max_sessions: int | None = None
    pruning: PruningPlan | None = None
    pruning_turn: int = 1
    """The turn whose tokens are scored."""
    is_audit: bool = False

    @property
    def plan(self) -> GroupPlan:
        redundancy = self.num_candidates - self.group_size
        plan = GroupPlan(self.group_size, redundancy, self.early_stop, self.selection, pruning=self.pruning)
        return plan.audited() if self.is_audit else plan


@dataclass(eq=False, slots=True)
class OpenTurn:
    """A turn on its way."""

    group: OpenGroup
    session: Session
    max_tokens: int | None
    """That it may generate."""
    continuation: Continuation | Comparison
    """A comparison is still to be made (`SessionService.compare`)."""
    is_last: bool
    waited_s: float
    began_s: float
    is_scored: bool
    number: int
    """Among the turns of its session, from 1."""
    index: int = -1
    """By which the engine knows it, among the turns of the group; from its beginning on."""

    @property
    def engine_id(self) -> str:
        """The id of the group in which the engine judges it: those that are scored have one of their own."""
        return f"{self.group.engine_id}-scored" if self.is_scored else self.group.engine_id


@dataclass(eq=False, slots=True)
class OpenGroup:
    """One that the service has not forgotten."""

    key: Key
    terms: Terms
    race: SessionRace
    began_s: float
    max_sessions: int
    """That it may ever have."""
    began: float = field(default_factory=time.time)
    """Unix seconds."""
    rank: int | None = None
    """Where its last turn ran."""
    model: str | None = None
    """That its first turn asked for."""
    declared: list[str] | None = None
    """Ids of its sessions; None: its client names them."""
    num_answered: int = 0
    """How many of the declared ids an answer has named."""
    reward: RewardOptions | None = None
    data: Any = None
    """For its reward function."""
    num_data_tokens: int = 0
    """As many as its data counts for, where tokens are bounded."""
    engine_id: str = field(default_factory=lambda: f"sessions-{uuid.uuid4().hex}")
    """By which the engine knows it."""
    conversations: dict[str, Conversation] = field(default_factory=dict)
    """By session; empty where the service holds these tokens no more."""
    running: dict[str, OpenTurn] = field(default_factory=dict)
    """Turns on their way, by session."""
    num_launched: int = 0
    scored: dict[str, int] = field(default_factory=dict)
    """Index of the turn that was scored, by session."""
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    """Chance decides by it in pruning."""
    seconds: float | None = None
    """That it took; None while it runs."""
    watcher: Watcher | None = None
    is_counted: bool = False
    """It is over, and nothing of it runs any more."""
    ended_s: dict[str, float] = field(default_factory=dict)
    """When the end of each session was told, in seconds since it began."""
    status: Status = "running"
    selected: list[str] = field(default_factory=list)
    """Sessions that it returns, when it is over."""
    _to_finish: list[str] = field(default_factory=list)
    """Those of them that its harness may not have finished."""
    _readers: list[asyncio.Queue[Event | None]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.key[1]

    @property
    def to_begin(self) -> list[str]:
        """Declared sessions that have not begun."""
        return [] if self.race.is_over else [id for id in self.declared or () if id not in self.race.sessions]

    @property
    def awaits_finish(self) -> bool:
        """Its harness is still to say of a session that it returns that it is over, with its reward."""
        while self._to_finish and self.race.sessions[self._to_finish[-1]].is_told:
            self._to_finish.pop()
        return bool(self._to_finish)

    @property
    def num_held_tokens(self) -> int:
        return sum(each.num_held_tokens for each in self.conversations.values()) + self.num_data_tokens

    def declare(self, num: int) -> list[str]:
        """Ids of so many sessions more."""
        assert self.declared is not None
        before = len(self.declared)
        ids = [f"{self.id}.{number}" for number in range(before, before + num)]
        self.declared += ids
        return ids

    def wanted_now(self) -> list[str]:
        """Declared sessions that are to begin and that no answer has named."""
        if self.declared is None:
            return []
        new, self.num_answered = self.declared[self.num_answered :], len(self.declared)
        return [] if self.race.is_over else [id for id in new if id not in self.race.sessions]

    def let_go(self) -> None:
        """Hold its trajectories, and what graded them, no more."""
        self.conversations.clear()
        self.data, self.num_data_tokens = None, 0

    def since(self, now_s: float) -> float:
        """It began, to the millisecond."""
        return round(now_s - self.began_s, 3)

    def tell_ends(self, now_s: float) -> None:
        """Tells of the sessions that have ended since the last time."""
        for session in self.race.take_ended():
            self.ended_s[session.id] = self.since(now_s)
            self._tell(self._end_of(session))

    def tell_wanted(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._tell(self._wanted(id))

    def over(self, now_s: float) -> None:
        self.seconds = now_s - self.began_s
        result = self.race.result
        wanted = set(result.selected)
        self.status = result.status
        self.selected = [session.id for session in self.race.sessions.values() if session.index in wanted]
        self._to_finish = [*self.selected]
        self._tell(self._over_event)
        for queue in self._readers:
            _put(queue, None)

    def events(self) -> AsyncGenerator[Event, None]:
        """What has become of its sessions and which are to begin, then what becomes of them, until it is over.

        Raises: RequestError (429), before anything is sent, with too many readers.
        """
        if len(self._readers) >= MAX_READERS:
            raise RequestError(
                f"{MAX_READERS} others read the events of this group. Close one of them.",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                retry_after_s=1,
            )
        return self._read()

    async def _read(self) -> AsyncGenerator[Event, None]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue(MAX_EVENTS)
        told = [self._end_of(session) for session in self.race.sessions.values() if session.id in self.ended_s]
        told += map(self._wanted, self.to_begin)
        over = None if self.seconds is None else self._over_event
        self._readers.append(queue)
        try:
            for event in told:
                yield event
            if over is not None:
                yield over
                return
            while (waiting := await queue.get()) is not None:
                yield waiting
        finally:
            self._readers.remove(queue)

    def answer(self, now_s: float) -> SessionGroupAnswer:
        over, result = self.race.is_over, self.race.result
        return SessionGroupAnswer(
            id=self.id,
            status=self.status,
            reason=result.reason if over else None,
            group_size=self.terms.group_size,
            sessions=[SessionAnswer(**self.told(session)) for session in self.race.sessions.values()],
            to_begin=self.to_begin,
            num_to_begin=0 if over else max(0, self.race.num_to_enter),
            selected=self.selected,
            generated_tokens=sum(session.num_tokens for session in self.race.sessions.values()),
            returned_tokens=result.returned_tokens if over else 0,
            seconds=now_s - self.began_s if self.seconds is None else self.seconds,
        )

    def trajectory(self, session: Session) -> TrajectoryAnswer:
        conversation = self.conversations.get(session.id)
        turns = [] if conversation is None else conversation.turns
        return TrajectoryAnswer(
            **self.told(session),
            group_id=self.id,
            off_policy=len({span["version"] for turn in turns for span in turn.weight_versions}) > 1,
            turns=[TurnAnswer(**{name: getattr(turn, name) for name in TurnAnswer.model_fields}) for turn in turns],
            segments=None
            if conversation is None
            else [
                SegmentAnswer(
                    token_ids=list(each.token_ids),
                    mask=list(each.mask),
                    logprobs=None if each.logprobs is None else list(each.logprobs),
                )
                for each in conversation.segments
            ],
        )

    def told(self, session: Session) -> dict[str, Any]:
        """The fields of a SessionAnswer."""
        return {
            "id": session.id,
            "state": self.race.state(session),
            "ended_by": session.ended_by,
            "num_turns": session.num_turns,
            "num_tokens": session.num_tokens,
            "reward": session.reward,
        }

    def _end_of(self, session: Session) -> SessionEvent:
        state = self.race.state(session)
        return SessionEvent(group_id=self.id, session_id=session.id, state=state, ended_by=session.ended_by)

    def _wanted(self, id: str) -> SessionEvent:
        return SessionEvent(group_id=self.id, session_id=id, state="wanted", ended_by=None)

    @property
    def _over_event(self) -> GroupOverEvent:
        status = self.status
        assert status != "running"
        return GroupOverEvent(group_id=self.id, status=status, selected=self.selected)

    def _tell(self, event: Event) -> None:
        if self.watcher is not None:
            self.watcher.told(event)
        for queue in self._readers:
            _put(queue, event)


def _put(queue: asyncio.Queue[Event | None], event: Event | None) -> None:
    """A reader who is too far behind is left: its stream ends."""
    if queue.full():
        queue.get_nowait()
        event = None
    queue.put_nowait(event)


def limits_of(said: Mapping[str, Any]) -> SessionLimits:
    """The limits of fields that were said; the others have their defaults."""
    fields = {name: said[name] for name in ("max_turns", "max_tokens", "idle_timeout_s") if said.get(name) is not None}
    return SessionLimits(**fields, cut_turn_ends=said.get("cut_turn") != "goes_on")
