"""Any order of what harnesses, an engine, a grader and time may do to sessions, against what is true of all of them:
each ends once and is told once, no turn of a lost one runs a step, each token of a trajectory was generated or given.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from tests.parts.sessions.session_engine import EngineTurn, Grader, SessionEngine
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.parts.sessions.http import service as module
from vllm_rollout.parts.sessions.http.asked import turn_from_xargs
from vllm_rollout.parts.sessions.http.body import FinishAnswer, FinishRequest, GroupOverEvent, SessionGroupRequest
from vllm_rollout.parts.sessions.http.groups import Event, OpenGroup
from vllm_rollout.parts.sessions.http.service import SessionService

T = TypeVar("T")
Key = tuple[str, str]
"""A group by its engine's name, and a session: names of both may come again when a group is forgotten."""
IDLE_S = 20.0
MAX_GROUPS = 3
"""Upper bound of the groups that are not over."""
PASSES = 8
"""Passes of the event loop after which all effects of an event have happened."""
BOUNDS = {"MAX_OPEN_SESSIONS": 24, "MAX_ENDED_SESSIONS": 16, "MAX_SESSION_HISTORY": 60, "TICK_S": 0, "STOP_AGAIN_S": 0}
LIMITS = {
    "max_turns": st.sampled_from([None, 1, 3]),
    "max_tokens": st.sampled_from([None, 3, 8]),
    "cut_turn": st.sampled_from(["ends", "goes_on"]),
    "history": st.sampled_from(["strict", "rewritable"]),
}

DECLARED = {
    "group_size": st.integers(1, 3),
    "redundancy": st.integers(0, 2),
    "early_stop": st.sampled_from([True, True, False]),
    "selection": st.sampled_from(["first", "shortest"]),
    "reward": st.sampled_from([None, None, "exact"]),
    "more": st.integers(0, 3),
    "limits": st.fixed_dictionaries(LIMITS),
}


class AtOnce(ThreadPoolExecutor):
    """Runs work in the caller's thread, so that all effects of an event have happened after `PASSES`."""

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(work(*args, **options))
        return done


class Known:
    """A group, and all that its readers were told."""

    def __init__(self, group: OpenGroup, names: list[str]) -> None:
        self.group, self.names = group, names
        self.told: list[Event] = []
        self.ended: dict[str, tuple[str | None, int]] = {}
        """End state of each session, and the turns that it had begun by then."""
        self.in_time: set[str] | None = None
        """Sessions that had begun when it was over: later ones have lost, and hear it by their turns."""
        self.reader: asyncio.Task[None] | None = None

    async def read(self) -> None:
        async for event in self.group.events():
            self.told.append(event)
            if isinstance(event, GroupOverEvent):
                self.in_time = set(self.group.race.sessions)


class AnyInterleaving(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(AtOnce())
        self.before = {name: getattr(module, name) for name in BOUNDS}
        for name, value in BOUNDS.items():
            setattr(module, name, value)
        self.now_s, self.num_groups = 0.0, 0
        self.engine, self.grader = SessionEngine(), Grader()
        grader: Any = self.grader
        learning: Any = None  # nobody is pruned here
        self.service = SessionService(
            self.engine.stop, grader, learning, Metrics(CollectorRegistry()), str, clock=lambda: self.now_s
        )
        self.known: list[Known] = []
        self.given: dict[Key, set[int]] = {}
        self.generated: dict[Key, list[int]] = {}
        """By session: tokens of its turns that have ended."""
        self.prompts: dict[str, list[int]] = {}
        """Prompt of the session's next turn, if that turn rewrites nothing."""
        self.last: dict[Key, list[int]] = {}
        """Tokens in the engine after the last turn that ended."""
        self.finishing: list[asyncio.Task[FinishAnswer]] = []
        self.words = itertools.count(1)
        self.xargs: dict[str, dict[str, Any]] = {}
        """That every turn of a group says which is not declared."""

    def teardown(self) -> None:
        async def end_tasks() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(end_tasks())
        self.loop.close()
        for name, value in self.before.items():
            setattr(module, name, value)

    def run(self, work: Callable[[], T]) -> T | None:
        """Within the event loop, until nothing follows. None where it was refused."""

        async def passes() -> T | None:
            try:
                return work()
            except (RequestError, PlanError):
                return None
            finally:
                await self.pause()

        return self.loop.run_until_complete(passes())

    async def pause(self) -> None:
        for _ in range(PASSES):
            await asyncio.sleep(0)

    def know(self, group: OpenGroup, names: list[str]) -> None:
        known = Known(group, names)
        self.known.append(known)
        known.reader = self.loop.create_task(known.read())
        self.loop.run_until_complete(self.pause())

    def names(self, known: Known, *, free: bool) -> list[str]:
        """Names of the group's sessions, also before they begin. `free`: only sessions that may have a turn."""
        sessions = known.group.race.sessions
        busy = {session.id for session in sessions.values() if session.in_turn or not session.is_open}
        names = dict.fromkeys([*known.names, *(known.group.declared or ()), *sessions])
        return [name for name in names if not free or name not in busy]

    def name(self, data: st.DataObject) -> str | None:
        """Name of a drawn session, mostly of one that may have a turn."""
        if not self.known:
            return None
        known = data.draw(st.sampled_from(self.known))
        names = self.names(known, free=data.draw(st.integers(0, 4)) > 0)
        return data.draw(st.sampled_from(names)) if names else None

    def has_room(self) -> bool:
        return sum(not known.group.race.is_over for known in self.known) < MAX_GROUPS

    @initialize(**DECLARED)
    def begin_with_a_group(self, **said):
        self.declare_group(**said)

    @precondition(has_room)
    @rule(**DECLARED)
    def declare(self, **said):
        self.declare_group(**said)

    def declare_group(self, group_size, redundancy, more, limits, **terms):
        body = {
            "group_size": group_size, "redundancy": redundancy, "max_sessions": group_size + redundancy + more,
            "idle_timeout_s": IDLE_S, "id": f"g{self.num_groups}", "audit_ratio": 0.0, **terms, **limits,
        }  # fmt: skip
        self.num_groups += 1
        answer = self.run(lambda: self.service.create(SessionGroupRequest(**body)))
        if answer is not None:
            assert len(answer.to_begin) == group_size + redundancy
            self.know(self.service._groups["", answer.id], list(answer.to_begin))

    @precondition(has_room)
    @rule(group_size=st.integers(1, 2), spare=st.integers(0, 1), limits=st.fixed_dictionaries(LIMITS))
    def join(self, group_size, spare, limits):
        """A first turn says its group, whose sessions its client names."""
        name = f"g{self.num_groups}"
        self.num_groups += 1
        said = {"group_id": name, "group_size": group_size, "num_candidates": group_size + spare, **limits}
        said["idle_timeout_s"] = IDLE_S
        xargs = {f"rollout_{field}": value for field, value in said.items() if value is not None}
        if self.begin(f"{name}/0", xargs, [0]) is not None:
            self.known[-1].names += [f"{name}/{number}" for number in range(1, group_size + spare)]
            self.xargs[name] = xargs

    def begin(self, name: str, xargs: dict[str, Any], prompt: list[int]) -> EngineTurn | None:
        each = self.ask(name, xargs, prompt)
        return None if each is None else self.begin_asked(each)

    def ask(self, name: str, xargs: dict[str, Any], prompt: list[int]) -> EngineTurn | None:
        return self.run(lambda: self.engine.ask(self.service, turn_from_xargs(xargs, name, n=1), prompt))

    def begin_asked(self, each: EngineTurn) -> EngineTurn | None:
        group, session = each.turn.group, each.turn.session
        key, was_open = (group.engine_id, session.id), session.is_open
        begun = self.run(lambda: self.engine.begin(self.service, each))
        if begun is not None:
            assert was_open, "no turn begins of a session that has ended"
            assert session.in_turn
            if all(known.group is not group for known in self.known):
                self.know(group, [session.id])
            self.given.setdefault(key, set()).update(each.prompt)
        return begun

    @rule(data=st.data(), arrives=st.booleans())
    def begin_what_was_asked(self, data, arrives):
        if self.engine.asked:
            each = self.begin_asked(data.draw(st.sampled_from(self.engine.asked)))
            if each is not None:
                each.has_arrived = arrives

    @rule(data=st.data())
    def ask_for_turn(self, data):
        """Ask for a turn, which begins later."""
        if (said := self.drawn_turn(data)) is not None:
            self.ask(*said)

    @rule(data=st.data(), arrives=st.booleans())
    def begin_turn(self, data, arrives):
        """It is on its way; it may have arrived."""
        if (said := self.drawn_turn(data)) is not None and (each := self.begin(*said)) is not None:
            each.has_arrived = arrives

    @rule(data=st.data(), num_steps=st.integers(0, 4))
    def take_turn(self, data, num_steps):
        """From its beginning to its end; the others go on meanwhile."""
        if (said := self.drawn_turn(data)) is not None and (each := self.begin(*said)) is not None:
            each.has_arrived = True
            self.step(num_steps)
            self.end(each)

    @rule(data=st.data(), num=st.integers(1, 3))
    def finish_many(self, data, num):
        """Finish sessions by their last turns."""
        if self.known:
            for name in self.names(data.draw(st.sampled_from(self.known)), free=True)[:num]:
                if (each := self.begin(name, self.fields(name, is_last=True), self.prompts.get(name, [0]))) is not None:
                    each.has_arrived = True
                    self.engine.step()
                    self.end(each)

    def drawn_turn(self, data: st.DataObject) -> tuple[str, dict[str, Any], list[int]] | None:
        """Session, fields and prompt of a turn."""
        if (name := self.name(data)) is None:
            return None
        words = [next(self.words) for _ in range(data.draw(st.integers(0, 2)))]
        is_rewritten, is_last = (data.draw(st.integers(0, 5)) == 0 for _ in range(2))
        prompt = [*(self.prompts.get(name, [0])[is_rewritten:]), *words] or [next(self.words)]
        return name, self.fields(name, is_last=is_last), prompt

    def fields(self, name: str, *, is_last: bool) -> dict[str, Any]:
        return {**self.xargs.get(name.partition("/")[0], {}), "rollout_last": is_last}

    def some(self, data: st.DataObject, **how: bool) -> EngineTurn | None:
        turns = [each for each in self.engine.turns if all(getattr(each, name) is is_so for name, is_so in how.items())]
        return data.draw(st.sampled_from(turns)) if turns else None

    @rule(data=st.data())
    def arrive(self, data):
        if each := self.some(data, has_arrived=False):
            each.has_arrived = True
            self.run(lambda: None)

    @rule(num_steps=st.integers(1, 3))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.engine.step()

    @rule(data=st.data())
    def end_turn(self, data):
        if each := self.some(data, has_arrived=True):
            self.end(each)

    def end(self, each: EngineTurn) -> None:
        key = each.turn.group.engine_id, each.turn.session.id
        self.generated.setdefault(key, []).extend(each.token_ids)
        self.prompts[key[1]] = self.last[key] = [*each.prompt, *each.token_ids]
        self.run(lambda: self.engine.end(self.service, each))

    @rule(data=st.data())
    def leave_turn(self, data):
        """Its client leaves, or the engine or its rank has failed."""
        if each := self.some(data):
            self.run(lambda: self.engine.fail(self.service, each))

    @rule(data=st.data(), reward=st.sampled_from([None, 0.0, 1.0]), void=st.integers(0, 4))
    def finish(self, data, reward, void):
        if (name := self.name(data)) is not None:
            request = FinishRequest(reward=reward, void=void == 0)
            self.finishing.append(self.spawn(self.service.finish(name, request)))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.loop.create_task(work)
        self.loop.run_until_complete(self.pause())
        return task

    @rule(data=st.data(), status=st.sampled_from(["ok", "error", "void"]), reward=st.sampled_from([0.0, 1.0]))
    def grade(self, data, status, reward):
        if self.grader.waiting:
            asked = data.draw(st.sampled_from(self.grader.waiting))
            self.grader.waiting.remove(asked)
            asked.set_result(Grade(status, reward if status == "ok" else None))
            self.run(lambda: None)

    @rule(data=st.data(), really=st.integers(0, 3))
    def cancel(self, data, really):
        if self.known and not really:
            group = data.draw(st.sampled_from(self.known)).group
            self.run(lambda: self.service.cancel(group.id))

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, 15.0, 25.0]))
    def wait(self, seconds):
        self.now_s += seconds
        self.run(lambda: None)

    @invariant()
    def finishes_are_answered_or_refused(self) -> None:
        for task in [task for task in self.finishing if task.done()]:
            self.finishing.remove(task)
            assert task.exception() is None or isinstance(task.exception(), RequestError)
        assert self.grader.num_promised == len(self.grader.waiting), "the grader is told who is to come"

    @invariant()
    def sessions_end_once_and_are_told_once(self) -> None:
        for known in self.known:
            race = known.group.race
            for session in race.sessions.values():
                if session.ended_by is not None:
                    begun = session.num_turns + session.in_turn
                    by, most = known.ended.setdefault(session.id, (session.ended_by, begun))
                    assert by == session.ended_by
                    assert begun <= most, "no turn has begun since"
                else:
                    assert session.id not in known.ended
            ends = [event.session_id for event in known.told if event.type == "session" and event.state != "wanted"]
            in_time = known.ended.keys() if known.in_time is None else known.ended.keys() & known.in_time
            assert sorted(ends) == sorted(in_time)
            overs = [event for event in known.told if isinstance(event, GroupOverEvent)]
            assert overs == known.told[-1:] if race.is_over else not overs, "once, and last"
            if race.is_over:
                assert not any(session.is_open for session in race.sessions.values())
                assert len(overs[0].selected) <= race.plan.group_size

    @invariant()
    def turns_of_those_that_have_lost_are_stopped(self) -> None:
        """Turns that have arrived are stopped at once, others when they arrive."""
        for each in self.engine.turns:
            session = each.turn.session
            assert each.turn.group.running[session.id] is each.turn
            assert session.is_open or not each.runs
            assert not each.is_stopped or not session.is_open, "nobody is stopped who has not lost"

    @invariant()
    def tokens_were_generated_or_given(self) -> None:
        for known in self.known:
            for name, session in known.group.race.sessions.items():
                said = self.generated.get((known.group.engine_id, name), [])
                assert session.num_tokens == len(said)
                conversation = known.group.conversations.get(name)
                if conversation is None:
                    continue
                marked = [
                    (token, bool(mask))
                    for segment in conversation.segments
                    for token, mask in zip(segment.token_ids, segment.mask, strict=True)
                ]
                assert [token for token, of_policy in marked if of_policy] == said, "each once, in its order"
                if said and conversation.segments:
                    assert list(conversation.segments[-1].token_ids) == self.last[known.group.engine_id, name]
                given = {token for token, of_policy in marked if not of_policy}
                assert given <= self.given.get((known.group.engine_id, name), set())

    @invariant()
    def what_is_held_is_counted_and_bounded(self) -> None:
        its = self.service
        still = [group for group in its._groups.values() if not group.race.is_over]
        assert its._num_open_sessions == sum(group.max_sessions for group in still) <= BOUNDS["MAX_OPEN_SESSIONS"]
        stopping = {known.group for known in self.known if known.group.running}
        assert its._num_held_tokens == sum(group.num_held_tokens for group in stopping.union(its._groups.values()))
        assert its._num_ended_sessions == sum(group.max_sessions for group in its._ended.values())
        assert its._num_ended_sessions <= BOUNDS["MAX_ENDED_SESSIONS"] or len(its._ended) == 1
        assert set(its._of_session.values()) <= set(its._groups.values())
        if its._num_held_tokens > BOUNDS["MAX_SESSION_HISTORY"]:
            assert not its._holding, "what is over has given way"


TestAnyInterleaving = pytest.mark.thorough(AnyInterleaving.TestCase)
TestAnyInterleaving.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
