"""Groups whose candidates are sessions: turns in an engine's batch, and tools beside it.

A session generates what the candidate of its index would, in shares of about one size. Behind each turn but the last a
tool runs, while the session has no place in the batch; the next turn finds its context in the prefix cache as far as
what runs has left it there, and computes the tool's words.

Invariant: who wins and who is replaced is decided by `group/racing/sessions.py`; what a session does depends on the
seed, its rollout, its prompt and its index only. With one turn each, a rank does what `rank.py` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop
from random import Random
from typing import NamedTuple

from vllm_rollout.config import MAX_TRACED_TOKENS
from vllm_rollout.group.judging.judge import Judge
from vllm_rollout.group.lengths.cost import computed_prompt_tokens
from vllm_rollout.group.plans.rows import Integer, Number, row, rows
from vllm_rollout.group.racing.sessions import Session, SessionLimits, SessionRace
from vllm_rollout.group.types import CandidateId, GroupResult
from vllm_rollout.simulator.machine import Machine, RankRun
from vllm_rollout.simulator.race import Race, Runner
from vllm_rollout.simulator.rank import Closed, Message, Rank
from vllm_rollout.simulator.settings import written_fields

MORE_SESSIONS = 2
"""So many times the sessions that a group begins with, it may have in all: a server's default."""
MAX_TURNS = 1000
MAX_TOOL_SECONDS = 1e6


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What sessions do beside generating."""

    turns: float = row(Number(1, MAX_TURNS), "Turns of a session on average; their number is geometric.", default=3.0)
    tool_seconds: float = row(
        Number(0, MAX_TOOL_SECONDS), "Time of a tool on average, in steps without a profile.", default=0.0
    )
    tool_sigma: float = row(Number(0, 5), "Deviation of its logarithm: how heavy the tail of tools is.", default=1.0)
    tool_tokens: int = row(Integer(0, MAX_TRACED_TOKENS), "Tokens of a tool's answer.", default=100)
    tool_failures: float = row(
        Number(0, 1, below=True), "Chance that a tool fails, so that its session is void.", default=0.0
    )


RECORDED = "recorded"


def parse_sessions(text: str, others: SessionTerms | None = None) -> SessionTerms:
    """From "turns=4,tool_seconds=5", or "recorded", which says nothing; what is left out is as in `others`.

    Raises: ValueError with field, value and what is allowed.
    """
    written = {} if text == RECORDED else written_fields(text, rows(SessionTerms))
    return replace(others or SessionTerms(), **written)


class Course(NamedTuple):
    """What a session does that nothing stops."""

    turns: tuple[int, ...]
    """Tokens that each generates."""
    tools_s: tuple[float, ...]
    """Time of the tool behind each turn but the last. Where there is one behind the last, it fails."""

    @property
    def fails(self) -> bool:
        return len(self.tools_s) == len(self.turns)


def draw_course(its: SessionTerms, num_tokens: int, chance: Random) -> Course:
    """A session that generates so many tokens, if no tool fails; each turn has one at least."""
    num_turns = 1
    while num_turns < num_tokens and chance.random() >= 1 / its.turns:
        num_turns += 1
    turns = [num_tokens * (turn + 1) // num_turns - num_tokens * turn // num_turns for turn in range(num_turns)]
    tools_s: list[float] = []
    while len(tools_s) < num_turns - 1:
        seconds = math.exp(its.tool_sigma * chance.gauss(0, 1) - its.tool_sigma**2 / 2)
        tools_s.append(its.tool_seconds * seconds)
        if chance.random() < its.tool_failures:
            return Course(tuple(turns[: len(tools_s)]), tuple(tools_s))
    return Course(tuple(turns), tuple(tools_s))


@dataclass(slots=True, eq=False)
class SessionGroup(Race):
    """One group of a replay, whose pool has all sessions that it may ever have."""

    courses: Sequence[Course] = ()
    sessions: SessionRace = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = SessionRace(self.plan, SessionLimits(), max_sessions=len(self.pool))

    @property
    def result(self) -> GroupResult:
        return self.sessions.result

    def close(self, seconds: float) -> None:
        self.over_s = seconds
        self.pool = self.pool[: len(self.candidates)]


@dataclass(slots=True, eq=False)
class SessionRunner(Runner):
    """One session. `num_tokens` counts its context beyond the prompt, tools' words included."""

    session: Session = field(kw_only=True)
    course: Course = field(kw_only=True)
    num_before_turn: int = 0
    """Tokens, of those, that were there when its turn began."""
    tool: Message | None = None
    """What ends the tool that runs."""

    @property
    def is_wanted(self) -> bool:
        return self.session.is_open

    @property
    def turn_tokens(self) -> int:
        """How many tokens the turn that runs will have, when it has ended."""
        return self.course.turns[self.session.num_turns]


def group_of(race: Race, its: SessionTerms, seed: int, key: tuple[int, ...], machine: Machine) -> SessionGroup:
    """The same group, of sessions. key: rollout and prompt.

    Raises: ValueError for a session that no rank's KV cache can hold.
    """
    courses = []
    for index, candidate in enumerate(race.pool):
        course = draw_course(its, candidate.num_tokens, Random(f"{seed}/session/{key}/{index}"))
        tool_tokens = its.tool_tokens * (len(course.turns) - 1)
        machine.check_fits(race.prompt_id, race.prompt_tokens + sum(course.turns) + tool_tokens)
        courses.append(course)
    return SessionGroup(
        race.prompt_id,
        race.plan,
        race.pool,
        race.prompt_tokens,
        lengths=race.lengths,
        max_tokens=race.max_tokens,
        courses=courses,
    )


class SessionRank(Rank):
    """An engine that runs groups of sessions to their end. Its waiting line is of turns."""

    def __init__(self, machine: Machine, tool_tokens: int) -> None:
        super().__init__(machine, Judge())
        self._tool_tokens = tool_tokens
        self._kept: dict[SessionRunner, int] = {}
        """Tokens of those that ended a turn and whose KV is still there, the one first that nobody needed longest."""
        self._num_kept = 0

    def _enter(self, race: SessionGroup) -> None:
        for _ in range(race.plan.num_candidates):
            self._begin_session(race)

    def _begin_session(self, race: SessionGroup) -> None:
        index = len(race.candidates)
        session = race.sessions.enter(str(index), self._run.seconds)
        id = CandidateId(race.prompt_id, index)
        runner = SessionRunner(id, race, race.pool[index], session=session, course=race.courses[index])
        race.candidates.append(runner)
        self._begin_turn(runner)

    def _begin_turn(self, runner: SessionRunner) -> None:
        runner.race.sessions.begin_turn(runner.session)
        runner.num_before_turn = runner.num_tokens
        self._waiting.append(runner)

    def _tool_ends(self, runner: SessionRunner) -> None:
        if runner.session.num_turns == len(runner.course.turns):
            runner.race.sessions.finish(runner.session, self._between_s, void=True)
            runner.ended_s = self._between_s
            self._settle(runner.race)
            return
        runner.num_tokens += self._tool_tokens
        self._begin_turn(runner)

    def _computed_tokens(self, runner: SessionRunner) -> float:
        if runner not in self._kept:
            return super()._computed_tokens(runner)
        self._num_kept -= self._kept.pop(runner)
        before = runner.race.prompt_tokens + runner.num_tokens - self._tool_tokens
        once, again = (computed_prompt_tokens(before, times, self._block_size) for times in (1, 2))
        return again - once + self._tool_tokens

    def _start(self, runner: SessionRunner) -> None:
        super()._start(runner)
        self._evict()

    def _set_wakes(self, runner: SessionRunner) -> None:
        self._wake(runner, runner.num_before_turn + runner.turn_tokens)

    def _evict(self) -> None:
        """What runs takes the place of what does not."""
        room = self._kv_capacity - self._kv_offset - len(self._running) * self._step
        while self._num_kept > max(0, room):
            self._num_kept -= self._kept.pop(next(iter(self._kept)))

    def _leave_batch(self, runner: SessionRunner) -> None:
        """Its turn is over; its KV stays for now."""
        self._pause(runner)
        self._kept[runner] = runner.num_tokens
        self._num_kept += runner.num_tokens

    def _close_step(self) -> Closed:
        self._evict()
        touched: dict[SessionGroup, None] = {}
        while self._wakes and self._wakes[0][0] <= self._step:
            _, _, runner, start = heappop(self._wakes)
            if runner.start == start:
                self._leave_batch(runner)
                self._end_turn(runner)
                touched[runner.race] = None
        for race in touched:
            self._settle(race)
        return Closed(0, (), ())

    def _end_turn(self, runner: SessionRunner) -> None:
        session, course, now_s = runner.session, runner.course, self._run.seconds
        number = session.num_turns
        is_last = number == len(course.tools_s)
        is_cut = is_last and runner.future.end == "length"
        runner.race.sessions.end_turn(session, course.turns[number], now_s, cut=is_cut, last=is_last)
        if is_last:
            runner.ended_s = now_s
        if not is_last:
            runner.tool = self._send(now_s + course.tools_s[number], partial(self._tool_ends, runner))

    def _settle(self, race: SessionGroup) -> None:
        was_over = race.sessions.is_over
        settled = race.sessions.settle()
        for session in settled.lost:
            self._lose(race.candidates[session.index])
        for _ in range(settled.num_wanted):
            self._begin_session(race)
        if race.sessions.is_over and not was_over:
            race.close(self._run.seconds)

    def _lose(self, runner: SessionRunner) -> None:
        runner.ended_s = self._run.seconds
        if runner.start is not None:
            self._leave_batch(runner)
        if runner.session.in_turn:
            num_tokens = runner.num_tokens - runner.num_before_turn
            runner.race.sessions.end_turn(runner.session, num_tokens, self._run.seconds)
        else:
            assert runner.tool is not None
            self._inbox.remove(runner.tool)
            heapify(self._inbox)


def run_sessions(machine: Machine, races: Iterable[SessionGroup], its: SessionTerms) -> RankRun:
    """All of them at once, on one engine."""
    rank = SessionRank(machine, its.tool_tokens)
    for race in races:
        rank.launch(race)
    return rank.run()
