"""Runs of candidates -> the numbers of `benchmarks.pruning`. Invariant: pure; unknown values stay None.

A signal's score is compared only with rewards that came after it. Intervals are bootstrapped over prompts, because
siblings of one prompt are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.common import median_of_known
from benchmarks.pruning.records import SCORES, Record, Run, Score, difference, group_by, mean, share
from vllm_rollout.parts.pruning.rules.report import Prediction, auc, brier, reliability_bins, within_group_auc

NUM_DRAWS = 1000
"""Number of draws of a bootstrap."""
INTERVAL_PERCENT = 90.0


def labelled(records: Iterable[Record], score: Score) -> list[Record]:
    """The records that have a reward and this score."""
    return [record for record in records if record.correct is not None and record.score_of(score) is not None]


def predictions(records: Iterable[Record], score: Score) -> list[Prediction]:
    return [prediction(record, record.score_of(score)) for record in labelled(records, score)]


def prediction(record: Record, score: float) -> Prediction:
    return Prediction(score, record.success_probability, bool(record.correct), 1.0, record.prompt_id)


def overview(records: Sequence[Record]) -> dict[str, Any]:
    """Counts, success rate and lengths of candidates that ran to their end."""
    ended = [record for record in records if record.correct is not None]
    groups = correct_by_prompt(ended)
    return {
        "num_prompts": len(groups),
        "num_candidates": len(ended),
        "num_scored": len(labelled(ended, "bottom_windows")),
        "success_rate": mean(float(record.correct) for record in ended),
        "share_of_mixed_groups": mean(float(0 < sum(group) < len(group)) for group in groups.values()),
        "mean_tokens": mean(record.num_tokens for record in ended),
        "share_truncated": mean(float(record.truncated) for record in ended),
    }


def learning_curve(records: Sequence[Record], window: int) -> list[dict[str, Any]]:
    """AUC of each signal by windows of labels, in the order in which rewards were posted.

    `num_labels_before`: the most labels that the head had learned from when the window began.
    """
    scored = labelled(records, "bottom_windows")
    starts = list(range(0, len(scored), window))
    if len(starts) > 1 and len(scored) - starts[-1] < window / 2:
        starts.pop()  # the rest joins the window before
    rows = []
    for start, end in pairwise([*starts, len(scored)]):
        here = scored[start:end]
        head = labelled(here, "head")
        rows.append(
            {
                "num_labels_before": start,
                "num_labels": len(here),
                "num_with_head": len(head),
                "head_version": max((record.head_version or 0 for record in head), default=0),
                "success_rate": mean(float(record.correct) for record in here),
                "auc": {score: auc(predictions(here, score)) for score in SCORES},
                "within_group_auc": {score: within_group_auc(predictions(here, score)) for score in SCORES},
            }
        )
    return rows


def discrimination(records: Sequence[Record], seed: int = 0) -> dict[str, Any]:
    """AUC of every signal, overall and within groups, on the candidates that the head scored, with intervals.

    `head_above`: the head's value minus that of an aggregate, on the same draws.
    """
    common = labelled(records, "head")
    draws = {score: Draws(common, partial(Record.score_of, score=score)) for score in SCORES}
    values = {
        "auc": {score: auc(predictions(common, score)) for score in SCORES},
        "within_group_auc": {score: within_group_auc(predictions(common, score)) for score in SCORES},
    }
    result: dict[str, Any] = {"num_candidates": len(common)}
    for measure, by_score in values.items():
        drawn = {score: getattr(draws[score], measure)(seed) for score in SCORES}
        result[measure] = {score: {"value": by_score[score], "interval": interval(drawn[score])} for score in SCORES}
        result[f"{measure}_head_above"] = {
            score: {
                "value": difference(by_score["head"], by_score[score]),
                "interval": interval(drawn["head"] - drawn[score]),
            }
            for score in SCORES
            if score != "head"
        }
    return result


class Draws:
    """A signal's AUC over bootstrap draws of prompts. All records have a score."""

    def __init__(self, records: Sequence[Record], score_of: Callable[[Record], float | None]) -> None:
        names = sorted({record.prompt_id for record in records})
        number = {name: position for position, name in enumerate(names)}
        self._num_prompts = len(names)
        self._prompt = np.array([number[record.prompt_id] for record in records], int)
        self._positive = np.array([bool(record.correct) for record in records], bool)
        scores = np.array([score_of(record) for record in records], float)
        self._level = np.unique(scores, return_inverse=True)[1] if len(scores) else np.zeros(0, int)
        by_prompt = group_by(records, lambda record: record.prompt_id)
        within = [auc([prediction(record, score_of(record)) for record in by_prompt[name]]) for name in names]
        self._within = np.array([np.nan if value is None else value for value in within], float)

    def auc(self, seed: int) -> np.ndarray:
        return np.array([self._auc(counts) for counts in self._counts(seed)])

    def within_group_auc(self, seed: int) -> np.ndarray:
        known = ~np.isnan(self._within)
        counts = np.array(list(self._counts(seed))).reshape(NUM_DRAWS, -1)[:, known]
        total = counts.sum(axis=1)
        with np.errstate(invalid="ignore"):
            return (counts * self._within[known]).sum(axis=1) / np.where(total > 0, total, np.nan)

    def _counts(self, seed: int) -> Iterable[np.ndarray]:
        """Times that each prompt was drawn, [num_prompts], for each draw."""
        generator = np.random.default_rng(seed)
        for _ in range(NUM_DRAWS):
            drawn = generator.integers(0, max(1, self._num_prompts), self._num_prompts)
            yield np.bincount(drawn, minlength=self._num_prompts)

    def _auc(self, counts: np.ndarray) -> float:
        weight = counts[self._prompt].astype(float)
        positive = np.bincount(self._level, weight * self._positive)
        negative = np.bincount(self._level, weight * ~self._positive)
        pairs = positive.sum() * negative.sum()
        below = np.cumsum(negative) - negative
        return float((positive * (below + negative / 2)).sum() / pairs) if pairs else np.nan


def calibration(records: Sequence[Record]) -> dict[str, Any]:
    """Accuracy and Brier score of the head's success probabilities. `always`: of a constant prediction."""
    here = [record for record in labelled(records, "head") if record.success_probability is not None]
    points = predictions(here, "head")
    rate = mean(float(record.correct) for record in here)
    return {
        "num_candidates": len(here),
        "accuracy_at_half": mean(float((r.success_probability > 0.5) == r.correct) for r in here),
        "accuracy_always": None if rate is None else max(rate, 1 - rate),
        "brier": brier(points),
        "brier_always": None if rate is None else rate * (1 - rate),
        "bins": [asdict(part) for part in reliability_bins(points)],
    }


Groups = Mapping[str, Sequence[bool]]
"""Correctness of the candidates that ran to their end, by prompt."""


def correct_by_prompt(records: Iterable[Record]) -> dict[str, list[bool]]:
    groups: dict[str, list[bool]] = {}
    for record in records:
        if record.correct is not None:
            groups.setdefault(record.prompt_id, []).append(record.correct)
    return groups


def survivors(groups: Groups) -> dict[str, Any]:
    """Positive ratios of groups' survivors (rho_hat, ARRoL 4.1), their spread, and the overall ratio."""
    ratios = [sum(group) / len(group) for group in groups.values()]
    everyone = [correct for group in groups.values() for correct in group]
    overall = mean(map(float, everyone))
    return {
        "num_groups": len(groups),
        "num_survivors": len(everyone),
        "mean_ratio": mean(ratios),
        "mean_ratio_product": mean(ratio * (1 - ratio) for ratio in ratios),
        "share_without_variance": mean(float(ratio in (0, 1)) for ratio in ratios),
        "overall_ratio": overall,
        "distance_from_half": None if overall is None else abs(overall - 0.5),
        "mean_distance_of_groups": mean(abs(ratio - 0.5) for ratio in ratios),
    }


def random_in_expectation(groups: Groups, keep_ratio: float) -> float | None:
    """Expectation of rho_hat (1 - rho_hat) if that share of each group is kept at random. It has no noise of a draw.

    Fewer survivors spread more: for n of N it is the group's own product times N (n - 1) / (n (N - 1)).
    """
    values = []
    for group in groups.values():
        num_all, num_kept = len(group), round(keep_ratio * len(group))
        if num_kept:
            ratio = sum(group) / num_all
            shrinkage = num_all * (num_kept - 1) / (num_kept * (num_all - 1)) if num_all > 1 else 1.0
            values.append(ratio * (1 - ratio) * shrinkage)
    return mean(values)


def compare_survivors(ways: Mapping[str, Groups], way: str, seed: int = 0) -> dict[str, Any]:
    """`way` minus each other way, with intervals. The same prompts are drawn for both."""
    result = {}
    for other, groups in ways.items():
        if other == way:
            continue
        names = sorted(ways[way].keys() & groups.keys())
        generator = np.random.default_rng(seed)
        fields = ("mean_ratio", "mean_ratio_product", "share_without_variance", "distance_from_half")
        fields += ("mean_distance_of_groups",)
        drawn: dict[str, list[float]] = {field: [] for field in fields}
        for _ in range(NUM_DRAWS if names else 0):
            picked = generator.integers(0, len(names), len(names))
            ours, theirs = (
                survivors({str(position): side[names[pick]] for position, pick in enumerate(picked)})
                for side in (ways[way], groups)
            )
            for field in fields:
                drawn[field].append(ours[field] - theirs[field])
        ours, theirs = survivors(ways[way]), survivors(groups)
        result[other] = {
            field: {"value": difference(ours[field], theirs[field]), "interval": interval(np.array(drawn[field]))}
            for field in fields
        }
    return result


def speed(runs: Sequence[Run], ways: Sequence[str], baseline: str) -> dict[str, Any]:
    """Medians over blocks of wall time, tokens and throughput, and of their ratios to the baseline within a block."""
    by_way = {way: {run.key[1]: run for run in runs if run.key[0] == way} for way in ways}
    rows = {}
    for way, mine in by_way.items():
        pairs = [(mine[block], by_way[baseline][block]) for block in mine if block in by_way[baseline]]
        rows[way] = {
            "num_blocks": len(mine),
            "wall_s": [round(run.wall_s, 3) for run in mine.values()],
            "median_wall_s": median_of_known(run.wall_s for run in mine.values()),
            "generated_tokens": sum(run.generated_tokens for run in mine.values()),
            "num_scored": sum(run.num_scored for run in mine.values()),
            "num_pruned": sum(run.num_pruned for run in mine.values()),
            "median_tokens_per_s": median_of_known(run.generated_tokens / run.wall_s for run in mine.values()),
            "speed_ratio": median_of_known(base.wall_s / run.wall_s for run, base in pairs),
            "total_speed_ratio": share(sum(base.wall_s for _, base in pairs), sum(run.wall_s for run, _ in pairs)),
            "tokens_ratio": median_of_known(base.generated_tokens / run.generated_tokens for run, base in pairs),
            "throughput_ratio": median_of_known(
                run.generated_tokens / run.wall_s / (base.generated_tokens / base.wall_s) for run, base in pairs
            ),
        }
    return rows


def interval(values: np.ndarray) -> list[float] | None:
    """The middle `INTERVAL_PERCENT` of bootstrap values, or None if there are too few."""
    known = values[~np.isnan(values)]
    if len(known) < NUM_DRAWS / 2:
        return None
    tail = (100 - INTERVAL_PERCENT) / 2
    return [float(value) for value in np.percentile(known, [tail, 100 - tail])]
