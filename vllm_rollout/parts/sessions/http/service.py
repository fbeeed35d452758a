"""Groups of sessions: requests of their harnesses, and their consequences for running turns.

Invariant: open and held state is bounded. A session that has ended runs no turn, even if its harness does not know of
the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from math import inf
from typing import Any

import msgspec

from vllm_rollout.background import spawn, survived
from vllm_rollout.config import MAX_OPEN_SESSIONS, REWARD_THRESHOLD
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.engine import EngineStopped, RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.protocol import RewardOptions
from vllm_rollout.kernel.http.reward_door import RewardDoor
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward
from vllm_rollout.kernel.xargs import NAMES
from vllm_rollout.parts.rewards.grading.slots import Urgency
from vllm_rollout.parts.rewards.grading.values import Trajectory
from vllm_rollout.parts.rewards.http.service import GradingService, options_of
from vllm_rollout.parts.sessions.http.asked import (
    TurnSaid,
    asked_terms,
    check_same,
    client_session,
    most_sessions,
    said_terms,
)
from vllm_rollout.parts.sessions.http.body import (
    FinishAnswer,
    FinishRequest,
    SessionGroupAnswer,
    SessionGroupRequest,
    TrajectoryAnswer,
)
from vllm_rollout.parts.sessions.http.groups import Event, Key, Observer, OpenGroup, OpenTurn, Terms, Watcher
from vllm_rollout.parts.sessions.http.metrics import SessionMetrics
from vllm_rollout.parts.sessions.http.trajectory import Continuation, Conversation, Decode, Turn
from vllm_rollout.parts.sessions.rules import Session, SessionRace, SessionRefused

MAX_SESSION_HISTORY = 1 << 25
"""Most tokens of sessions that a server holds: 128 MiB, twice that with log probabilities."""
MAX_ENDED_SESSIONS = 65_536
"""Largest number of sessions of groups that are over. They may still be read and answered."""

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
"""Bytes of a group's data that count as one token for the limit on held tokens."""
SCORED = "scored"
"""Stands in for the prompt's id in rewards of a group's scored turns."""
STOP_AGAIN_S = 0.1
"""Seconds after which a stop is sent again. It may have overtaken its turn on the way to the engine."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="vllm_rollout-turns")
"""Compares texts of turns. It is a single thread, since a tokenizer takes the interpreter's lock from the event loop
in turns."""
SEE_OUT_S = 10.0
"""Seconds that turns of lost sessions may take to stop. After that a round or a feed goes on without their tokens."""
TICK_S = 1.0
"""Seconds between checks for silent sessions, while any group is open."""


class SessionService:
    """All groups of sessions of one server."""

    def __init__(
        self,
        stop_turns: Callable[[dict[str, list[int]]], Any],
        grading: GradingService,
        rewards: RewardDoor,
        metrics: Metrics,
        decode: Decode,
        *,
        observers: Sequence[Observer] = (),
        pruning_refusal: Callable[[], str | None] = lambda: None,
        audit_ratio: float = 0.0,
        begin: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stop_turns`: awaited with indices of turns by group, as the engine knows them. `begin`: called before the
        first group. `pruning_refusal`: returns the reason why sessions cannot be scored here. None: they can."""
        self._stop_turns = stop_turns
        self._grading = grading
        self._rewards = rewards
        self._pruning_refusal = pruning_refusal
        self._observers = observers
        self._audit_ratio = audit_ratio
        self._metrics = metrics
        self._decode = decode
        self._begin = begin
        self._clock = clock
        self._groups: dict[Key, OpenGroup] = {}
        self._of_session: dict[Key, OpenGroup] = {}
        self._forgotten: OrderedDict[Key, None] = OrderedDict()
        """Sessions of forgotten groups. A turn of such a session gets the answer that the session has ended."""
        self._ended: OrderedDict[Key, OpenGroup] = OrderedDict()
        """Finished groups, the oldest end first. They are in `_groups` as well."""
        self._holding: OrderedDict[Key, OpenGroup] = OrderedDict()
        """Finished groups whose trajectories are held."""
        self._num_ended_sessions = 0
        """Most sessions that the groups in `_ended` might have had."""
        self._num_open_sessions = 0
        """Most sessions that running groups may have."""
        self._num_held_tokens = 0
        """Number of tokens held in all trajectories."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._stopping: list[OpenTurn] = []
        """Turns of ended sessions, which the engine has to stop."""
        self._more_to_stop = asyncio.Event()
        self._stopper: asyncio.Task[None] | None = None

    def now_s(self) -> float:
        """The time by the service's clock, in seconds."""
        return self._clock()

    # Requests.

    def create(self, request: SessionGroupRequest) -> SessionGroupAnswer:
        """Declare a group. Its sessions get ids. Raises: RequestError."""
        return self.declare(request, client_namespace()).answer(self._clock())

    def declare(self, request: SessionGroupRequest, namespace: str, watcher: Watcher | None = None) -> OpenGroup:
        """Declare a group for a client. `watcher` is notified of its events. Raises: RequestError."""
        key = (namespace, request.id or f"group-{uuid.uuid4().hex}")
        self._check_held()
        if key in self._groups:
            raise RequestError(
                f"id: there is a group {key[1]!r}. Choose another id, or DELETE /v1/groups/{key[1]}.",
                status=HTTPStatus.CONFLICT,
                param="id",
            )
        if (namespace, f"{key[1]}.0") in self._of_session:
            raise RequestError(
                f"id: a session of another group is called {f'{key[1]}.0'!r}, as the first of this one would be. "
                "Choose another id.",
                status=HTTPStatus.CONFLICT,
                param="id",
            )
        terms, reward = self._asked(request)
        group = self._open(key, terms)
        group.reward, group.data, group.declared, group.watcher = reward, request.data, [], watcher
        if group.data is not None:
            group.num_data_tokens = len(msgspec.json.encode(group.data)) // BYTES_PER_TOKEN
        self._hold(group.num_data_tokens)
        self._declare(group, group.race.num_to_enter)
        group.wanted_now()
        return group

    def check(self, request: SessionGroupRequest) -> int:
        """The most sessions that such a group may have. Raises: RequestError for terms that no group can have."""
        terms, _ = self._asked(request)
        return most_sessions(terms)

    def check_together(self, request: SessionGroupRequest, num_groups: int, groups: str, field: str) -> None:
        """Check the terms of groups that are open together. `groups`: what they are. `field`: sets their number.

        Raises: RequestError.
        """
        if (most := num_groups * self.check(request)) > MAX_OPEN_SESSIONS:
            raise RequestError(
                f"{field}: open groups may have {MAX_OPEN_SESSIONS} sessions, got {groups} with {most} in all, with "
                f"those in the place of void ones. Lower {field}, group_size, the number of spare ones, or "
                "sessions.max_sessions.",
                param=field,
            )

    def check_room(self, num_sessions: int) -> None:
        """Check that `num_sessions` more sessions may be open. Raises: RequestError (503) if there are too many."""
        if (num_open := self._num_open_sessions) + num_sessions > MAX_OPEN_SESSIONS:
            most = f"at most {MAX_OPEN_SESSIONS} with {num_sessions} more"
            raise _too_much(f"open groups may have {num_open} sessions, {most}")

    def names_session(self, xargs: Mapping[str, object]) -> bool:
        """True if a request with these fields is a turn of a session."""
        if NAMES["session"] in xargs:
            return True
        named = client_session()
        if named is None:
            return False
        key = (client_namespace(), named)
        return NAMES["group_id"] in xargs or key in self._of_session or key in self._forgotten

    def turn(self, said: TurnSaid, model: str | None, prompt: Sequence[int] | None) -> OpenTurn | None:
        """Check a turn that wants to begin. `compare` and `begin` follow. None: its session has ended, and nothing
        is generated.

        Raises: RequestError (400 for its content, 409 for the state of its session), PlanError.
        """
        key = (client_namespace(), said.session)
        group = self._of_session.get(key)
        if group is None:
            if key in self._forgotten and not said.group:
                return None
            group = self._joined(key, said)
        elif said.group:
            check_same(group, said)
        if not group.race.sessions:
            group.model = model
        elif model != group.model:
            raise _invalid("model", f"this session's group began with {group.model!r}, got {model!r}. Keep the model.")
        now_s = self._clock()
        session = group.race.sessions.get(said.session) or self._enter(group, said.session, now_s)
        if not session.is_open:
            return None
        self._check_held()
        first = Continuation("first", ())
        continuation = first if prompt is None else group.conversations[session.id].follow(prompt)
        try:
            most = group.race.tokens_left(session)
        except SessionRefused as refusal:
            raise _conflict(str(refusal)) from refusal
        waited_s = max(0.0, now_s - session.since_s)
        number = session.num_turns + 1
        is_scored = group.terms.pruning is not None and number == group.terms.pruning_turn
        return OpenTurn(group, session, most, continuation, said.last, waited_s, now_s, is_scored, number)

    async def compare(self, turn: OpenTurn) -> Continuation:
        """Decide how the turn's prompt continues the turns before. Texts are compared beside the event loop.

        Raises: RequestError for a history that contradicts the session's.
        """
        if isinstance(turn.continuation, Continuation):
            return turn.continuation
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(_THREAD, turn.continuation.continuation, self._decode)
        if found.history == "rewritten" and not turn.group.terms.is_rewritable:
            raise RequestError(
                f"messages: turn {turn.number} of session {turn.session.id!r} does not go on from the turns "
                f"before, at {found.where}. Send the conversation as it was, or declare the group with history "
                '"rewritable".',
                param="messages",
            )
        turn.continuation = found
        return found

    def begin(self, turn: OpenTurn) -> bool:
        """Register a compared turn that is sent to the engine. False if its session has ended meanwhile.

        Raises: RequestError if another turn was faster.
        """
        if not turn.session.is_open:
            return False
        if turn.session.num_turns + 1 != turn.number:
            raise _conflict(
                f"session {turn.session.id!r} has had another turn since this one was asked for, which does not go on "
                "from it. One may run at a time: wait for its answer."
            )
        assert isinstance(turn.continuation, Continuation), "a turn that was not compared"
        try:
            turn.group.race.begin_turn(turn.session)
        except SessionRefused as refusal:
            raise _conflict(str(refusal)) from refusal
        turn.index, turn.group.num_launched = turn.group.num_launched, turn.group.num_launched + 1
        turn.began_s = self._clock()
        turn.group.running[turn.session.id] = turn
        if turn.is_scored:
            turn.group.scored[turn.session.id] = turn.index
        self._changed(turn.group)
        return True

    def end(
        self,
        turn: OpenTurn,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        *,
        text: str = "",
        finish_reason: str | None = None,
        logprobs: Sequence[float] | None = None,
        num_cached_tokens: int | None = None,
        weight_versions: Sequence[dict[str, Any]] = (),
        pruned: bool = False,
    ) -> None:
        """Record a turn's output. `num_cached_tokens`: tokens of its prompt whose KV was cached. `pruned`: its score
        stopped it.

        A turn that the engine gave up while its session goes on counts as not run.
        """
        group, session, now_s = turn.group, turn.session, self._clock()
        if session.is_open and not pruned and finish_reason in ("abort", "error"):
            self.leave(turn)
            return
        if group.running.pop(session.id, None) is None:
            return
        group.race.end_turn(
            session, len(token_ids), now_s, cut=finish_reason == "length", last=turn.is_last, pruned=pruned
        )
        self._metrics.of(SessionMetrics).turn_over()
        conversation = group.conversations[session.id]
        before = conversation.num_held_tokens
        assert isinstance(turn.continuation, Continuation)
        told = Turn(
            history=turn.continuation.history,
            segment=len(conversation.segments) - (turn.continuation.history in ("extended", "mended")),
            num_prompt_tokens=len(prompt),
            num_tokens=len(token_ids),
            finish_reason=finish_reason,
            waited_s=turn.waited_s,
            seconds=now_s - turn.began_s,
            began_s=turn.began_s,
            num_cached_tokens=num_cached_tokens,
            weight_versions=weight_versions,
        )
        conversation.add(told, prompt, token_ids, logprobs, text)
        self._hold(conversation.num_held_tokens - before)
        for observer in self._observers:
            observer.turn_over(group, session, told)
        self._settle(group)
        self._account(group)

    def leave(self, turn: OpenTurn) -> None:
        """Drop a turn without an end: its client left, or it failed. A turn that has ended stays as it is."""
        if turn.group.running.pop(turn.session.id, None) is not None:
            turn.group.race.leave_turn(turn.session, self._clock())
            self._changed(turn.group)
            self._account(turn.group)

    async def finish(self, session_id: str, request: FinishRequest) -> FinishAnswer:
        """Finish a session. Raises: RequestError (404 for a session that this client does not know, 409 for one that
        was finished).

        A declared session may be void before it has begun, if its sandbox did not start.
        """
        reward, void, status = request.reward, request.void, None
        if reward is not None and void:
            raise RequestError(f"reward: a void session has none, got {reward:g}. Send one of them.", param="reward")
        unbegun = self._of_session.get((client_namespace(), session_id)) if void else None
        if unbegun is not None and session_id not in unbegun.race.sessions:
            self._enter(unbegun, session_id, self._clock())
        group, session = self._session(session_id)
        try:
            group.race.check_finish(session)
            if group.reward is not None and reward is None and not void and group.race.state(session) in _GRADED:
                void, reward, status = await self._grade(group, session)
            group.race.finish(session, self._clock(), reward=reward, void=void)
        except SessionRefused as refusal:
            raise _conflict(str(refusal)) from refusal
        num_wanted = self._settle(group)
        wanted = group.wanted_now()
        for observer in self._observers if group.is_counted else ():
            observer.rewarded(group, session)
        if group.watcher is not None:
            group.watcher.finished(group)
        await self._learn(group, session)
        return FinishAnswer(
            **group.told(session),
            group_id=group.id,
            group_status=group.status,
            wanted=wanted,
            num_wanted=num_wanted if group.declared is None else len(wanted),
            reward_status=status,
        )

    def read_group(self, group_id: str) -> SessionGroupAnswer:
        return self._group(group_id).answer(self._clock())

    def cancel(self, group_id: str) -> None:
        """Stop a group's sessions and forget it. Raises: RequestError (409) for a watched group that runs."""
        group = self._group(group_id)
        if group.watcher is not None and not group.race.is_over:
            raise _conflict(f"group {group_id!r} belongs to a round of a run or to a feed, which ends it: leave that.")
        self.defer(group)
        self._forget(group)

    def defer(self, group: OpenGroup) -> None:
        """Stop a group's sessions. They are remembered as sessions of a finished group."""
        if group.race.is_over:
            return
        settled = group.race.cancel()
        group.tell_ends(self._clock())
        self._stop_turns_of(group, settled.lost)
        self._over(group)
        self._changed(group)

    def read(self, session_id: str) -> TrajectoryAnswer:
        group, session = self._session(session_id)
        return group.trajectory(session)

    def events(self, group_id: str) -> AsyncGenerator[Event, None]:
        """Events of a group. Raises: RequestError, 404 for a group that this client does not know, 429 with too many
        readers."""
        return self._group(group_id).events()

    # Consequences.

    def _changed(self, group: OpenGroup) -> None:
        for observer in self._observers:
            observer.changed(group)

    def _settle(self, group: OpenGroup) -> int:
        """Decide the group's race, report its events and stop lost sessions. Returns the number of wanted sessions."""
        settled = group.race.settle()
        group.tell_ends(self._clock())
        self._stop_turns_of(group, settled.lost)
        if settled.num_wanted and group.declared is not None:
            group.tell_wanted(self._declare(group, settled.num_wanted))
        if group.race.is_over and group.seconds is None:
            self._over(group)
        self._changed(group)
        return settled.num_wanted

    def _stop_turns_of(self, group: OpenGroup, lost: Iterable[Session]) -> None:
        turns = [group.running[session.id] for session in lost if session.id in group.running]
        if turns:
            self._stopping += turns
            self._more_to_stop.set()
            if self._stopper is None:
                self._stopper = spawn(self._stop(), "stopping turns", self._tasks)

    async def _stop(self) -> None:
        """Stop turns of all groups at once, since the engine answers a call in its next step. This is repeated,
        because a stop may overtake a turn that is on its way to the engine."""
        while turns := [turn for turn in self._stopping if turn.group.running.get(turn.session.id) is turn]:
            self._stopping = turns
            self._more_to_stop.clear()
            with survived("stopping turns"), suppress(EngineStopped):  # reported elsewhere
                indices: dict[str, list[int]] = defaultdict(list)
                for turn in turns:
                    indices[turn.engine_id].append(turn.index)
                await self._stop_turns(indices)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_AGAIN_S):
                    await self._more_to_stop.wait()
        self._stopping, self._stopper = [], None

    def _over(self, group: OpenGroup) -> None:
        group.over(self._clock())
        self._num_open_sessions -= group.max_sessions
        self._account(group)
        if group.watcher is not None:
            group.watcher.over(group)

    def _account(self, group: OpenGroup) -> None:
        """Count and record a group once, when it is over and the last of its turns has stopped."""
        if group.seconds is None or group.running or group.is_counted:
            return
        group.is_counted = True
        if group.watcher is not None:
            group.watcher.counted()
        self._metrics.group_over(group.race.result, group.seconds)
        for observer in self._observers:
            observer.over(group)
        if self._groups.get(group.key) is not group:
            self._let_go(group)  # it was cancelled
            return
        self._ended[group.key] = group
        self._holding[group.key] = group
        self._num_ended_sessions += group.max_sessions
        while self._num_ended_sessions > MAX_ENDED_SESSIONS and len(self._ended) > 1:
            self._forget(next(iter(self._ended.values())))

    def _forget(self, group: OpenGroup) -> None:
        if self._ended.pop(group.key, None) is not None:
            self._num_ended_sessions -= group.max_sessions
        if group.is_counted:  # else a turn of it still stops
            self._let_go(group)
        self._groups.pop(group.key, None)
        for id in [*group.race.sessions, *(group.declared or ())]:
            key = (group.key[0], id)
            if self._of_session.get(key) is group:
                del self._of_session[key]
                self._forgotten[key] = None
        while len(self._forgotten) > MAX_ENDED_SESSIONS:
            self._forgotten.popitem(last=False)

    def _hold(self, num_tokens: int) -> None:
        """Count `num_tokens` more held tokens. If there are too many, drop trajectories of finished groups, oldest
        first."""
        self._num_held_tokens += num_tokens
        while self._num_held_tokens > MAX_SESSION_HISTORY:
            oldest = next((each for each in self._holding.values() if each.watcher is None or each.is_returned), None)
            if oldest is None:  # whoever declared the others has not read them
                return
            self._let_go(oldest)

    def _let_go(self, group: OpenGroup) -> None:
        """Drop a group's trajectories."""
        if self._holding.get(group.key) is group:  # else a later group has its name
            del self._holding[group.key]
        self._num_held_tokens -= group.num_held_tokens
        group.let_go()

    async def _tick(self) -> None:
        """End silent sessions, while any group is open."""
        while open_groups := [group for group in self._groups.values() if not group.race.is_over]:
            await asyncio.sleep(TICK_S)
            now_s = self._clock()
            for group in open_groups:
                with survived("silent sessions"):
                    if group.race.expire(now_s, -inf if group.watcher is None else group.watcher.heard_s(now_s)):
                        self._settle(group)
        self._ticker = None

    async def _learn(self, group: OpenGroup, session: Session) -> None:
        """Learn from a session's reward, by its scored turn."""
        index, reward = group.scored.get(session.id), session.reward
        if index is None or reward is None or group.race.state(session) not in ("finished", "truncated"):
            return
        threshold = REWARD_THRESHOLD if group.reward is None else group.reward.threshold
        named = NamedReward("rollout", group.engine_id, Reward(SCORED, index, reward, reward > threshold))
        await self._rewards.tell([named], group.engine_id)

    def _asked(self, request: SessionGroupRequest) -> tuple[Terms, RewardOptions | None]:
        """The terms and the reward of a declared group. Raises: RequestError."""
        terms = asked_terms(request, self._pruning_refusal, self._audit_ratio)
        reward = None if request.reward is None else options_of(request.reward)
        if reward is not None:
            self._grading.check(reward, terms.num_candidates)
        return terms, reward

    async def _grade(self, group: OpenGroup, session: Session) -> tuple[bool, float | None, str]:
        """Grade a session. Returns whether it is void, its reward, and the status of the grade."""
        assert group.reward is not None
        conversation = group.conversations.get(session.id)
        if conversation is None or not conversation.segments:
            return False, None, "error"
        prompt, rest = conversation.halves
        self._grading.promise(group.reward.name, 1)
        session.in_grading = True
        try:
            text = await asyncio.to_thread(lambda: (self._decode(prompt), self._decode(rest)))
            grade = await self._grading.grade(group.reward, Trajectory(*text, group.data, list(rest)), Urgency())
        finally:
            session.in_grading = False
            self._grading.promise(group.reward.name, -1)
        return grade.status == "void", grade.reward, grade.status

    # Look-ups.

    def _joined(self, key: Key, said: TurnSaid) -> OpenGroup:
        """The group that a session's first turn names. The group's first session makes it."""
        terms, name = said_terms(said)
        group = self._groups.get((key[0], name))
        if group is None:
            return self._open((key[0], name), terms)
        if group.declared is not None:
            raise _conflict(
                f"group {name!r} was declared, and its sessions are those that it was answered with. Use one of them."
            )
        check_same(group, said)
        return group

    def _open(self, key: Key, terms: Terms) -> OpenGroup:
        """Open a group. Raises: RequestError if too many sessions are open, or for terms that no group can have."""
        most = most_sessions(terms)
        self.check_room(most)
        now_s = self._clock()
        group = OpenGroup(key, terms, SessionRace(terms.plan, terms.limits, most, now_s), now_s, most)
        if self._begin is not None:
            self._begin()
            self._begin = None
        self._groups[key] = group
        for observer in self._observers:
            observer.begun(group)
        self._num_open_sessions += most
        if self._ticker is None:
            self._ticker = spawn(self._tick(), "silent sessions", self._tasks)
        return group

    def _enter(self, group: OpenGroup, session_id: str, now_s: float) -> Session:
        """Begin a session. Raises: RequestError if all places of the group are taken."""
        try:
            session = group.race.enter(session_id, now_s)
        except SessionRefused as refusal:
            raise _conflict(str(refusal)) from refusal
        group.conversations[session_id] = Conversation()
        self._changed(group)
        self._of_session[group.key[0], session_id] = group
        self._forgotten.pop((group.key[0], session_id), None)
        return session

    def _declare(self, group: OpenGroup, num: int) -> list[str]:
        ids = group.declare(num)
        for id in ids:
            self._of_session[group.key[0], id] = group
            self._forgotten.pop((group.key[0], id), None)
        return ids

    def _check_held(self) -> None:
        """Check the limit on held tokens. Raises: RequestError (503) if too many are held."""
        self._hold(0)
        if (num_held := self._num_held_tokens) > MAX_SESSION_HISTORY:
            raise _too_much(f"open sessions have {num_held} tokens, at most {MAX_SESSION_HISTORY} are held")

    def _group(self, group_id: str) -> OpenGroup:
        group = self._groups.get((client_namespace(), group_id))
        if group is None:
            raise RequestError(
                f"there is no group {group_id!r:.80} of yours. POST /v1/groups declares one.",
                status=HTTPStatus.NOT_FOUND,
            )
        return group

    def _session(self, session_id: str) -> tuple[OpenGroup, Session]:
        group = self._of_session.get((client_namespace(), session_id))
        session = None if group is None else group.race.sessions.get(session_id)
        if group is None or session is None:
            why = "has not begun" if group is not None else "is not one of yours"
            raise RequestError(f"session {session_id!r:.80} {why}: it begins with a turn.", status=HTTPStatus.NOT_FOUND)
        return group, session


_GRADED = frozenset({"between_turns", "finished", "truncated"})


def _too_much(what: str) -> RequestError:
    return RequestError(
        f"{what}. Finish sessions or DELETE groups.", status=HTTPStatus.SERVICE_UNAVAILABLE, retry_after_s=5
    )


def _conflict(message: str) -> RequestError:
    return RequestError(message, status=HTTPStatus.CONFLICT)


def _invalid(field: str, message: str) -> RequestError:
    return RequestError(f"{field}: {message}", param=field)
