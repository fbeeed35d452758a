"""Groups whose candidates are sessions: turns in an engine's batch, and tools beside it.

A session generates as many tokens as the candidate of its index would, in turns of about equal size. A tool runs after
each turn but the last, and the session leaves the batch meanwhile. The next turn reuses the part of its context that is
still in the prefix cache, and computes the tool's tokens.

Invariant: `parts/sessions/rules.py` decides which sessions win and which are replaced. The course of a session depends
only on the seed, its rollout, its prompt and its index. With one turn each, a rank works as in `simulator/rank.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop
from random import Random
from typing import ClassVar, NamedTuple

from vllm_rollout.config import MAX_TRACED_TOKENS
from vllm_rollout.kernel.rules.rows import Integer, Number, row, rows
from vllm_rollout.kernel.rules.types import CandidateId, GroupResult
from vllm_rollout.parts.sessions.rules import Session, SessionLimits, SessionRace
from vllm_rollout.parts.shaping.rules.cost import computed_prompt_tokens
from vllm_rollout.simulator.machine import Machine, RankRun
from vllm_rollout.simulator.parts import FlagError
from vllm_rollout.simulator.race import Race, Runner
from vllm_rollout.simulator.rank import Closed, Message, Rank
from vllm_rollout.simulator.settings import written_fields

MORE_SESSIONS = 2
"""Factor on the number of sessions that a group begins with: the most that it may have in all. A server's default."""
MAX_TURNS = 1000
MAX_TOOL_SECONDS = 1e6


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """Turns and tools of sessions, on average."""

    turns: float = row(Number(1, MAX_TURNS), "Turns of a session on average; their number is geometric.", default=3.0)
    tool_seconds: float = row(
        Number(0, MAX_TOOL_SECONDS), "Time of a tool on average, in steps without a profile.", default=0.0
    )
    tool_sigma: float = row(Number(0, 5), "Deviation of its logarithm: how heavy the tail of tools is.", default=1.0)
    tool_tokens: int = row(Integer(0, MAX_TRACED_TOKENS), "Tokens of a tool's answer.", default=100)
    tool_failures: float = row(
        Number(0, 1, below=True), "Chance that a tool fails, so that its session is void.", default=0.0
    )
    max_factor: ClassVar[int] = MORE_SESSIONS

    def group_of(self, race: Race, seed: int, key: tuple[int, ...], machine: Machine) -> SessionGroup:
        """Turn a race into a group of sessions. `key`: epoch, rollout and prompt.

        Raises: ValueError for a session that no rank's KV cache can hold.
        """
        courses = []
        for index, candidate in enumerate(race.pool):
            course = draw_course(self, candidate.num_tokens, Random(f"{seed}/session/{key}/{index}"))
            tool_tokens = self.tool_tokens * (len(course.turns) - 1)
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

    def run(self, machine: Machine, races: Iterable[SessionGroup]) -> RankRun:
        """Run all groups at once on one engine."""
        return run_sessions(machine, races, self)


RECORDED = "recorded"


def parse_sessions(text: str, others: SessionTerms | None = None) -> SessionTerms:
    """Read "turns=4,tool_seconds=5". A field that is left out comes from `others`. "recorded" sets no field.

    Raises: ValueError with field, value and what is allowed.
    """
    written = {} if text == RECORDED else written_fields(text, rows(SessionTerms))
    return replace(others or SessionTerms(), **written)


def terms_of(text: str, learned: SessionTerms | None) -> SessionTerms:
    """Face `simulated`: terms from `--sessions`. Fields that it leaves out are those of recorded groups, if any.

    Raises: FlagError.
    """
    if text == RECORDED and learned is None:
        raise FlagError(f"--sessions {RECORDED}: no group of sessions was recorded. Say what they do, as in turns=4.")
    try:
        return parse_sessions(text, learned)
    except ValueError as error:
        raise FlagError(f"--sessions {text!r}: {error}") from error


class Course(NamedTuple):
    """Turns and tools of a session that nothing stops."""

    turns: tuple[int, ...]
    """Tokens generated, by turn."""
    tools_s: tuple[float, ...]
    """Time of the tool after each turn but the last. A tool after the last turn fails."""

    @property
    def fails(self) -> bool:
        return len(self.tools_s) == len(self.turns)


def draw_course(its: SessionTerms, num_tokens: int, chance: Random) -> Course:
    """Draw a session of `num_tokens` generated tokens, or fewer if a tool fails. Each turn has at least one token."""
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
    """One group of a replay. Its pool holds every session that the group may ever have."""

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
    """One session. `num_tokens` counts its context after the prompt, including the tools' tokens."""

    session: Session = field(kw_only=True)
    course: Course = field(kw_only=True)
    num_before_turn: int = 0
    """`num_tokens` at the start of the session's latest turn."""
    tool: Message | None = None
    """Message at which the latest tool ends."""

    @property
    def is_wanted(self) -> bool:
        return self.session.is_open

    @property
    def turn_tokens(self) -> int:
        """Tokens that the current turn generates in all."""
        return self.course.turns[self.session.num_turns]


class SessionRank(Rank):
    """An engine that runs groups of sessions to their end. Its waiting line holds turns."""

    def __init__(self, machine: Machine, tool_tokens: int) -> None:
        super().__init__(machine)
        self._tool_tokens = tool_tokens
        self._kept: dict[SessionRunner, int] = {}
        """Tokens of sessions outside the batch whose KV is still in the cache, the longest unused first."""
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
        """Evict KV of sessions outside the batch until the running sessions fit."""
        room = self._kv_capacity - self._kv_offset - len(self._running) * self._step
        while self._num_kept > max(0, room):
            self._num_kept -= self._kept.pop(next(iter(self._kept)))

    def _leave_batch(self, runner: SessionRunner) -> None:
        """Take a session out of the batch. Its KV stays in the cache for now."""
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
    """Run all groups at once on one engine."""
    rank = SessionRank(machine, its.tool_tokens)
    for race in races:
        rank.launch(race)
    return rank.run()
