"""One engine's part of a rollout, from event to event.

Invariant: the groups see what they would see if every step were made: ends, then verdicts, in the order of the
scheduler (`adapter/core/scheduler.py`). Between two events every running candidate gains one token per step.
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
from vllm_rollout.group.ledger import LedgerEntry
from vllm_rollout.group.lifecycle import Group
from vllm_rollout.group.plan import GroupPlan
from vllm_rollout.group.types import Confidence, Ending, Observation
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

    def __post_init__(self) -> None:
        plan = self.plan
        self.group = Group(plan.group_size, plan.num_candidates, plan.early_stop, patience=plan.patience)

    def close(self, seconds: float) -> None:
        self.over_s = seconds
        self.endings = tuple(runner.ending for runner in self.candidates)
        for runner in self.candidates:
            if runner.entry is not None:
                runner.entry.state, runner.entry.num_tokens = runner.ending.state, runner.num_tokens


@dataclass(slots=True, eq=False)
class Runner:
    """One candidate of a race."""

    race: Race
    index: int
    future: PoolCandidate
    start: int | None = None
    """The step at which it had, or would have had, no token yet. None: it does not run."""
    num_tokens: int = 0
    """Up to date when it does not run."""
    end_step: int = 0
    entry: LedgerEntry | None = None
    """With pruning."""

    @property
    def detection_length(self) -> int | None:
        """At which it is scored, if it lives that long; None when it has no score."""
        scoring = self.race.scoring
        return None if scoring is None or self.future.score is None else scoring.plan.detection_length

    @property
    def ending(self) -> Ending:
        state = self.race.group.state(self.index)
        truncated = state == "finished" and self.future.end == "length"
        return Ending(self.index, state, self.num_tokens, truncated, self.end_step)


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
        self._judge = judge
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
        self._races = list(races)
        self._waiting: deque[Runner] = deque()
        for race in self._races:
            for index, future in enumerate(race.pool):
                race.group.launch(index)
                runner = Runner(race, index, future)
                if race.scoring is not None:
                    scoring = race.scoring
                    runner.entry = judge.ledger.open(
                        scoring.rollout_id, scoring.prompt_id, index, f"{race.prompt_id}-{index}", scoring.plan
                    )
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
        """Everything due in this step, then the verdicts of the groups it concerns."""
        touched: dict[Race, list[Runner]] = {}
        """Candidates to judge, by race."""
        while self._wakes and self._wakes[0][0] <= self._step:
            _, _, runner, start = heappop(self._wakes)
            if runner.start != start:
                continue
            due = touched.setdefault(runner.race, [])
            num_tokens = self._step - start
            if num_tokens == runner.future.num_tokens:
                self._pause(runner)
                runner.end_step = self._step
                runner.race.group.end(runner.index, runner.future.end, num_tokens)
            elif num_tokens == runner.detection_length:
                due.append(runner)
        for race in touched:
            self._settle(race)
        for race in sorted((race for race, due in touched.items() if due), key=lambda race: race.prompt_id):
            if not race.group.closed:
                self._judge_due(race, touched[race])
        for race in touched:
            if race.group.length_cap is not None:
                self._give_up_too_long(race)
            if race.group.over:
                race.close(self._run.seconds)

    def _settle(self, race: Race) -> None:
        had_cap = race.group.length_cap is not None
        self._stop(race, race.group.settle().stop)
        if not had_cap and race.group.length_cap is not None:
            for index in race.group.running:
                if race.candidates[index].start is not None:
                    self._wake(race.candidates[index], race.group.length_cap)

    def _judge_due(self, race: Race, due: Sequence[Runner]) -> None:
        seen = {runner.index: (runner.entry, _observation(runner.future)) for runner in due}
        pruned = self._judge.judge(race.group, race.scoring, seen)
        if pruned:
            self._stop(race, pruned)
            self._settle(race)

    def _give_up_too_long(self, race: Race) -> None:
        reached = []
        for index in race.group.running:
            runner = race.candidates[index]
            num_tokens = runner.num_tokens if runner.start is None else self._step - runner.start
            if num_tokens >= race.group.length_cap:
                reached.append(index)
        race.group.give_up(reached)
        self._stop(race, reached)

    def _stop(self, race: Race, indices: Iterable[int]) -> None:
        """Verdicts: these run, or wait, no longer."""
        for index in indices:
            runner = race.candidates[index]
            runner.end_step = self._step
            if runner.start is not None:
                self._pause(runner)


def _observation(future: PoolCandidate) -> Observation:
    """A trace does not say what its scores are; as confidence they are standardised before they are calibrated."""
    return Observation(Confidence(future.score, future.score, future.score))
