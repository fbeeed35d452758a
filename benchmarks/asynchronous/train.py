"""One training on the virtual clock: rollouts, the trainer, and weights updates between any two tokens.

Admission and staleness are the product's rule of feeds, and groups end and select by the kernel's rules. The trainer
trains on a batch that was taken for `Clock.training_s`, and rollouts go on meanwhile if the devices are split.

Invariant: success at a moment is that of the newest weights which the trainer had completed by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from benchmarks.asynchronous.arms import BATCH, DETECTION_LENGTH, GROUP_SIZE, Arm
from benchmarks.asynchronous.clock import SLOTS, Clock
from benchmarks.asynchronous.rounds import Rounds
from benchmarks.asynchronous.sampler import Answer, Asked, Name
from examples.grpo.task import Problem
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.feeds.rules.feed import Feed, TakenGroup

MOMENTS = (0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 7 / 16, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)
"""Shares of a run after which the policy is evaluated."""


class Rollouts(Protocol):
    """A sampler, or the replay of lengths that stands for one."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_context(self) -> int: ...
    def launch(self, asked: Sequence[Asked]) -> None: ...
    def step(self) -> list[Answer]: ...
    def stop(self, names: Collection[Name]) -> list[Answer]: ...


class Learner(Protocol):
    def problem(self, number: int) -> tuple[Problem, list[int]]:
        """The problem of a group, and the ids of its prompt."""

    def reward(self, problem: Problem, answer: Answer) -> float: ...
    def prune(self, rollouts: Any, names: Sequence[Name], at_least: int) -> list[Name]:
        """Score the running candidates of a group. Returns those to stop, so that at least so many are left."""

    def learn(self, groups: Sequence[Graded], *, truncates: bool) -> Mapping[str, Any]:
        """Make one update. Returns values for the record."""

    def give_weights(self, rollouts: Any, *, recompute: bool) -> None: ...
    def evaluate(self) -> Mapping[str, Any]: ...


class Graded(NamedTuple):
    """A complete group as the trainer sees it."""

    problem: Problem
    prompt_ids: list[int]
    answers: list[Answer]
    rewards: list[float]
    stopped: list[Answer]
    """Candidates that the race stopped, if they teach."""

    @property
    def num_tokens(self) -> int:
        trained = [*self.answers, *self.stopped]
        return sum(len(self.prompt_ids) + len(answer.token_ids) for answer in trained)


@dataclass(slots=True)
class Running:
    """A group between its start and its batch."""

    problem: Problem
    prompt_ids: list[int]
    rules: Group
    started: int
    """Engine steps before its start."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Answers that ended by themselves or were cut, by index."""
    stopped: list[Answer] = field(default_factory=list)


class Batch(NamedTuple):
    """A batch that is being trained on."""

    taken: list[TakenGroup]
    groups: list[Graded]
    ends: float


def most_different(answers: Sequence[Answer], rewards: Sequence[float], count: int) -> list[int]:
    """Places of `count` answers whose rewards differ most. For rewards of 0 and 1: half of each, as far as there are.

    The shortest answers come first. Source: PODS (arXiv 2504.13818), max-variance rule.
    """
    places = sorted(range(len(answers)), key=lambda place: len(answers[place].token_ids))
    right, wrong = ([place for place in places if bool(rewards[place]) is kind] for kind in (True, False))
    num_right = min(len(right), max(count // 2, count - len(wrong)))
    return right[:num_right] + wrong[: count - num_right]


class Training:
    def __init__(self, arm: Arm, clock: Clock, rollouts: Rollouts, learner: Learner) -> None:
        self.arm, self.clock, self.rollouts, self.learner = arm, clock, rollouts, learner
        self.feed, self.groups = Feed(arm.feed), dict[int, Running]()
        self.rounds = Rounds() if arm.in_rounds else None
        self.batch: Batch | None = None
        self.has_new_weights = False
        self.seconds, self.num_steps, self.num_updates = 0.0, 0, 0
        self.evaluated: tuple[int, Mapping[str, Any]] = (-1, {})
        """Number of updates before the newest evaluation, and its values."""
        self.num_evaluations = 0
        self.totals = Counter[str]()
        """Tokens that were generated, trained and computed again, dropped groups, seconds of rollout and training.

        `work_s`: seconds of all devices for the rollouts, if their steps were full.
        """

    def go(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Run until `limit_s`. Yields a line per update and per evaluation, in the order of their seconds."""
        while self.seconds < limit_s:
            if self.batch is None and not self.has_new_weights:
                self._take()
            self._launch()
            if self.rollouts.num_running:
                self._roll_out()
            elif self.batch:
                self.seconds = max(self.seconds, self.batch.ends)
            if self.batch and self.seconds >= self.batch.ends:
                yield from self._evaluations(min(self.batch.ends, limit_s), limit_s)
                if self.batch.ends > limit_s:
                    return
                yield self._learn(self.batch)
                self.batch, self.has_new_weights = None, True
            if self.has_new_weights and not (self.arm.in_batches and self.rollouts.num_running):
                self._update()
        yield from self._evaluations(limit_s, limit_s)

    def _take(self) -> None:
        if (taken := self.feed.take()) is not None:
            groups = [self._graded(self.groups.pop(each.number)) for each in taken]
            num_tokens = sum(group.num_tokens for group in groups)
            seconds = self.clock.training_s(num_tokens)
            self.totals.update({"trained": num_tokens, "training_s": seconds})
            self.batch = Batch(taken, groups, self.seconds + seconds)

    def _graded(self, group: Running) -> Graded:
        rules = group.rules
        endings = [
            Ending(index, rules.state(index), len(answer.token_ids), answer.truncated, rules.end_step(index))
            for index, answer in group.answers.items()
        ]
        answers = [group.answers[index] for index in conclude(self.arm.plan, endings).selected]
        rewards = [self.learner.reward(group.problem, answer) for answer in answers]
        if self.arm.most_different:
            places = most_different(answers, rewards, GROUP_SIZE)
            answers, rewards = [answers[place] for place in places], [rewards[place] for place in places]
        return Graded(group.problem, group.prompt_ids, answers, rewards, group.stopped * self.arm.stopped_teach)

    def _launch(self) -> None:
        feed, plan = self.feed, self.arm.plan
        if self.arm.in_batches and (feed.running or feed.complete):
            return
        if self.rounds is None:
            most = BATCH if self.arm.in_batches else feed.capacity
            num = min(most, feed.capacity, (SLOTS - self.rollouts.num_running) // plan.num_candidates)
            numbers = [feed.admit() for _ in range(num)]
        elif feed.capacity >= BATCH:
            plan, numbers = self.rounds.begin()
            feed.running |= dict.fromkeys(numbers, feed.version)  # more than a feed admits, and a batch returns
        else:
            return
        asked = [self._start(number, plan) for number in numbers]
        if asked:
            self.rollouts.launch(asked)

    def _start(self, number: int, plan: GroupPlan) -> Asked:
        problem, prompt_ids = self.learner.problem(number)
        self.groups[number] = Running(problem, prompt_ids, Group(plan.terms), self.num_steps)
        for _ in range(plan.num_candidates):
            self.groups[number].rules.launch()
        return Asked(number, prompt_ids, plan.num_candidates)

    def _roll_out(self) -> None:
        """Run a step of the engine, and let the rules decide on the groups of answers that ended."""
        size = self.rollouts.num_running, self.rollouts.num_context
        seconds = self.clock.rollout_s(*size)
        self.totals.update({"generated": size[0], "rollout_s": seconds, "work_s": self.clock.work_s(*size)})
        self.seconds += seconds
        self.num_steps += 1
        changed = set[int]()
        for answer in self.rollouts.step():
            group = self.groups[answer.name.group]
            group.answers[answer.name.index] = answer
            group.rules.end(answer.name.index, "length" if answer.truncated else "stop", len(answer.token_ids))
            changed.add(answer.name.group)
        stopped = [Name(number, index) for number in changed for index in self.groups[number].rules.settle().stop]
        if self.arm.plan.patience is not None:
            stopped += [Name(number, index) for number in self.feed.running for index in self._too_long(number)]
        if self.arm.prunes:
            stopped += [name for number in self.feed.running for name in self._prune(number)]
        for answer in self.rollouts.stop(stopped) if stopped else ():
            self.groups[answer.name.group].stopped.append(answer)
            changed.add(answer.name.group)
        for number in changed:
            if self.groups[number].rules.over:
                if self.rounds is None or self.rounds.returns(number):
                    self.feed.completed(number)
                else:
                    self._give_up(number)
        for number in self.rounds.cut() if self.rounds else ():
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        """End a group that runs again in another round."""
        self.feed.gave_up(number)
        self._stop_groups([number])

    def _stop_groups(self, numbers: Sequence[int]) -> None:
        stopped = [(number, self.groups.pop(number)) for number in numbers]
        self.rollouts.stop([Name(number, index) for number, group in stopped for index in group.rules.running])

    def _too_long(self, number: int) -> list[int]:
        group = self.groups[number]
        return group.rules.too_long(dict.fromkeys(group.rules.running, self.num_steps - group.started))

    def _prune(self, number: int) -> list[Name]:
        """Prune a group whose candidates have DETECTION_LENGTH tokens."""
        group = self.groups[number]
        names = [Name(number, index) for index in group.rules.running]
        if self.num_steps - group.started != DETECTION_LENGTH or not names:
            return []
        pruned = self.learner.prune(self.rollouts, names, max(0, GROUP_SIZE - group.rules.num_finished))
        group.rules.rule_out([name.index for name in pruned], "pruned")
        return [*pruned, *(Name(number, index) for index in group.rules.settle().stop)]

    def _learn(self, batch: Batch) -> dict[str, Any]:
        values = self.learner.learn(batch.groups, truncates=self.arm.truncates)
        self.num_updates += 1
        ages = [each.staleness for each in batch.taken]
        answers = [answer for group in batch.groups for answer in group.answers]
        versions = [version for answer in answers for version in answer.versions]
        return {
            "kind": "step",
            "step": self.num_updates,
            "seconds": batch.ends,
            **self.totals,
            "staleness": fmean(ages),
            "max_staleness": max(ages),
            "token_staleness": self.feed.version - fmean(versions),
            "length": fmean(len(answer.token_ids) for answer in answers),
            "longest": max(len(answer.token_ids) for answer in answers),
            "reward": fmean(reward for group in batch.groups for reward in group.rewards),
            **values,
        }

    def _update(self) -> None:
        """Give the rollouts the newest weights. The rule of feeds may drop groups."""
        recomputed = self.rollouts.num_context if self.arm.recompute else 0
        self.totals["recomputed"] += recomputed
        self.seconds += self.clock.update_s(recomputed)
        self.learner.give_weights(self.rollouts, recompute=self.arm.recompute)
        self.has_new_weights = False
        expired = self.feed.updated()
        self._stop_groups(expired)
        self.totals["dropped"] += len(expired)

    def _evaluations(self, until: float, limit_s: float) -> Iterator[dict[str, Any]]:
        """Evaluations at the moments up to `until`, in seconds."""
        while self.num_evaluations < len(MOMENTS) and (moment := MOMENTS[self.num_evaluations] * limit_s) <= until:
            if self.evaluated[0] != self.num_updates:
                self.evaluated = self.num_updates, self.learner.evaluate()
            self.num_evaluations += 1
            line = {"kind": "evaluation", "step": self.num_updates, "seconds": moment}
            yield {**line, **self.totals, **self.evaluated[1]}
