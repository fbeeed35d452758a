"""One engine's part of a rollout, from event to event.

    begin   between two steps: messages that have arrived are read, also on groups that come or go
            waiting candidates are admitted
    close   at the end of a step in which something happens: events in, verdicts out

Invariant: `GroupSteps` gets the same input as if every step were made. Between two events every running candidate gains
one token per step. With drafts, a real step makes several tokens. "Step" then means the part of it in which every
candidate gains one token. A candidate is on one rank at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, Literal, NamedTuple

from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.detached import DetachedGroup
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.types import CandidateId
from vllm_rollout.parts.shaping.rules.admission import most_running
from vllm_rollout.parts.shaping.rules.cost import computed_prompt_tokens
from vllm_rollout.simulator.machine import Machine, RankRun
from vllm_rollout.simulator.parts import simulated
from vllm_rollout.simulator.race import Race, Runner

Phase = Literal["close", "begin"]
Message = tuple[float, int, Callable[[], None]]
"""(arrival, number, action)."""


class Happening(NamedTuple):
    """The next event of a rank."""

    seconds: float
    """Time of the event."""
    phase: Phase


class Left(NamedTuple):
    """A group that goes on after an event of its candidates."""

    race: Race
    num_tokens: Sequence[int]
    """Estimated tokens of each running candidate, from the lengths of its ended siblings."""


class Closed(NamedTuple):
    """Report of a step's end to the launcher of the groups."""

    num_ended: int
    """Number of candidates that ended."""
    over: Sequence[Race]
    """Groups that are over."""
    left: Sequence[Left]
    """Groups that go on after an event of their candidates."""


class Departed(NamedTuple):
    """A group that is moving to another rank."""

    race: Race
    detached: DetachedGroup


class Rank:
    """An engine that runs races to their end. Candidates wait in the order of their arrival."""

    def __init__(self, machine: Machine, learned: GroupSteps | None = None, name: str = "") -> None:
        """`learned`: the engine's steps so far, whose parts have learned. `name`: prefix of the ids of groups that are
        launched here. Ranks between which groups move need different names."""
        self._name = name
        self._cost = machine.step_cost
        self._drafted = None
        if machine.drafts is not None:
            self._drafted = simulated("drafts", "drafts=true").DraftedSteps(machine.step_cost, machine.drafts)
        self._slots = machine.num_slots or inf
        self._kv_capacity = machine.kv_capacity_tokens or inf
        self._block_size = machine.block_size
        self._transfer = machine.transfer
        self._group_steps = new_steps() if learned is None else learned.fresh()
        self._step = 0
        self._between_s = 0.0
        """Time at which the last step ended."""
        self._planned: tuple[int, float] | None = None
        """(step, time) of the next event, which comes at the step's end. None between two steps."""
        self._is_told = False
        """True if a message was read that takes effect with the next step."""
        self._running: dict[Runner, None] = {}
        """Running candidates in the order of admission."""
        self._offset = 0
        """Sum over running candidates of prompt tokens - start. A candidate's context is its own term plus the step."""
        self._kv_offset = 0
        """`_offset`, but with the prompt of each group counted once."""
        self._wakes: list[tuple[int, int, Runner, int]] = []
        """(step, number, candidate, its start): an event is due, unless the candidate was paused meanwhile."""
        self._numbers = count()
        self._inbox: list[Message] = []
        self._run = RankRun()
        self._races: dict[str, Race] = {}
        """Groups by group id, since a trace may name a prompt twice. Groups that moved away stay in it."""
        self._waiting: deque[Runner] = deque()

    def launch(self, race: Race, at_s: float = 0.0) -> None:
        """Launch a group, which arrives at `at_s`."""
        self._send(at_s, lambda: self._enter(race))

    def tell(self, at_s: float, action: Callable[[GroupSteps], None]) -> None:
        """Do something with the engine's groups, in the first moment between two steps from `at_s` on."""
        self._send(at_s, lambda: action(self._group_steps))

    def send_away(self, group_id: str, at_s: float, deliver: Callable[[float, Departed], None]) -> None:
        """Order a group away at `at_s`. It leaves between two steps and goes to `deliver`, unless it is over or
        busy."""
        self._send(at_s, lambda: self._leave(group_id, deliver))

    def receive(self, departed: Departed, at_s: float) -> None:
        """Accept a group from another rank. Its candidates wait in line. Their KV comes along or is computed again."""
        self._send(at_s, lambda: self._join(departed))

    def running_at(self, seconds: float) -> Iterator[tuple[str, Race, list[int]]]:
        """Groups on this rank: id, group, and tokens of each running candidate."""
        num_steps = self._num_steps_by(seconds)
        for group_id, race in self._races.items():
            if running := self._group_steps.running(group_id):
                yield group_id, race, [self._num_tokens(id) + num_steps * self._runs(id) for id in running]

    def run(self) -> RankRun:
        """Run until nothing is left to do."""
        while self.next is not None:
            self.go_on()
        return self.over()

    def over(self) -> RankRun:
        self._run.curve.append((self._run.seconds, 0))
        return self._run

    @property
    def num_preemptions(self) -> int:
        return self._run.num_preemptions

    @property
    def seconds(self) -> float:
        """Time up to which the rank has run."""
        return self._run.seconds

    @property
    def num_unread(self) -> int:
        """Number of unread messages."""
        return len(self._inbox)

    @property
    def next(self) -> Happening | None:
        """The next event, or None if nothing is left to do."""
        if self._planned is not None:
            return Happening(self._planned[1], "close")
        if self._running or self._waiting:
            return Happening(self._between_s, "begin")
        if self._inbox:
            return Happening(max(self._between_s, self._inbox[0][0]), "begin")
        return None

    def go_on(self) -> Closed | None:
        """Perform the next event. Returns the report of a step's end, if there is one."""
        happening = self.next
        if happening.phase == "close":
            return self._close()
        self._begin(happening.seconds)
        return None

    def _send(self, at_s: float, action: Callable[[], None]) -> Message:
        message = (at_s, next(self._numbers), action)
        heappush(self._inbox, message)
        if self._planned is not None and at_s < self._planned[1]:
            self._plan()
        return message

    def _enter(self, race: Race) -> None:
        group_id = f"{self._name}{len(self._races)}"
        self._races[group_id] = race
        for index, future in enumerate(race.pool):
            id, race.group = self._group_steps.launch(group_id, race.plan.terms, index, said=race.said)
            runner = Runner(id, race, future)
            race.candidates.append(runner)
            self._waiting.append(runner)

    def _leave(self, group_id: str, deliver: Callable[[float, Departed], None]) -> None:
        if self._group_steps.stays_because(group_id) is not None:
            return
        race = self._races[group_id]
        running = [race.candidates[index] for index in race.group.running]
        for runner in running:
            if runner.start is not None:
                self._pause(runner)
        self._waiting = deque(runner for runner in self._waiting if runner.race is not race)
        self._wakes = [wake for wake in self._wakes if wake[2].race is not race]
        heapify(self._wakes)
        detached = self._group_steps.detach(group_id, {runner.index: "" for runner in running})
        deliver(self._between_s, Departed(race, detached))

    def _join(self, departed: Departed) -> None:
        race, detached = departed
        self._races[detached.group_id] = race
        race.group = self._group_steps.attach(detached)
        arrived = [race.candidates[index] for index in race.group.running]
        if self._transfer is not None:
            self._take_over(race, arrived)
        self._waiting.extend(arrived)

    def _take_over(self, race: Race, arrived: Sequence[Runner]) -> None:
        """Receive the KV of arrived candidates. The whole rank waits for it."""
        num_tokens = race.prompt_tokens + sum(runner.num_tokens for runner in arrived)
        num_computed = min(self._transfer.num_computed(len(arrived)), num_tokens)
        for runner in arrived:
            runner.num_behind_kv = num_computed / len(arrived)
        self._spend((num_tokens - num_computed) * self._transfer.s_per_token)

    def _begin(self, seconds: float) -> None:
        if not self._running and not self._waiting:
            self._idle_until(seconds)
        while self._inbox and self._inbox[0][0] <= self._between_s:
            heappop(self._inbox)[2]()
            self._is_told = self._group_steps.has_events
        self._preempt()
        self._admit()
        if self._running:
            self._plan()

    def _idle_until(self, seconds: float) -> None:
        if seconds > self._run.seconds:
            self._spend(seconds - self._run.seconds)
        self._between_s = self._run.seconds

    def _plan(self) -> None:
        """Find the next event: a candidate is due, the KV cache is full, or a message arrives."""
        step = min(self._next_wake(), self._full_step(), self._step + 1 if self._is_told else inf)
        seconds = self._run.seconds + self._time_of(step - self._step)
        if self._inbox and (arrival := self._inbox[0][0]) < seconds:
            wanted = arrival - self._run.seconds
            num_steps = 1 + bisect_left(range(1, step - self._step), wanted, key=self._time_of)
            step, seconds = self._step + num_steps, self._run.seconds + self._time_of(num_steps)
        self._planned = step, seconds

    def _num_steps_by(self, seconds: float) -> int:
        """Number of planned steps that are made by `seconds`."""
        if self._planned is None:
            return 0
        return bisect_right(range(1, self._planned[0] - self._step), seconds - self._run.seconds, key=self._time_of)

    def _time_of(self, num_steps: int) -> float:
        """Seconds that the next `num_steps` decode steps take."""
        batch_size = len(self._running)
        cost = self._cost if self._drafted is None else self._drafted.cost(batch_size)
        return cost.decode_time(batch_size, self._offset / batch_size + self._step, num_steps)

    def _close(self) -> Closed | None:
        step, seconds = self._planned
        self._planned = None
        self._spend(seconds - self._run.seconds)
        self._run.seconds = self._between_s = seconds
        self._step = step
        if not self._is_told and self._next_wake() > step:
            return None
        self._is_told = False
        return self._close_step()

    def _admit(self) -> None:
        prefill_tokens = num_admitted = 0
        while self._waiting and len(self._running) < self._slots:
            runner = self._waiting[0]
            race = runner.race
            if not runner.is_wanted:  # it was stopped while it waited
                self._waiting.popleft()
                continue
            prompt_tokens = race.prompt_tokens if not race.num_holding else 0
            if self._running and not self._fits(prompt_tokens + runner.num_tokens, race.mean_tokens):
                break
            self._waiting.popleft()
            prefill_tokens += self._computed_tokens(runner)
            num_admitted += 1
            self._start(runner)
        if num_admitted:
            self._spend(self._cost.step_prefill_s + prefill_tokens * self._cost.prefill_s_per_token)

    def _computed_tokens(self, runner: Runner) -> float:
        """Tokens to compute when the candidate starts or resumes."""
        if runner.num_behind_kv is not None:
            num_tokens, runner.num_behind_kv = runner.num_behind_kv, None
            return num_tokens
        prompt_tokens, num_siblings = runner.race.prompt_tokens, runner.race.num_holding
        with_it = computed_prompt_tokens(prompt_tokens, num_siblings + 1, self._block_size)
        return runner.num_tokens + with_it - computed_prompt_tokens(prompt_tokens, num_siblings, self._block_size)

    def _start(self, runner: Runner) -> None:
        race = runner.race
        if race.started_s is None:
            race.started_s = self._run.seconds
        runner.start = start = self._step - runner.num_tokens
        self._offset += race.prompt_tokens - start
        self._kv_offset += (race.prompt_tokens if not race.num_holding else 0) - start
        race.num_holding += 1
        if self._drafted is not None:
            self._drafted.start(race)
        self._running[runner] = None
        self._set_wakes(runner)

    def _set_wakes(self, runner: Runner) -> None:
        """Schedule the events of a candidate that starts to run."""
        self._wake(runner, runner.future.num_tokens)
        if (detection_length := runner.detection_length) is not None and runner.num_tokens < detection_length:
            self._wake(runner, detection_length)
        if (length_cap := runner.race.group.length_cap) is not None:
            self._wake(runner, length_cap)

    def _wake(self, runner: Runner, num_tokens: int) -> None:
        heappush(self._wakes, (runner.start + num_tokens, next(self._numbers), runner, runner.start))

    def _pause(self, runner: Runner) -> None:
        """Take a candidate out of the batch."""
        race = runner.race
        runner.num_tokens = self._step - runner.start
        race.num_holding -= 1
        if self._drafted is not None:
            self._drafted.stop(race)
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
        """Last step up to which the KV cache holds all running candidates."""
        if len(self._running) == 1 or self._kv_capacity == inf:
            return inf
        return (self._kv_capacity - self._kv_offset) // len(self._running)

    def _fits(self, num_tokens: int, mean_tokens: float | None) -> bool:
        """True if the KV cache has room for `num_tokens` and for the next block of every candidate.

        Without that block an admitted candidate would be preempted at once. If `mean_tokens` is known, the batch must
        also have room to grow.
        """
        batch_size = len(self._running)
        used = self._kv_offset + batch_size * self._step
        free = self._kv_capacity - used - num_tokens
        if mean_tokens is not None and free < inf and batch_size >= most_running(int(free), mean_tokens):
            return False
        return (batch_size + 1) * self._block_size <= free

    def _spend(self, seconds: float) -> None:
        curve, num_running = self._run.curve, len(self._running)
        if not curve or curve[-1][1] != num_running:
            curve.append((self._run.seconds, num_running))
        self._run.seconds += seconds

    def _preempt(self) -> None:
        """Make room for one token of every candidate. The last admitted waits first in line, and keeps its tokens."""
        while len(self._running) > 1 and self._full_step() <= self._step:
            runner = next(reversed(self._running))
            self._pause(runner)
            self._waiting.appendleft(runner)
            self._run.num_preemptions += 1

    def _close_step(self) -> Closed:
        """Process all events of this step and apply the verdicts on them."""
        num_ended = 0
        due: dict[str, dict[CandidateId, Any]] = {}
        """Observations of running candidates, by part."""
        touched: dict[Race, bool] = {}
        """Races with an event. True: the race had a length cap before it."""
        while self._wakes and self._wakes[0][0] <= self._step:
            _, _, runner, start = heappop(self._wakes)
            if runner.start != start:
                continue
            race = runner.race
            touched.setdefault(race, race.group.length_cap is not None)
            num_tokens = self._step - start
            if num_tokens == runner.future.num_tokens:
                self._pause(runner)
                runner.ended_s = self._run.seconds
                num_ended += 1
                self._group_steps.ended(runner.id, race.group, runner.future.end, num_tokens)
            elif num_tokens == runner.detection_length:
                due.setdefault(race.scores.part, {})[runner.id] = race.scores.seen(runner.future)
        verdicts = self._group_steps.close_step(due, self._num_tokens)
        for group_id, index in verdicts.stop:
            runner = self._races[group_id].candidates[index]
            runner.ended_s = self._run.seconds
            if runner.start is not None:
                self._pause(runner)
        for race, had_cap in touched.items():
            if race.group.length_cap is not None and not had_cap:
                for index in race.group.running:
                    if race.candidates[index].start is not None:
                        self._wake(race.candidates[index], race.group.length_cap)
        over = [self._races[group_id] for group_id in verdicts.over]
        for race in over:
            race.close(self._run.seconds)
        changed = dict.fromkeys([*touched, *(self._races[group_id] for group_id, _ in verdicts.stop)])
        left = [Left(race, race.ages_left) for race in changed if race.group.num_running]
        return Closed(num_ended + len(verdicts.stop), over, left)

    def _num_tokens(self, candidate_id: CandidateId) -> int:
        runner = self._races[candidate_id.group_id].candidates[candidate_id.index]
        return runner.num_tokens if runner.start is None else self._step - runner.start

    def _runs(self, candidate_id: CandidateId) -> bool:
        return self._races[candidate_id.group_id].candidates[candidate_id.index].start is not None


def new_steps() -> GroupSteps:
    """The steps of an engine that has learned nothing."""
    return GroupSteps([make() for _, make in faces("step")])


def run_races(machine: Machine, races: Iterable[Race], learned: GroupSteps | None = None) -> RankRun:
    """Run all groups at once on one engine. `learned`: as of `Rank`."""
    rank = Rank(machine, learned)
    for race in races:
        rank.launch(race)
    return rank.run()
