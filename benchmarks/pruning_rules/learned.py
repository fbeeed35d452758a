"""Streams of groups that are pruned by what their own rewards have taught: rows of the main table.

Groups come in steps; a step's rewards are posted when it is over, and teach what the next one is pruned by. The first
groups of a stream are left out: its cold start, and the window of labels before survivors fill it. Of the others is
measured what the trainer gets. A pruned candidate has generated `DETECTION_SHARE` of an answer, every other one a whole
answer, so that tokens are counted in answers.

Invariant: all ways of a world see the same groups, and a way learns from survivors' rewards only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.progress import track

from benchmarks.common import with_error
from benchmarks.toy_grpo import GROUP_SIZE, Groups, Pruned, World, moments, no_variance
from vllm_rollout.config import CALIBRATION_WINDOW
from vllm_rollout.group.advice import Advice, advise
from vllm_rollout.group.audit import draw_audit
from vllm_rollout.group.learning import Learning, Siblings
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.survivors import choose_survivors
from vllm_rollout.group.types import Assessment, Confidence, Observation

SUCCESS_RATES = (0.02, 0.1, 0.3, 0.5, 0.8)
AUCS = (0.5, 0.7, 0.85)
CONCENTRATIONS = (3.0, 20.0)
"""Of prompts' success rates: at a mean of 0.5 they differ by 0.25, or by 0.11 (standard deviations)."""
SHARE = 0.5
"""Correlation of success with the direction of the gradient."""
WORLDS = [World(SHARE, c, auc, rate) for c in CONCENTRATIONS for auc in AUCS for rate in SUCCESS_RATES]
QUICK_WORLDS = [World(SHARE, 3.0, 0.85, rate) for rate in (0.1, 0.5)]
GROUPS_PER_STEP = 16
NUM_GROUPS = 320
"""Measured, of each seed."""
DETECTION_SHARE = 1 / 8
"""Of a mean answer, generated when a candidate is scored."""
AUDIT_RATIO = 0.05
SHARPER = 2.0
"""By what a head's logits are multiplied when it is swapped."""
NO_CONFIDENCE = Confidence(float("nan"), float("nan"), float("nan"))
PLAN = PruningPlan(detection_length=1, allow_fewer=True)
MIN_LEARNING = round(CALIBRATION_WINDOW / PLAN.keep_ratio / GROUP_SIZE)
"""Groups whose survivors fill the window of labels."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a stream is pruned."""

    plan: PruningPlan | None = PLAN
    """None: by no score."""
    keep_ratio: float = PLAN.keep_ratio
    """Without a score."""
    group_size: int = GROUP_SIZE
    """Candidates that are launched, of which these are the first."""
    audit_ratio: float = 0.0
    swaps_head: bool = False
    """In front of the groups that are measured the head's version changes, and all of its logits."""


WAYS: Mapping[str, Way] = {
    "none": Way(None, 1.0),
    "fewer": Way(None, 1.0, group_size=round(PLAN.keep_ratio * GROUP_SIZE)),
    "random": Way(None),
    "paper": Way(replace(PLAN, rule="paper")),
    "balance": Way(replace(PLAN, rule="balance")),
    "gradient": Way(),
    "independent": Way(replace(PLAN, draw="independent")),
    "audits": Way(audit_ratio=AUDIT_RATIO),
    "swap": Way(swaps_head=True),
}
"""The last three are the gradient rule, the default, as "gradient" is."""


def num_learning(rate: float, min_groups: int) -> int:
    """Groups that are not measured: twice a cold start, and at least so many."""
    rarer = min(rate, 1 - rate) * GROUP_SIZE
    return max(min_groups, math.ceil(2 * PLAN.min_labels / rarer))


class Stream(NamedTuple):
    pruned: Pruned
    success: np.ndarray  # [num_groups, group_size], q as it was believed; NaN: by no score, or during a cold start
    advice: Advice | None = None
    """What the report advises when the stream is over."""


def stream(groups: Groups, way: Way, num_unmeasured: int, seed: int) -> Stream:
    """Prune groups in their order, and learn from what is left of them."""
    shape = groups.rewards.shape
    stream = Stream(Pruned(np.ones(shape, dtype=bool), np.ones(shape)), np.full(shape, np.nan))
    if way.plan is None:
        for g in range(shape[0] if way.keep_ratio < 1 else 0):
            chosen = choose_survivors(dict.fromkeys(range(shape[1]), way.keep_ratio), seed=seed, group=str(g))
            stream.pruned.kept[g] = [i in chosen.kept for i in range(shape[1])]
            stream.pruned.survival[g] = way.keep_ratio
        return stream
    learning = Learning(way.plan.detection_length)
    audits = [draw_audit(way.audit_ratio, seed, str(g), g) for g in range(shape[0])]
    awaited: list[tuple[int, Mapping[int, Observation], Mapping[int, Assessment]]] = []
    for g, scores in enumerate(groups.scores.tolist()):
        if g % GROUPS_PER_STEP == 0:
            for earlier, seen, judged in awaited:
                _reward(learning, groups, earlier, seen, judged, stream.pruned.kept, active=not audits[earlier])
            awaited.clear()
        version, factor = (2, SHARPER) if way.swaps_head and g >= num_unmeasured else (1, 1.0)
        observations = {i: Observation(NO_CONFIDENCE, factor * score, version) for i, score in enumerate(scores)}
        plan = way.plan.audited(races=False) if audits[g] else way.plan
        assessments = learning.assess(plan, observations, Siblings(seed, str(g), at_least=1))
        awaited.append((g, observations, assessments))
        for i, assessment in assessments.items():
            if assessment.success_probability is not None:
                stream.success[g, i] = assessment.success_probability
            if not audits[g]:
                stream.pruned.kept[g, i] = assessment.keep
                stream.pruned.survival[g, i] = assessment.survival_probability
    return stream._replace(advice=advise(learning.outcomes(), way.plan.detection_length))


def _reward(
    learning: Learning,
    groups: Groups,
    group: int,
    seen: Mapping[int, Observation],
    judged: Mapping[int, Assessment],
    kept: np.ndarray,
    active: bool,
) -> None:
    """Rewards of one group's survivors, as a trainer posts them."""
    for i, assessment in judged.items():
        if kept[group, i]:
            positive = bool(groups.rewards[group, i])
            learning.reward(seen[i], assessment, round(1 / DETECTION_SHARE), positive, str(group), active=active)


@dataclass(frozen=True, slots=True)
class Measures:
    """What a way keeps, of one seed."""

    keep_ratio: float
    positive_ratio: float
    """Mean success of survivors."""
    reward_variance: float
    """E[rho (1 - rho)] over groups, of their survivors; without survivors 0."""
    no_variance: float
    """Share of groups that give no gradient."""
    quality: float
    """Signal to noise of a group's GRPO estimate: squared mean over variance."""
    per_token: float
    """The same over the tokens that the group has generated, counted in mean answers."""
    per_token_free: float
    """The same if pruned candidates had generated nothing: the most that pruning could save."""
    error_of_q: float | None
    """Root mean square of q as learned less q as it is; None without q."""


def measure(groups: Groups, stream: Stream, share: float = SHARE) -> Measures:
    kept = stream.pruned.kept
    num_kept = kept.sum(1)
    num_positive = (groups.rewards * kept).sum(1)
    ratio = num_positive / np.maximum(1, num_kept)
    answers = num_kept + DETECTION_SHARE * (kept.shape[1] - num_kept)
    quality = moments(groups, stream.pruned, share, "plain").unbiased_quality(len(kept))
    known = ~np.isnan(stream.success)
    errors = stream.success[known] - groups.q[known]
    return Measures(
        keep_ratio=float(kept.mean()),
        positive_ratio=float(num_positive.sum() / num_kept.sum()),
        reward_variance=float((ratio * (1 - ratio)).mean()),
        no_variance=float(no_variance(groups, stream.pruned).mean()),
        quality=quality,
        per_token=quality / float(answers.mean()),
        per_token_free=quality / float(num_kept.mean()),
        error_of_q=math.sqrt(float((errors**2).mean())) if errors.size else None,
    )


class Found(NamedTuple):
    """By way, and of each seed."""

    measures: dict[str, list[Measures]]
    advice: list[Advice]
    """To who prunes by the default rule."""


def measure_world(world: World, num_groups: int, min_learning: int, num_seeds: int) -> Found:
    found = Found({name: [] for name in WAYS}, [])
    num_unmeasured = num_learning(world.rate, min_learning)
    measured = slice(num_unmeasured, None)
    for seed in range(num_seeds):
        groups = world.groups(num_unmeasured + num_groups, seed + 1)
        for name, way in WAYS.items():
            launched = groups.first(way.group_size)
            whole = stream(launched, way, num_unmeasured, seed)
            part = Stream(whole.pruned.part(measured), whole.success[measured])
            found.measures[name].append(measure(launched.part(measured), part))
            if name == DEFAULT and whole.advice is not None:
                found.advice.append(whole.advice)
    return found


def rows(worlds: Sequence[World], num_groups: int, min_learning: int, num_seeds: int) -> Iterator[dict[str, Any]]:
    for world in track(worlds, "learned, by spread, AUC and success rate"):
        yield row_of(world, measure_world(world, num_groups, min_learning, num_seeds))


COMPARED: Mapping[str, Sequence[str]] = {
    "random": ("quality", "per_token", "per_token_free"),
    "none": ("quality", "per_token", "per_token_free"),
    "fewer": ("quality", "per_token", "per_token_free"),
    "gradient": ("per_token",),
}


def row_of(world: World, found: Found) -> dict[str, Any]:
    """Means with their standard errors over seeds, and of every way what it is worth beside the others."""
    row: dict[str, Any] = asdict(world)
    for name, measured in found.measures.items():
        row[name] = {field: _over_seeds(measured, field) for field in Measures.__slots__}
    for other, compared in COMPARED.items():
        others = found.measures[other]
        for name, measured in found.measures.items():
            row[name][f"over_{other}"] = {
                field: ratio([getattr(m, field) for m in measured], [getattr(m, field) for m in others])
                for field in compared
            }
    values = [advice.value for advice in found.advice if advice.value is not None]
    row["advice"] = {
        "value": with_error(values) if len(values) > 1 else None,
        "prune": sum(advice.cheaper == "prune" for advice in found.advice),
        "fewer": sum(advice.cheaper == "fewer" for advice in found.advice),
    }
    return row


def _over_seeds(measured: Sequence[Measures], field: str) -> dict[str, float] | None:
    values = [value for each in measured if (value := getattr(each, field)) is not None]
    return with_error(values) if len(values) > 1 else None


def ratio(ours: Sequence[float], others: Sequence[float]) -> dict[str, float] | None:
    """Mean over mean of paired seeds, with its standard error to first order; None over nothing."""
    base = fmean(others)
    if base <= 0:
        return None
    found = fmean(ours) / base
    residuals = [a - found * b for a, b in zip(ours, others, strict=True)]
    return {"mean": found, "error": stdev(residuals) / base / math.sqrt(len(ours))}


DEFAULT = "gradient"
OTHERS = ("random", "fewer", "none")
NUM_ERRORS = 2.0


Verdict = Literal["worse", "alike", "better", "unknown"]


def verdict(ratio: Mapping[str, float] | None) -> Verdict:
    """Beyond two standard errors; unknown where the other way has shown no gradient at all."""
    if ratio is None:
        return "unknown"
    margin = NUM_ERRORS * ratio["error"] + 1e-9
    return "worse" if ratio["mean"] < 1 - margin else "better" if ratio["mean"] > 1 + margin else "alike"


def target(rows: Sequence[Mapping[str, Any]], name: str, field: str = "per_token") -> dict[str, Any]:
    """Is this way nowhere worse than random, fewer or none by more than two standard errors?"""
    cells = [
        {
            **{key: row[key] for key in ("concentration", "auc", "rate")},
            "than": other,
            "verdict": verdict(row[name][f"over_{other}"][field]),
            "ratio": row[name][f"over_{other}"][field],
        }
        for row in rows
        for other in OTHERS
    ]
    good = [cell for cell in cells if cell["verdict"] in ("alike", "better")]
    return {
        "way": name,
        "measure": field,
        "holds": {other: sum(cell["than"] == other for cell in good) for other in OTHERS},
        "better": {
            other: sum(cell["than"] == other and cell["verdict"] == "better" for cell in good) for other in OTHERS
        },
        "num_cells": len(rows),
        "fails": [cell for cell in cells if cell["verdict"] == "worse"],
    }


def rounded(value: Any) -> Any:
    """Floats of a result with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value
