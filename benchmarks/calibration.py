"""How right calibrated scores are, on synthetic ones whose truth is known: no model, no engine.

swap      a head is put whose logits are those of the one before, times a factor and moved: AUC of q less that of the
          score, and mean q less the success rate, by how many scores of the new head there have been
labels    error of q by number of labels and by how success depends on the score

Ways: `paper` is ARRoL A.4, `spread` the same with labels that count in neighbouring bins too, `combined` ours. Numbers
are means over seeds, each with the standard deviation between seeds.

Run from the repository root: python -m benchmarks.calibration
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

from rich.progress import track

from benchmarks.common import arguments_of, publish, record_of_run
from benchmarks.tables import Row, grid
from vllm_rollout.config import CALIBRATION_WINDOW
from vllm_rollout.group.judging.calibration import Calibrator
from vllm_rollout.group.judging.report import Prediction, auc

Way = Literal["paper", "spread", "combined"]
WAYS: Mapping[Way, dict[str, Any]] = {
    "paper": {"method": "paper", "spread": 0},
    "spread": {"method": "paper"},
    "combined": {},
}
"""Arguments of the calibrator."""

AUC = 0.85
RATES = (0.05, 0.3, 0.5)
CHANGES: Mapping[str, tuple[float, float]] = {
    "x 2": (2.0, 0.0),
    "x 3": (3.0, 0.0),
    "x 1/3": (1 / 3, 0.0),
    "+ 2": (1.0, 2.0),
    "x 3 + 2": (3.0, 2.0),
}
"""Factor and shift of the logits of the head that is put."""
NUM_NEW_SCORES = (3, 16, 32, 64, 128, 256)


class Head:
    """The logit is exact at factor 1: log odds of success, from a normal score of this AUC."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.distance = math.sqrt(2) * NormalDist().inv_cdf(AUC)

    def candidate(self, rng: random.Random) -> tuple[float, bool]:
        positive = rng.random() < self.rate
        score = rng.gauss(self.distance * (positive - 0.5), 1)
        return self.distance * score + math.log(self.rate / (1 - self.rate)), positive


def taught(way: Way, head: Head, rng: random.Random) -> Calibrator:
    """It has seen a window of labels of version 1."""
    calibrator = Calibrator(**WAYS[way])
    for _ in range(CALIBRATION_WINDOW):
        score, positive = head.candidate(rng)
        calibrator.observe(score, 1)
        calibrator.add(score, positive, 1.0, 1)
    return calibrator


def auc_of(values: Sequence[float], positives: Sequence[bool]) -> float:
    predictions = [Prediction(v, None, y, 1.0, "") for v, y in zip(values, positives, strict=True)]
    return auc(predictions) or 0.0


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(values), "deviation": stdev(values)}


def swap_rows(seeds: Sequence[int], num_probes: int = 1500) -> list[dict[str, Any]]:
    rows = []
    for rate in track(RATES, "swap, by success rate"):
        for way in ("spread", "combined"):
            found: dict[tuple[str, int], list[tuple[float, float]]] = {}
            for seed in seeds:
                head = Head(rate)
                state = taught(way, head, random.Random(seed)).to_state()
                for change, (factor, shift) in CHANGES.items():
                    rng = random.Random(f"{seed} {change}")
                    probes = [head.candidate(rng) for _ in range(num_probes)]
                    positives = [positive for _, positive in probes]
                    best = auc_of([score for score, _ in probes], positives)
                    after = Calibrator.from_state(state, **WAYS[way])
                    num_seen = 0
                    for count in NUM_NEW_SCORES if way == "combined" else (3,):  # the others look at no scores
                        for _ in range(count - num_seen):
                            after.observe(factor * head.candidate(rng)[0] + shift, 2)
                        num_seen = count
                        qs = [after.success_probability(factor * score + shift, 2) for score, _ in probes]
                        lost = auc_of(qs, positives) - best
                        found.setdefault((change, count), []).append((lost, fmean(qs) - rate))
            for (change, count), pairs in found.items():
                lost, bias = (over_seeds(values) for values in zip(*pairs, strict=True))
                rows.append(
                    {"rate": rate, "change": change, "way": way, "num_scores": count, "auc": lost, "mean_q": bias}
                )
    return rows


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-max(-50.0, min(50.0, x))))


Draw = Callable[[random.Random], float]
SHAPES: Mapping[str, tuple[Draw, Callable[[float], float]]] = {
    "normal": (lambda rng: rng.gauss(0, 1), lambda x: _sigmoid(1.7 * x - 0.8)),
    "normal, rare": (lambda rng: rng.gauss(0, 1), lambda x: _sigmoid(1.7 * x - 4.0)),
    "bimodal, flat": (lambda rng: rng.gauss(-2 if rng.random() < 0.6 else 2, 0.5), lambda x: 0.1 if x < 0 else 0.7),
    "heavy tails": (lambda rng: rng.gauss(0, 1) / math.sqrt(rng.expovariate(1)), lambda x: _sigmoid(x - 1)),
    "heavy tails, bounded": (
        lambda rng: rng.gauss(0, 1) / math.sqrt(rng.expovariate(1)),
        lambda x: 0.1 + 0.6 * _sigmoid(x),
    ),
    "skewed": (lambda rng: rng.expovariate(1), lambda x: _sigmoid(x - 2)),
    "hump": (lambda rng: rng.gauss(0, 1), lambda x: 0.05 + 0.6 * math.exp(-2 * x * x)),
    "valley": (lambda rng: rng.gauss(0, 1), lambda x: min(0.9, 0.1 + 0.25 * x * x)),
    "step": (lambda rng: rng.gauss(0, 1), lambda x: 0.05 if x < 0.5 else 0.6),
}
"""How scores are drawn, and the probability of success given the score."""


def labels_rows(seeds: Sequence[int], num_probes: int = 1000) -> list[dict[str, Any]]:
    """Root mean square error of q over candidates."""
    rows = []
    for shape, (draw, truth) in track(SHAPES.items(), "labels, by shape"):
        for num_labels in (64, 256, 1024, CALIBRATION_WINDOW):
            errors: dict[Way, list[float]] = {way: [] for way in WAYS}
            for seed in seeds:
                for way in WAYS:
                    rng, calibrator = random.Random(f"{seed} {shape}"), Calibrator(**WAYS[way])
                    for _ in range(num_labels):
                        score = draw(rng)
                        calibrator.observe(score)
                        calibrator.add(score, rng.random() < truth(score))
                    probes = [draw(rng) for _ in range(num_probes)]
                    squares = [(calibrator.success_probability(score) - truth(score)) ** 2 for score in probes]
                    errors[way].append(math.sqrt(fmean(squares)))
            rows.append(
                {"shape": shape, "num_labels": num_labels} | {way: over_seeds(found) for way, found in errors.items()}
            )
    return rows


def table(title: str, rows: Sequence[Row]) -> str:
    return grid(title, [name.replace("_", " ") for name in rows[0]], [[*map(_cell, row.values())] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['mean']:.3f} ± {value['deviation']:.3f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


PARTS: Mapping[str, Callable[[Sequence[int]], list[dict[str, Any]]]] = {
    "swap": swap_rows,
    "labels": labels_rows,
}


def main() -> None:
    arguments = arguments_of(__doc__, "calibration", repeats=20).parse_args()
    workload = {"seeds": arguments.repeats, "auc": AUC, "window": CALIBRATION_WINDOW}
    record = record_of_run(seed=arguments.seed, workload=workload)
    seeds = range(arguments.seed, arguments.seed + arguments.repeats)
    record |= {part: rows_of(seeds) for part, rows_of in PARTS.items()}
    publish(arguments, record, lambda its: "\n\n".join(table(part, its[part]) for part in PARTS))


if __name__ == "__main__":
    main()
