"""A group of sessions as its clients know it: its race, its trajectories and the readers of its events.

Invariant: the end of each session is reported once, before the end of its group.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, Protocol

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.protocol import RewardOptions
from vllm_rollout.kernel.rules.fields import SelectionRule
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.terms_port import PartTerms, Pruning, pruning_of
from vllm_rollout.kernel.rules.types import GroupStatus
from vllm_rollout.parts.sessions.http.body import (
    GroupOverEvent,
    PromptSessions,
    SegmentAnswer,
    SessionAnswer,
    SessionEvent,
    SessionGroupAnswer,
    TrajectoryAnswer,
    TurnAnswer,
)
from vllm_rollout.parts.sessions.http.trajectory import Comparison, Continuation, Conversation, Turn
from vllm_rollout.parts.sessions.rules import Session, SessionLimits, SessionRace

MAX_EVENTS = 1024
"""Most events that may wait for a reader of a group's events. With more, the reader's stream ends."""
MAX_READERS = 64
"""Most readers of one group's events."""

Key = tuple[str, str]
"""A client's namespace, and a name that the client chose."""
Event = SessionEvent | GroupOverEvent
Status = GroupStatus | Literal["running"]


class Watcher(Protocol):
    """Declares groups and waits for their ends, such as a round of a run. Clients cannot cancel these groups while
    they run."""

    def heard_s(self, now_s: float) -> float:
        """The time at which their harness was last active in any of these groups, by the service's clock."""

    def told(self, event: Event) -> None:
        """Take an event of this group."""

    def over(self, group: OpenGroup) -> None: ...

    def finished(self, group: OpenGroup) -> None:
        """The harness has finished a session of this group."""

    def counted(self) -> None:
        """The last turn of a finished group has ended, so that its tokens can be counted."""


class Observer:
    """Hears of all groups. By default it does nothing."""

    def begun(self, group: OpenGroup) -> None:
        """A group has begun."""

    def changed(self, group: OpenGroup) -> None:
        """A turn of this group begins or is left, or sessions have ended."""

    def turn_over(self, group: OpenGroup, session: Session, turn: Turn) -> None:
        """A turn has ended."""

    def over(self, group: OpenGroup) -> None:
        """A group is over or was cancelled, and nothing of it runs."""

    def rewarded(self, group: OpenGroup, session: Session) -> None:
        """A session was finished after the end of its group."""


class Terms(NamedTuple):
    """Settings with which a group was made."""

    group_size: int
    num_candidates: int
    limits: SessionLimits
    early_stop: bool = True
    selection: SelectionRule = "first"
    is_rewritable: bool = False
    """True if a turn may contradict the history of earlier turns."""
    max_sessions: int | None = None
    parts: Mapping[str, PartTerms] = {}
    """Terms with parts, by part."""
    pruning_turn: int = 1
    """Number of the turn whose tokens are scored, from 1."""
    is_audit: bool = False

    @property
    def pruning(self) -> Pruning | None:
        """Fields of pruning. None: sessions are not scored."""
        return pruning_of(self.parts)

    @property
    def plan(self) -> GroupPlan:
        redundancy = self.num_candidates - self.group_size
        plan = GroupPlan(self.group_size, redundancy, self.early_stop, self.selection, parts=self.parts)
        return plan.audited() if self.is_audit else plan


@dataclass(eq=False, slots=True)
class OpenTurn:
    """A running turn."""

    group: OpenGroup
    session: Session
    max_tokens: int | None
    """Most tokens that it may generate."""
    continuation: Continuation | Comparison
    """If a `Comparison`, it is still to be made (`SessionService.compare`)."""
    is_last: bool
    waited_s: float
    began_s: float
    is_scored: bool
    number: int
    """Number of the turn in its session, from 1."""
    index: int = -1
    """Number of the turn in its group, by which the engine knows it. Set when the turn begins."""

    @property
    def engine_id(self) -> str:
        """Id of the engine's group for the turn. Scored turns have a group of their own."""
        return f"{self.group.engine_id}-scored" if self.is_scored else self.group.engine_id


@dataclass(eq=False, slots=True)
class OpenGroup:
    """A group that the service still knows."""

    key: Key
    terms: Terms
    race: SessionRace
    began_s: float
    max_sessions: int
    """Most sessions that the group may ever have."""
    began: float = field(default_factory=time.time)
    """Start in Unix seconds."""
    rank: int | None = None
    """Rank of its last turn."""
    priority: Callable[[], int] = int
    """Gives the priority of a turn, as vLLM's: a lower number comes first. Without a feed it is 0."""
    model: str | None = None
    """Model that its first turn asked for."""
    declared: list[str] | None = None
    """Ids of its sessions. None if its client names them."""
    num_answered: int = 0
    """Number of declared ids that were sent in an answer."""
    reward: RewardOptions | None = None
    data: Any = None
    """Data for the reward function."""
    num_data_tokens: int = 0
    """Size of `data`, counted in tokens for the limit on held tokens."""
    engine_id: str = field(default_factory=lambda: f"sessions-{uuid.uuid4().hex}")
    """Name by which the engine knows the group."""
    conversations: dict[str, Conversation] = field(default_factory=dict)
    """Conversations by session id. Empty if the service no longer holds their tokens."""
    running: dict[str, OpenTurn] = field(default_factory=dict)
    """Running turns by session id."""
    num_launched: int = 0
    scored: dict[str, int] = field(default_factory=dict)
    """Index of the scored turn, by session id."""
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    """Seed of pruning's random choices."""
    seconds: float | None = None
    """Seconds that the group took. None while it runs."""
    watcher: Watcher | None = None
    is_returned: bool = False
    """True if whoever declared it for a prompt has read it."""
    saw_bad_weights: bool = False
    """True if a log probability of a turn was not a number."""
    is_counted: bool = False
    """True if the group is over and no turn of it runs any more."""
    ended_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the start to the reported end of each session, by session id."""
    status: Status = "running"
    selected: list[str] = field(default_factory=list)
    """Ids of the sessions that it returns, once it is over."""
    _to_finish: list[str] = field(default_factory=list)
    """Ids of returned sessions that the harness may not have finished yet."""
    _readers: list[asyncio.Queue[Event | None]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.key[1]

    @property
    def to_begin(self) -> list[str]:
        """Ids of declared sessions that have not begun."""
        return [] if self.race.is_over else [id for id in self.declared or () if id not in self.race.sessions]

    @property
    def awaits_finish(self) -> bool:
        """True if the harness still has to finish a session that the group returns, with its reward."""
        while self._to_finish and self.race.sessions[self._to_finish[-1]].is_told:
            self._to_finish.pop()
        return bool(self._to_finish)

    @property
    def num_held_tokens(self) -> int:
        return sum(each.num_held_tokens for each in self.conversations.values()) + self.num_data_tokens

    def declare(self, num: int) -> list[str]:
        """Declare `num` more sessions. Returns their ids."""
        assert self.declared is not None
        before = len(self.declared)
        ids = [f"{self.id}.{number}" for number in range(before, before + num)]
        self.declared += ids
        return ids

    def wanted_now(self) -> list[str]:
        """Ids of declared sessions that are to begin and were in no answer yet."""
        if self.declared is None:
            return []
        new, self.num_answered = self.declared[self.num_answered :], len(self.declared)
        return [] if self.race.is_over else [id for id in new if id not in self.race.sessions]

    def let_go(self) -> None:
        """Drop trajectories, and the data for the reward function."""
        self.conversations.clear()
        self.data, self.num_data_tokens = None, 0

    def since(self, now_s: float) -> float:
        """Seconds from the group's start to `now_s`, rounded to milliseconds."""
        return round(now_s - self.began_s, 3)

    def tell_ends(self, now_s: float) -> None:
        """Report sessions that have ended since the last call."""
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
        """Events so far (ended sessions, sessions to begin), then events as they happen, until the group is over.

        Raises: RequestError (429) with too many readers, before anything is sent.
        """
        if len(self._readers) >= MAX_READERS:
            raise RequestError(
                f"{MAX_READERS} others read the events of this group. Close one of them.",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                retry_after_s=1,
            )
        return self._read()

    @property
    def told_before(self) -> list[Event]:
        """The events so far that matter now: ended sessions, sessions to begin, and the end of the group."""
        told: list[Event] = [self._end_of(each) for each in self.race.sessions.values() if each.id in self.ended_s]
        told += map(self._wanted, self.to_begin)
        return told if self.seconds is None else [*told, self._over_event]

    async def _read(self) -> AsyncGenerator[Event, None]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue(MAX_EVENTS)
        told, is_over = self.told_before, self.seconds is not None
        self._readers.append(queue)
        try:
            for event in told:
                yield event
            while not is_over and (waiting := await queue.get()) is not None:
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

    def returned(self, prompt_id: str, prompt: dict[str, Any], now_s: float) -> PromptSessions:
        """The group once it is over, for the prompt for which it was declared."""
        answer, selected, self.is_returned = self.answer(now_s), set(self.selected), True
        return PromptSessions(
            prompt_id=prompt_id,
            group_id=self.id,
            prompt=prompt,
            status=self.race.result.status,
            reason=answer.reason,
            trajectories=[self.trajectory(each) for each in self.race.sessions.values() if each.id in selected],
            sessions=[session for session in answer.sessions if session.id not in selected],
            generated_tokens=answer.generated_tokens,
            returned_tokens=answer.returned_tokens,
            seconds=answer.seconds,
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
    """Add an event. A reader that is too far behind loses an event, and its stream ends."""
    if queue.full():
        queue.get_nowait()
        event = None
    queue.put_nowait(event)


def limits_of(said: Mapping[str, Any]) -> SessionLimits:
    """Session limits from a request's fields. Fields that are not set have their defaults."""
    fields = {name: said[name] for name in ("max_turns", "max_tokens", "idle_timeout_s") if said.get(name) is not None}
    return SessionLimits(**fields, cut_turn_ends=said.get("cut_turn") != "goes_on")
