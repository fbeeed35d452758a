"""Which gradient of lengths rounds induce: a GRPO in which success does not ask for any length.

A candidate has two standard normal parts: z along the gradient of success, and y along that of length. It succeeds
where z lies above its prompt's threshold; its log length is the prompt's, plus `SIGMA` times (correlation z + the rest
of y). So E[(r - b) y] is 0 over all answers: whatever the returned ones have of it, selection has put there. Reported
are GRPO's estimates, the mean of A y over that of A z, with A = (r - mean) / std within returned groups; and the mean
of y, which is what a baseline that is not the group's own mean multiplies.

Rounds are as `group/rounds/rounds.py` says, of `PROMPTS` prompts that never come twice: a short one returns the groups
of which `GROUP_SIZE` candidates end first, with these; the queue's prompts are drawn again in a long round, or go on
(`resume`, `group/plans/resumption.py`). Steps are those of the longest returned answer, per round's worth of prompts.

Run from the repository root: python -m benchmarks.round_gradient

Invariant: the same numbers for the same seed, and no timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import arguments_of, publish, record_of_run
from benchmarks.tables import Row, columns, number
from vllm_rollout.group.rounds.rounds import speculated

PROMPTS, GROUP_SIZE, ROUNDS = 32, 8, 240
MEDIAN, SIGMA, BETWEEN = 500.0, 0.8, 0.8
"""Tokens; log deviations of lengths within and between prompts."""
RATE = (2.0, 2.0)
"""Beta distribution of the prompts' success rates."""
CORRELATIONS = (0.0, -0.3, -0.5)
"""Of success and log length within a prompt: wrong answers are longer."""
NORMAL = NormalDist()


class Setting(NamedTuple):
    prompts: float
    responses: float
    resume: bool = False


SETTINGS = (
    Setting(1.0, 1.0),
    Setting(1.25, 1.0, True),
    Setting(1.25, 1.0),
    Setting(1.1, 1.1),
    Setting(1.25, 1.25),
    Setting(1.25, 1.25, True),
    Setting(1.5, 1.5),
    Setting(1.0, 1.25),
    Setting(1.0, 2.0),
)


class Answers(NamedTuple):
    z: np.ndarray  # [num_prompts, num_candidates]
    y: np.ndarray  # [num_prompts, num_candidates]
    lengths: np.ndarray  # [num_prompts, num_candidates], tokens


class Prompts(NamedTuple):
    thresholds: np.ndarray  # [num_prompts], of z
    scales: np.ndarray  # [num_prompts], log tokens


@dataclass(slots=True)
class Returned:
    """Groups that came back, and what they took."""

    steps: float = 0.0
    groups: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    """Rewards, z and y, each [num_groups, GROUP_SIZE]."""

    def add(self, prompts: Prompts, answers: Answers) -> None:
        self.groups.append((answers.z > prompts.thresholds[:, None], answers.z, answers.y))

    def measured(self) -> dict[str, float]:
        rewards, z, y = (np.concatenate(each).astype(float) for each in zip(*self.groups, strict=True))
        centered = rewards - rewards.mean(1, keepdims=True)
        std = rewards.std(1, keepdims=True)
        advantages = np.divide(centered, std, out=np.zeros_like(centered), where=std > 0)
        success, length = (advantages * z).mean(), (advantages * y).mean()
        steps = self.steps * PROMPTS / len(rewards)
        return {"steps": steps, "success": success, "length": length / success, "mean_y": y.mean()}


def draw(rng: np.random.Generator, prompts: Prompts, num_candidates: int, correlation: float) -> Answers:
    z, y = rng.standard_normal((2, len(prompts.scales), num_candidates))
    logs = prompts.scales[:, None] + SIGMA * (correlation * z + math.sqrt(1 - correlation**2) * y)
    return Answers(z, y, np.exp(logs))


def take(chosen: np.ndarray, *each: np.ndarray) -> list[np.ndarray]:
    """Of each prompt its candidates of these indices: [num_prompts, num_chosen]."""
    return [np.take_along_axis(values, chosen, 1) for values in each]


def run(setting: Setting, correlation: float, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    returned = Returned()
    waiting: list[tuple[float, float, tuple[np.ndarray, ...]]] = []
    """Threshold, scale, and each deferred prompt's first candidates with the tokens that they still lack."""
    for _ in range(ROUNDS):
        if len(waiting) >= PROMPTS:
            queue, waiting = waiting[:PROMPTS], waiting[PROMPTS:]
            prompts = Prompts(np.array([each[0] for each in queue]), np.array([each[1] for each in queue]))
            answers = draw(rng, prompts, GROUP_SIZE, correlation)
            if setting.resume:
                answers = Answers(*(np.stack(parts) for parts in zip(*(each[2] for each in queue), strict=True)))
            returned.add(prompts, answers)
            returned.steps += answers.lengths.max()
            continue
        count = speculated(PROMPTS, setting.prompts)
        rates = np.clip(rng.beta(*RATE, count), 1e-6, 1 - 1e-6)
        thresholds = np.array([-NORMAL.inv_cdf(rate) for rate in rates])
        prompts = Prompts(thresholds, math.log(MEDIAN) + BETWEEN * rng.standard_normal(count))
        answers = draw(rng, prompts, speculated(GROUP_SIZE, setting.responses), correlation)
        chosen = np.argsort(answers.lengths, axis=1)[:, :GROUP_SIZE]
        first = Answers(*take(chosen, *answers))
        order = np.argsort(first.lengths.max(1))
        fast, slow = order[:PROMPTS], order[PROMPTS:]
        steps = first.lengths[fast].max()
        returned.steps += steps
        returned.add(Prompts(*(each[fast] for each in prompts)), Answers(*(each[fast] for each in first)))
        for each in slow:
            z, y, lengths = (values[each, :GROUP_SIZE] for values in answers)
            waiting.append((prompts.thresholds[each], prompts.scales[each], (z, y, np.maximum(lengths - steps, 0.0))))
    return returned.measured()


def row(setting: Setting, correlation: float, seeds: Sequence[int]) -> dict[str, Any]:
    runs = [run(setting, correlation, seed) for seed in seeds]
    means = {name: fmean(each[name] for each in runs) for name in runs[0]}
    error = stdev(each["length"] for each in runs) / math.sqrt(len(seeds))
    return {**setting._asdict(), "correlation": correlation, **means, "length_error": error}


def table(record: Row) -> str:
    def shown(name: str, digits: int) -> Callable[[Row], str]:
        return lambda row: number(row[name], digits)

    title = f"Rounds of {PROMPTS} x {GROUP_SIZE}: GRPO's gradient of length over that of success, means over seeds"
    return columns(title, record["rows"], {
        **{name: shown(name, 2) for name in ("correlation", "prompts", "responses")},
        "resume": lambda row: "yes" if row["resume"] else "no",
        "steps": shown("steps", 0),
        "length / success": shown("length", 3),
        "±": shown("length_error", 3),
        "success": shown("success", 3),
        "mean y": shown("mean_y", 3),
    })  # fmt: skip


def main() -> None:
    arguments = arguments_of(__doc__, "round_gradient", repeats=4).parse_args()
    workload = {
        "rounds": f"{ROUNDS} of {PROMPTS} x {GROUP_SIZE}, {arguments.repeats} seeds",
        "lengths": f"log-normal, median {MEDIAN:g}, {SIGMA} within and {BETWEEN} between prompts",
        "success_rates": f"beta{RATE}",
    }
    record = record_of_run(seed=arguments.seed, workload=workload)
    seeds = range(arguments.seed, arguments.seed + arguments.repeats)
    record["rows"] = [row(setting, each, seeds) for each in CORRELATIONS for setting in SETTINGS]
    publish(arguments, record, table)


if __name__ == "__main__":
    main()
