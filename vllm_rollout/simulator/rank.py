"""One engine's part of a rollout, from event to event.

Invariant: `GroupSteps` sees what it would see if every step were made. Between two events every running candidate gains
one token per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from vllm_rollout.group.cost import computed_prompt_tokens
from vllm_rollout.group.judge import Judge, Scoring
from vllm_rollout.group.lifecycle import Group
from vllm_rollout.group.plan import GroupPlan
from vllm_rollout.group.step import GroupSteps
from vllm_rollout.group.types import CandidateId, Confidence, Ending, Observation
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.pool import PoolCandidate


@dataclass(slots=True, eq=False)
class Race:
    """One group of a replay."""

    prompt_id: str
    plan: GroupPlan
    pool: Sequence[PoolCandidate]
    """`plan.num_candidates` of them."""
    prompt_tokens: int = 0
    scoring: Scoring | None = None
    """With pruning."""
    candidates: list[Runner] = field(default_factory=list)
    group: Group = field(init=False)
    endings: tuple[Ending, ...] = ()
    """Of every candidate, when the group is over."""
    over_s: float = 0.0
    """When that was."""
    num_holding: int = 0
    """Candidates that run now and share the prompt's KV cache."""

    def close(self, seconds: float) -> None:
        self.over_s = seconds
        self.endings = tuple(runner.ending for runner in self.candidates)


@dataclass(slots=True, eq=False)
class Runner:
    """One candidate of a race."""

    id: CandidateId
    race: Race
    future: PoolCandidate
    start: int | None = None
    """The step at which it had, or would have had, no token yet. None: it does not run."""
    num_tokens: int = 0
    """Up to date when it does not run."""

    @property
    def index(self) -> int:
        return self.id.index

    @property
    def detection_length(self) -> int | None:
        """At which it is scored, if it lives that long; None when it has no score."""
        scoring = self.race.scoring
        return None if scoring is None or self.future.score is None else scoring.plan.detection_length

    @property
    def ending(self) -> Ending:
        state = self.race.group.state(self.index)
        truncated = state == "finished" and self.future.end == "length"
        by_itself = self.future.end == "stop" and self.num_tokens == self.future.num_tokens and state != "pruned"
        return Ending(self.index, state, self.num_tokens, truncated, self.race.group.end_step(self.index), by_itself)


@dataclass(slots=True)
class RankRun:
    """What became of a rank's part."""

    seconds: float = 0.0
    curve: list[tuple[float, int]] = field(default_factory=list)
    """(time, candidates that run from then on)."""
    num_preemptions: int = 0


class Rank:
    """An engine that runs races to their end. All candidates are there from the start and wait first come first
    served."""

    def __init__(self, machine: Machine, races: Iterable[Race], judge: Judge) -> None:
        self._cost = machine.step_cost
        self._slots = machine.num_slots or inf
        self._kv_capacity = machine.kv_capacity_tokens or inf
        self._block_size = machine.block_size
        self._group_steps = GroupSteps(judge)
        self._step = 0
        self._running: dict[Runner, None] = {}
        """In the order of admission."""
        self._offset = 0
        """Sum over running candidates of prompt tokens - start: their contexts are that plus the step."""
        self._kv_offset = 0
        """The same, but the prompt counts once per group."""
        self._wakes: list[tuple[int, int, Runner, int]] = []
        """(step, number, candidate, its start): something is due, unless the candidate was preempted meanwhile."""
        self._numbers = count()
        self._run = RankRun()
        self._races = {str(position): race for position, race in enumerate(races)}
        """By group id: a trace may name a prompt twice."""
        self._waiting: deque[Runner] = deque()
        for group_id, race in self._races.items():
            for index, future in enumerate(race.pool):
                id, race.group = self._group_steps.launch(group_id, race.plan.terms, index, scoring=race.scoring)
                runner = Runner(id, race, future)
                race.candidates.append(runner)
                self._waiting.append(runner)

    def run(self) -> RankRun:
        """Until every group is over."""
        self._admit()
        while self._running:
            wake = self._next_wake()
            step = min(wake, self._full_step())
            self._advance(step)
            if step == wake:
                self._close_step()
            else:
                self._preempt()
            self._admit()
        self._run.curve.append((self._run.seconds, 0))
        return self._run

    def _admit(self) -> None:
        prefill_tokens = num_admitted = 0
        while self._waiting and len(self._running) < self._slots:
            runner = self._waiting[0]
            race = runner.race
            if race.group.state(runner.index) != "running":  # it was given up while it waited
                self._waiting.popleft()
                continue
            prompt_tokens = race.prompt_tokens if not race.num_holding else 0
            if self._running and not self._fits(prompt_tokens + runner.num_tokens):
                break
            self._waiting.popleft()
            num_siblings = race.num_holding
            prefill_tokens += runner.num_tokens
            prefill_tokens += computed_prompt_tokens(race.prompt_tokens, num_siblings + 1, self._block_size)
            prefill_tokens -= computed_prompt_tokens(race.prompt_tokens, num_siblings, self._block_size)
            num_admitted += 1
            self._start(runner)
        if num_admitted:
            self._spend(self._cost.step_prefill_s + prefill_tokens * self._cost.prefill_s_per_token)

    def _start(self, runner: Runner) -> None:
        race = runner.race
        runner.start = start = self._step - runner.num_tokens
        self._offset += race.prompt_tokens - start
        self._kv_offset += (race.prompt_tokens if not race.num_holding else 0) - start
        race.num_holding += 1
        self._running[runner] = None
        self._wake(runner, runner.future.num_tokens)
        if (detection_length := runner.detection_length) is not None and runner.num_tokens < detection_length:
            self._wake(runner, detection_length)
        if race.group.length_cap is not None:
            self._wake(runner, race.group.length_cap)

    def _wake(self, runner: Runner, num_tokens: int) -> None:
        heappush(self._wakes, (runner.start + num_tokens, next(self._numbers), runner, runner.start))

    def _pause(self, runner: Runner) -> None:
        """It runs no longer, for whatever reason."""
        race = runner.race
        runner.num_tokens = self._step - runner.start
        race.num_holding -= 1
        self._offset -= race.prompt_tokens - runner.start
        self._kv_offset -= (race.prompt_tokens if not race.num_holding else 0) - runner.start
        runner.start = None
        del self._running[runner]

    def _next_wake(self) -> int:
        while True:
            step, _, runner, start = self._wakes[0]
            if runner.start == start:
                return step
            heappop(self._wakes)

    def _full_step(self) -> float:
        """The last step up to which the KV cache holds all that runs."""
        if len(self._running) == 1 or self._kv_capacity == inf:
            return inf
        return (self._kv_capacity - self._kv_offset) // len(self._running)

    def _fits(self, num_tokens: int) -> bool:
        """With room for everybody's next block, so that what is admitted is not preempted at once."""
        batch_size = len(self._running)
        used = self._kv_offset + batch_size * self._step
        return used + num_tokens + (batch_size + 1) * self._block_size <= self._kv_capacity

    def _advance(self, step: int) -> None:
        num_steps, batch_size = step - self._step, len(self._running)
        if num_steps <= 0:
            return
        context = self._offset / batch_size + self._step
        self._spend(self._cost.decode_time(batch_size, context, num_steps))
        self._step = step

    def _spend(self, seconds: float) -> None:
        curve, num_running = self._run.curve, len(self._running)
        if not curve or curve[-1][1] != num_running:
            curve.append((self._run.seconds, num_running))
        self._run.seconds += seconds

    def _preempt(self) -> None:
        """Make room for one token of everybody: the last admitted waits, first in line, and keeps its tokens."""
        while len(self._running) > 1 and self._full_step() <= self._step:
            runner = next(reversed(self._running))
            self._pause(runner)
            self._waiting.appendleft(runner)
            self._run.num_preemptions += 1

    def _close_step(self) -> None:
        """Everything due in this step, and the verdicts on it."""
        due: dict[CandidateId, Observation] = {}
        touched: dict[Race, bool] = {}
        """Races with an event, and whether they had a length cap before it."""
        while self._wakes and self._wakes[0][0] <= self._step:
            _, _, runner, start = heappop(self._wakes)
            if runner.start != start:
                continue
            race = runner.race
            touched.setdefault(race, race.group.length_cap is not None)
            num_tokens = self._step - start
            if num_tokens == runner.future.num_tokens:
                self._pause(runner)
                self._group_steps.ended(runner.id, race.group, runner.future.end, num_tokens)
            elif num_tokens == runner.detection_length:
                due[runner.id] = _observation(runner.future)
        verdicts = self._group_steps.close_step(due, self._num_tokens)
        for group_id, index in verdicts.stop:
            runner = self._races[group_id].candidates[index]
            if runner.start is not None:
                self._pause(runner)
        for race, had_cap in touched.items():
            if race.group.length_cap is not None and not had_cap:
                for index in race.group.running:
                    if race.candidates[index].start is not None:
                        self._wake(race.candidates[index], race.group.length_cap)
        for group_id in verdicts.over:
            self._races[group_id].close(self._run.seconds)

    def _num_tokens(self, candidate_id: CandidateId) -> int:
        runner = self._races[candidate_id.group_id].candidates[candidate_id.index]
        return runner.num_tokens if runner.start is None else self._step - runner.start


def _observation(future: PoolCandidate) -> Observation:
    """A trace does not say what its scores are; as confidence they are standardised before they are calibrated."""
    return Observation(Confidence(future.score, future.score, future.score))
