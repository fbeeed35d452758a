"""Which candidates pruning keeps, on synthetic scores whose truth is known: no model, no engine.

A prompt's success rate is drawn from a beta distribution; its 16 candidates succeed with it; the score of a candidate
is normal around +-d/2 by its label, d set by the AUC. The probability of success given the score is then known exactly.

rules        survivors by rule and success rate, every rule given the exact probabilities
arrival      the group-aware rule when siblings come due one by one, four by four or all at once
calibration  error of calibrated probabilities by number of labels, with and without spreading labels over bins
stream       candidates are pruned by what was learned from survivors; labels weighted by 1 / survival, or not.
             Selection by a score leaves P(success | that score) alone; it distorts what is conditioned on anything
             else: the success rate, the AUC, the other signal, and the score itself once siblings decide too

Run from the repository root: python -m benchmarks.pruning_rules
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks.common import record_of_run, write_json
from vllm_rollout.config import CALIBRATION_WINDOW
from vllm_rollout.group.calibration import CALIBRATION_SPREAD, Calibrator
from vllm_rollout.group.learning import REPORT_WINDOW, Learning
from vllm_rollout.group.pruning import (
    MIN_BALANCED,
    Point,
    choose_survivors,
    compress,
    group_rule,
    solve_balance,
    solve_paper,
)
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.types import Confidence, Observation

GROUP_SIZE = 16
AUCS = (0.89, 0.65)
SUCCESS_RATES = (0.05, 0.14, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.86, 0.95)
CONFIDENCE_AUC = 0.7
CONCENTRATION = 3.0
"""Of the beta distribution of prompts' success rates: at a mean of 0.5 their standard deviation is 0.25."""
PLAN = PruningPlan(detection_length=1, allow_fewer=True)
NORMAL = NormalDist()

Rule = Literal["none", "random", "paper", "paper_reversed", "balance", "balance_group"]
RULES: tuple[Rule, ...] = ("none", "random", "paper", "paper_reversed", "balance", "balance_group")


class Group(NamedTuple):
    positives: list[bool]
    scores: list[float]


@dataclass(frozen=True, slots=True)
class World:
    """Scores of a head with this AUC where success has this rate."""

    auc: float
    rate: float

    @property
    def distance(self) -> float:
        return math.sqrt(2) * NORMAL.inv_cdf(self.auc)

    def success_probability(self, score: float) -> float:
        odds = self.rate / (1 - self.rate) * math.exp(self.distance * score)
        return odds / (1 + odds)

    def population(self) -> list[Point]:
        half = self.distance / 2
        scores = [step / 40 for step in range(-240, 241)]
        return [
            (
                self.success_probability(x),
                self.rate * NORMAL.pdf(x - half) + (1 - self.rate) * NORMAL.pdf(x + half),
            )
            for x in scores
        ]

    def score(self, rng: random.Random, positive: bool) -> float:
        return rng.gauss(self.distance * (positive - 0.5), 1)

    def group(self, rng: random.Random, concentration: float = CONCENTRATION) -> Group:
        rate = rng.betavariate(self.rate * concentration, (1 - self.rate) * concentration)
        positives = [rng.random() < rate for _ in range(GROUP_SIZE)]
        return Group(positives, [self.score(rng, positive) for positive in positives])


@dataclass(frozen=True, slots=True)
class Survivors:
    """What a rule keeps."""

    keep_ratio: float
    positive_ratio: float
    """Of all survivors."""
    reward_variance: float
    """E[rho (1 - rho)] of a group's survivors, the mean over groups; a group without survivors counts 0."""


Survival = Callable[[Sequence[float], Sequence[tuple[float, bool]]], list[float]]
"""(q of the batch, (q, kept) of earlier siblings) -> survival probabilities."""


def survival_of(rule: Rule, world: World) -> Survival:
    population = world.population()
    if rule == "none":
        return lambda batch, earlier: [1.0] * len(batch)
    if rule == "random":
        return lambda batch, earlier: [PLAN.keep_ratio] * len(batch)
    if rule == "balance_group":
        return in_group(world, MIN_BALANCED)
    if rule == "balance":
        solved = solve_balance(population, PLAN)
    else:
        solved = solve_paper(population, replace(PLAN, strength=PLAN.strength * (1 if rule == "paper" else -1)))
    return lambda batch, earlier: [solved.survival(q) for q in batch]


def in_group(world: World, min_balanced: float) -> Survival:
    population = compress(world.population())

    def survival(batch: Sequence[float], earlier: Sequence[tuple[float, bool]]) -> list[float]:
        rule = group_rule(batch, earlier, population, PLAN, min_balanced)
        return [rule.survival(q) for q in batch]

    return survival


def survivors_of(world: World, survival: Survival, num_groups: int, seed: int, batch_size: int) -> Survivors:
    """The same groups for every rule of a world, and the same chance."""
    rng = random.Random(seed)
    num_kept = num_positive = 0
    variances = []
    for g in range(num_groups):
        group = world.group(rng)
        qs = [world.success_probability(score) for score in group.scores]
        decided: list[tuple[float, bool]] = []
        kept: list[int] = []
        for start in range(0, GROUP_SIZE, batch_size):
            batch = range(start, start + batch_size)
            wanted = dict(zip(batch, survival([qs[i] for i in batch], decided), strict=True))
            chosen = choose_survivors(wanted, seed=seed, group=str(g)).kept
            decided += [(qs[i], i in chosen) for i in batch]
            kept += chosen
        positives = sum(group.positives[i] for i in kept)
        num_kept += len(kept)
        num_positive += positives
        ratio = positives / len(kept) if kept else 0.0
        variances.append(ratio * (1 - ratio))
    return Survivors(num_kept / (num_groups * GROUP_SIZE), num_positive / num_kept, fmean(variances))


def rules_rows(num_groups: int, seed: int) -> list[dict[str, Any]]:
    worlds = [World(auc, rate) for auc in AUCS for rate in SUCCESS_RATES]
    return [
        asdict(world)
        | {rule: asdict(survivors_of(world, survival_of(rule, world), num_groups, seed, GROUP_SIZE)) for rule in RULES}
        for world in track(worlds, "rules, by AUC and success rate")
    ]


def arrival_rows(num_groups: int, seed: int) -> list[dict[str, Any]]:
    cases = [
        (world, batch_size, min_balanced)
        for world in (World(0.89, 0.3), World(0.89, 0.14), World(0.65, 0.5))
        for batch_size in (1, 4, 16)
        for min_balanced in (2.0, 4.0, 8.0, 16.0)
    ]
    return [
        asdict(world)
        | {"batch_size": batch_size, "min_balanced": min_balanced}
        | asdict(survivors_of(world, in_group(world, min_balanced), num_groups, seed, batch_size))
        for world, batch_size, min_balanced in track(cases, "arrival, by batch size")
    ]


def calibration_rows(seed: int, num_repetitions: int = 8, num_probes: int = 1000) -> list[dict[str, Any]]:
    """Root mean square error of q over candidates."""
    rows = []
    for world in track([World(auc, rate) for auc in AUCS for rate in (0.1, 0.5)], "calibration, by AUC and rate"):
        for num_labels in (128, 512, CALIBRATION_WINDOW):
            for spread in (0, 3, CALIBRATION_SPREAD, 15):
                squares = []
                for repetition in range(num_repetitions):
                    rng = random.Random(f"{seed} {repetition}")
                    calibrator = Calibrator(spread=spread)
                    for score, positive in _labelled(world, rng, num_labels):
                        calibrator.add(score, positive)
                    squares += [
                        (calibrator.success_probability(score) - world.success_probability(score)) ** 2
                        for score, _ in _labelled(world, rng, num_probes)
                    ]
                rows.append(
                    asdict(world) | {"num_labels": num_labels, "spread": spread, "error": math.sqrt(fmean(squares))}
                )
    return rows


def _labelled(world: World, rng: random.Random, count: int) -> Iterator[tuple[float, bool]]:
    for _ in range(count):
        positive = rng.random() < world.rate
        yield world.score(rng, positive), positive


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What is believed at the end of a stream, less the truth; probabilities over all candidates, pruned ones too."""

    head_error: float
    """Root mean square of q - truth."""
    head_bias: float
    confidence_error: float
    """The same for the signal that was not pruned by."""
    confidence_bias: float
    success_rate_bias: float
    auc_bias: float
    survivors_positive_ratio: float
    """True, of the last eighth."""


def stream(
    worlds: Callable[[float], World], plan: PruningPlan, weighted: bool, num_groups: int, seed: int
) -> StreamEnd:
    """Prune by the head's score, as it was learned from survivors; confidence is a worse score that is only watched.

    `worlds` maps the share of the stream that has passed to its truth. What is believed is compared with the truth in
    the middle of the window it comes from: a window lags behind a drift whatever its labels weigh.
    """
    rng = random.Random(seed)
    learning = Learning(plan.detection_length)
    num_kept = num_positive = 0
    for g in range(num_groups):
        world = worlds(g / num_groups)
        group = world.group(rng)
        observations = {
            i: Observation(Confidence(0.0, 0.0, _confident(world).score(rng, positive)), score, 1)
            for i, (score, positive) in enumerate(zip(group.scores, group.positives, strict=True))
        }
        assessments = learning.assess(plan, observations, {}, seed=seed, group=str(g), at_least=0)
        for i, assessment in assessments.items():
            if not assessment.keep:
                continue
            learning.reward(observations[i], assessment, 1, group.positives[i], str(g), active=weighted)
            if g >= num_groups * 7 // 8:
                num_kept += 1
                num_positive += group.positives[i]
    labels_per_group = GROUP_SIZE * plan.keep_ratio
    then = worlds(1 - CALIBRATION_WINDOW / 2 / labels_per_group / num_groups)
    reported = worlds(1 - REPORT_WINDOW / 2 / labels_per_group / num_groups)
    report = learning.report()
    success_rate = (report.active if weighted else report.shadow).positive_ratio
    head = _deviations(then, learning.calibrators["head"], seed)
    confidence = _deviations(_confident(then), learning.calibrators["confidence"], seed)
    return StreamEnd(
        head_error=math.sqrt(fmean(d * d for d in head)),
        head_bias=fmean(head),
        confidence_error=math.sqrt(fmean(d * d for d in confidence)),
        confidence_bias=fmean(confidence),
        success_rate_bias=success_rate - reported.rate,
        auc_bias=report.signals["head"].auc - reported.auc,
        survivors_positive_ratio=num_positive / num_kept,
    )


def _confident(world: World) -> World:
    return replace(world, auc=CONFIDENCE_AUC)


def _deviations(world: World, calibrator: Calibrator, seed: int, num_probes: int = 4000) -> list[float]:
    rng = random.Random(f"probe {seed}")
    return [
        calibrator.success_probability(score) - world.success_probability(score)
        for score, _ in _labelled(world, rng, num_probes)
    ]


STREAMS: Mapping[str, Callable[[float], World]] = {
    "rate 0.2": lambda passed: World(0.89, 0.2),
    "rate 0.3": lambda passed: World(0.89, 0.3),
    "rate 0.7": lambda passed: World(0.89, 0.7),
    "rate 0.1 -> 0.6": lambda passed: World(0.89, 0.1 + 0.5 * passed),
    "rate 0.6 -> 0.1": lambda passed: World(0.89, 0.6 - 0.5 * passed),
}


def stream_rows(num_groups: int, seed: int) -> list[dict[str, Any]]:
    cases = [(name, rule, weighted) for name in STREAMS for rule in ("balance", "paper") for weighted in (False, True)]
    return [
        {"stream": name, "rule": rule, "weighted": weighted}
        | asdict(stream(STREAMS[name], replace(PLAN, rule=rule), weighted, num_groups, seed))
        for name, rule, weighted in track(cases, "streams")
    ]


def rules_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: success rate among survivors / E[rho (1 - rho)]."""
    header = ["AUC", "rate", *(rule.replace("_", " ") for rule in RULES)]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [f"{row[rule]['positive_ratio']:.2f} / {row[rule]['reward_variance']:.3f}" for rule in RULES]
        lines.append("| " + " | ".join([f"{row['auc']:.2f}", f"{row['rate']:.2f}", *cells]) + " |")
    return "\n".join(lines)


def plain_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of flat rows; fractions with three digits."""
    header = list(rows[0])
    lines = ["| " + " | ".join(name.replace("_", " ") for name in header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000, help="groups per cell (default 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/pruning_rules.json"))
    args = parser.parse_args()

    record = record_of_run(
        seed=args.seed,
        workload={
            "groups": f"{args.groups} of {GROUP_SIZE} per cell; success rates of prompts beta, concentration "
            f"{CONCENTRATION}; standard error of E[rho (1 - rho)] about {0.09 / math.sqrt(args.groups):.4f}",
            "plan": asdict(PLAN),
        },
    )
    record["rules"] = rules_rows(args.groups, args.seed)
    record["arrival"] = arrival_rows(args.groups, args.seed)
    record["calibration"] = calibration_rows(args.seed)
    record["stream"] = stream_rows(args.groups // 2, args.seed)
    write_json(args.output, record)
    print(rules_table(record["rules"]))
    for part in ("arrival", "calibration", "stream"):
        print(f"\n{part}\n\n{plain_table(record[part])}")
    Console().print(f"written to {args.output}")


if __name__ == "__main__":
    main()
