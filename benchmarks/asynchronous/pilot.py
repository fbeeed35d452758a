"""A pilot training, and what follows from its lengths: speed of training, seconds of all runs, shares of devices.

The pilot waits for 16 of 16 on policy, so its record has whole groups of up to 16 candidates while the policy learns.

- The speed of training is such that training has the world's share of a step of waiting, over the whole pilot.
- All runs of a world end after the seconds of PILOT_STEPS steps of waiting.
- An arm gets the share of devices with most updates per second in a replay of the pilot's lengths, without a policy.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.asynchronous.arms import BATCH, GROUP_SIZE, Arm
from benchmarks.asynchronous.clock import MAX_TOKENS, Clock, World
from benchmarks.asynchronous.policy import Policy
from benchmarks.asynchronous.sampler import Answer, Asked, Name
from benchmarks.asynchronous.train import Graded, Training
from benchmarks.common import write_json
from examples.grpo.task import Problem

PILOT_STEPS, PILOT_SIZE = 24, 16
PHASES = 3
"""Parts of the pilot that are replayed apart, because lengths change while the policy learns."""
NUM_PROMPT = 17
"""Tokens of a prompt in the pilot. Trained ones have 20, so training takes up to 4 % more than the share named."""
SHARES = [place / 16 for place in range(1, 16)]
WHOLE = SHARES[1::2]
"""Shares of whole GPUs."""


def pilot(model: str, path: Path) -> list[list[list[int]]]:
    """Lengths of the pilot's answers, [step][group][candidate]. A pilot that was run is read."""
    if not path.exists():
        policy = Policy(model, seed=0)
        sampler, steps = policy.sampler(seed=0), []
        for step in range(PILOT_STEPS):
            asked = [policy.problem(step * BATCH + place) for place in range(BATCH)]
            sampler.launch([Asked(place, ids, PILOT_SIZE) for place, (_, ids) in enumerate(asked)])
            groups = [Graded(problem, ids, [], [], []) for problem, ids in asked]
            while sampler.num_running:
                for answer in sampler.step():
                    group = groups[answer.name.group]
                    group.answers.append(answer)
                    group.rewards.append(policy.reward(group.problem, answer))
            policy.learn(groups)
            policy.give_weights(sampler, recompute=False)
            steps.append([[len(answer.token_ids) for answer in in_order(group.answers)] for group in groups])
            print(f"pilot: step {step + 1} of {PILOT_STEPS}", flush=True)
        write_json(path, {"lengths": steps})
    return json.loads(path.read_text())["lengths"]


def in_order(answers: Sequence[Answer]) -> list[Answer]:
    """The answers in the order in which they started."""
    return sorted(answers, key=lambda answer: answer.name.index)


def drawn(groups: Sequence[Sequence[int]], seed: int = 0) -> Iterator[Sequence[int]]:
    """Groups at random, without end."""
    chance = random.Random(seed)
    while True:
        yield chance.choice(groups)


class Lengths:
    """Rollouts that replay lengths, without tokens. `groups`: the lengths of each group, in their order."""

    def __init__(self, groups: Iterator[Sequence[int]]) -> None:
        self.groups, self.num_steps = groups, 0
        self.lengths = dict[int, Sequence[int]]()
        """Lengths of each group, also if it runs again."""
        self.ends: list[tuple[int, Name, int]] = []
        """Step, name and start of each end. It counts if the answer of this start runs."""
        self.started: dict[Name, int] = {}
        """Steps before the start of each running answer."""
        self.context_before = 0
        """Tokens of prompts, less the steps before the starts."""

    @property
    def num_running(self) -> int:
        return len(self.started)

    @property
    def num_context(self) -> int:
        return self.num_steps * len(self.started) + self.context_before

    def launch(self, asked: Sequence[Asked]) -> None:
        for each in asked:
            if each.group not in self.lengths:
                self.lengths[each.group] = next(self.groups)
            for index, length in enumerate(self.lengths[each.group][: each.num_candidates]):
                name = Name(each.group, index)
                heapq.heappush(self.ends, (self.num_steps + length, name, self.num_steps))
                self.started[name] = self.num_steps
                self.context_before += NUM_PROMPT - self.num_steps

    def step(self) -> list[Answer]:
        self.num_steps += 1
        ended = []
        while self.ends and self.ends[0][0] == self.num_steps:
            _, name, started = heapq.heappop(self.ends)
            if self.started.get(name) == started:
                ended += self.stop([name])
        return ended

    def stop(self, names: Collection[Name]) -> list[Answer]:
        stopped = []
        for name in names:
            started = self.started.pop(name)
            self.context_before -= NUM_PROMPT - started
            length = self.num_steps - started
            stopped.append(Answer(name, [0] * length, [], [0], length == MAX_TOKENS))
        return stopped


class NoPolicy:
    """A learner of a replay, which learns nothing. Every second answer is right."""

    def problem(self, number: int) -> tuple[Problem, list[int]]:
        return Problem("", "", {}, 0), [0] * NUM_PROMPT

    def reward(self, problem: Problem, answer: Answer) -> float:
        return float(answer.name.index % 2)

    def prune(self, rollouts: Any, names: Sequence[Name], at_least: int) -> list[Name]:
        return list(names[max(at_least, (len(names) + 1) // 2) :])

    def learn(self, groups: Sequence[Graded], *, truncates: bool) -> Mapping[str, Any]:
        return {}

    def give_weights(self, rollouts: Any, *, recompute: bool) -> None:
        pass

    def evaluate(self) -> Mapping[str, Any]:
        return {}


class Plan(NamedTuple):
    """Numbers of a world that follow from the pilot."""

    clock: Clock
    """The clock of an arm whose devices alternate."""
    limit_s: float
    """Seconds of every run."""


def plan_of(world: World, lengths: Sequence[Sequence[Sequence[int]]]) -> Plan:
    """Speed of training and length of runs, from the pilot's first GROUP_SIZE candidates of each group."""
    rollout_s, num_tokens, clock = [], [], Clock(world, 1.0)
    for step in lengths:
        answers = sorted(length for group in step for length in group[:GROUP_SIZE])
        num_tokens.append(sum(answers) + NUM_PROMPT * len(answers))
        seconds, num_running = 0.0, len(answers)
        for at in range(answers[-1]):
            while answers[len(answers) - num_running] <= at:
                num_running -= 1
            seconds += clock.rollout_s(num_running, num_running * (NUM_PROMPT + at))
        rollout_s.append(seconds)
    others_s = fmean(rollout_s) + world.transfer_s
    step_s = others_s / (1 - world.training)
    speed = fmean(num_tokens) * world.scale / (step_s - others_s)
    return Plan(Clock(world, speed), PILOT_STEPS * step_s)


def clock_of(
    arm: Arm, plan: Plan, lengths: Sequence[Sequence[Sequence[int]]], shares: Sequence[float] = SHARES
) -> Clock:
    """The arm's clock, with the one of these shares of devices that makes most updates."""
    if not arm.splits_devices:
        return plan.clock
    speeds = {share: updates_s(arm, plan.clock.split(share), plan.limit_s, lengths) for share in shares}
    return plan.clock.split(max(speeds, key=lambda share: speeds[share]))


def updates_s(arm: Arm, clock: Clock, limit_s: float, lengths: Sequence[Sequence[Sequence[int]]]) -> float:
    """Updates per second of a replay, in the mean over the phases of the pilot."""
    found = replays(arm, clock, limit_s, lengths)
    return fmean(steps[-1]["step"] / steps[-1]["seconds"] if steps else 0.0 for steps in found)


def replays(
    arm: Arm, clock: Clock, limit_s: float, lengths: Sequence[Sequence[Sequence[int]]]
) -> Iterator[list[dict[str, Any]]]:
    """Lines of updates, for each phase of the pilot."""
    size = len(lengths) // PHASES
    for phase in range(PHASES):
        groups = [group for step in lengths[phase * size : (phase + 1) * size] for group in step]
        lines = Training(arm, clock, Lengths(drawn(groups)), NoPolicy()).go(limit_s / PHASES)
        yield [line for line in lines if line["kind"] == "step"]
