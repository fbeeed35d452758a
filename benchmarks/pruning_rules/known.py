"""What choices of the rules are measured by, where the truth is known exactly.

A prompt's success rate is drawn from a beta distribution; its 16 candidates succeed with it; the score of a candidate
is normal around +-d/2 by its label, d set by the AUC. The probability of success given the score is then known exactly.

arrival      the balance rule, given these probabilities, when siblings come due one by one, four by four or all at once
calibration  error of calibrated probabilities by number of labels, the paper's with and without spreading labels over
             bins, and ours (more of it: benchmarks/calibration.py)
labels       candidates are pruned by what was learned from survivors; labels weighted by 1 / survival, or not.
             Selection by a score leaves P(success | that score) alone; it distorts what is conditioned on anything
             else: the success rate, the AUC, the other signal, and the score itself once siblings decide too

Invariant: means and standard errors are over seeds; all rules and weights of a case see the same streams.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from rich.progress import track

from benchmarks.common import with_error
from vllm_rollout.config import CALIBRATION_WINDOW
from vllm_rollout.group.calibration import CALIBRATION_SPREAD, Calibrator
from vllm_rollout.group.learning import REPORT_WINDOW, Learning, Siblings
from vllm_rollout.group.pruning import Point, compress, group_rule
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.survivors import choose_survivors
from vllm_rollout.group.types import Confidence, Observation

GROUP_SIZE = 16
CONFIDENCE_AUC = 0.7
CONCENTRATION = 3.0
"""Of the beta distribution of prompts' success rates: at a mean of 0.5 their standard deviation is 0.25."""
SPREADS = (0, 3, CALIBRATION_SPREAD, 15)
"""Of the paper's calibration, which has 0."""
PLAN = PruningPlan(detection_length=1, allow_fewer=True)
NORMAL = NormalDist()


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


def arrival_rows(num_groups: int, num_seeds: int) -> list[dict[str, Any]]:
    cases = [
        (world, batch_size, min_balanced)
        for world in (World(0.89, 0.3), World(0.89, 0.14), World(0.65, 0.5))
        for batch_size in (1, 4, 16)
        for min_balanced in (2.0, 4.0, 8.0, 16.0)
    ]
    rows = []
    for world, batch_size, min_balanced in track(cases, "arrival, by batch size"):
        survival = in_group(world, min_balanced)
        found = [survivors_of(world, survival, num_groups, seed, batch_size) for seed in range(num_seeds)]
        rows.append({**asdict(world), "batch_size": batch_size, "min_balanced": min_balanced, **over_seeds(found)})
    return rows


def over_seeds(found: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Of dataclasses with numbers, field by field."""
    return {field.name: with_error([getattr(each, field.name) for each in found]) for field in fields(found[0])}


def calibration_rows(num_seeds: int, num_probes: int = 1000) -> list[dict[str, Any]]:
    """Root mean square error of q over candidates."""
    rows = []
    for world in track(
        [World(auc, rate) for auc in (0.89, 0.65) for rate in (0.1, 0.5)], "calibration, by AUC and rate"
    ):
        for num_labels in (128, 512, CALIBRATION_WINDOW):
            for method, spread in (*(("paper", each) for each in SPREADS), ("combined", CALIBRATION_SPREAD)):
                errors = []
                for seed in range(num_seeds):
                    rng = random.Random(seed)
                    calibrator = Calibrator(spread=spread, method=method)
                    for score, positive in _labelled(world, rng, num_labels):
                        calibrator.observe(score)
                        calibrator.add(score, positive)
                    squares = [
                        (calibrator.success_probability(score) - world.success_probability(score)) ** 2
                        for score, _ in _labelled(world, rng, num_probes)
                    ]
                    errors.append(math.sqrt(fmean(squares)))
                row = {"num_labels": num_labels, "method": method, "spread": spread}
                rows.append(asdict(world) | row | {"error": with_error(errors)})
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
    the middle of what the window has of the stream: it lags behind a drift whatever its labels weigh.
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
        assessments = learning.assess(plan, observations, Siblings(seed, str(g), at_least=0))
        for i, assessment in assessments.items():
            if not assessment.keep:
                continue
            learning.reward(observations[i], assessment, 1, group.positives[i], str(g), active=weighted)
            if g >= num_groups * 7 // 8:
                num_kept += 1
                num_positive += group.positives[i]
    num_labels = num_groups * GROUP_SIZE * plan.keep_ratio
    then, reported = (worlds(1 - min(1.0, w / num_labels) / 2) for w in (CALIBRATION_WINDOW, REPORT_WINDOW))
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
    "rate 0.3": lambda passed: World(0.89, 0.3),
    "rate 0.7": lambda passed: World(0.89, 0.7),
    "rate 0.1 -> 0.6": lambda passed: World(0.89, 0.1 + 0.5 * passed),
    "rate 0.6 -> 0.1": lambda passed: World(0.89, 0.6 - 0.5 * passed),
}


def labels_rows(num_groups: int, num_seeds: int) -> list[dict[str, Any]]:
    cases = [
        (name, rule, weighted) for name in STREAMS for rule in ("gradient", "balance") for weighted in (False, True)
    ]
    rows = []
    for name, rule, weighted in track(cases, "labels of survivors, by stream"):
        plan = replace(PLAN, rule=rule)
        found = [stream(STREAMS[name], plan, weighted, num_groups, seed) for seed in range(num_seeds)]
        rows.append({"stream": name, "rule": rule, "weighted": weighted, **over_seeds(found)})
    return rows
