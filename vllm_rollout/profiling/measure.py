"""Measures points one by one into a profile.

Invariant: after each point the profile holds a fit of all its points.
"""

from __future__ import annotations

from datetime import UTC, datetime
from operator import attrgetter
from statistics import fmean, median
from typing import Any

import numpy as np

from vllm_rollout.parts.shaping.profile_file import CurveFit, EngineFacts, Point, PrefillPoint, Profile
from vllm_rollout.profiling.engine_process import EngineProcess
from vllm_rollout.profiling.fit import fit_curve, fit_prefill, leave_one_out
from vllm_rollout.profiling.grid import GridPoint, Plan

PREFILL_STEPS = 3
"""Steps per chunk size: a step of many tokens is long and varies little."""


class TooFewSteps(RuntimeError):
    """The engine never ran a point's candidates all together."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def missing_points(profile: Profile, plan: Plan, tensor_parallel_size: int) -> list[GridPoint]:
    measured = {
        (point.batch_size, point.context_tokens)
        for point in profile.points
        if point.tensor_parallel_size == tensor_parallel_size
    }
    return [point for point in plan.points if point not in measured]


def missing_chunks(profile: Profile, plan: Plan, tensor_parallel_size: int) -> list[int]:
    measured = {p.chunk_tokens for p in profile.prefill if p.tensor_parallel_size == tensor_parallel_size}
    return [chunk for chunk in plan.chunks if chunk not in measured]


def add_point(
    engine: EngineProcess, point: GridPoint, tensor_parallel_size: int, steps: tuple[int, int], profile: Profile
) -> tuple[Profile, str]:
    """Measure a point. Returns the profile with it, and the result in words.

    Raises: TooFewSteps if fewer than half of the steps were measured.
    """
    num_warmup, num_steps = steps
    measured = engine.decode(**point._asdict(), num_warmup=num_warmup, num_steps=num_steps)
    if 2 * len(measured) < num_steps:
        raise TooFewSteps(
            f"only {len(measured)} of {num_steps} steps had all {point.batch_size} candidates at a context of "
            f"{point.context_tokens} tokens"
        )
    low, middle, high = np.percentile([step.seconds for step in measured], (10, 50, 90)).tolist()
    made = Point(
        tensor_parallel_size=tensor_parallel_size,
        **point._asdict(),
        mean_context_tokens=round(fmean(step.context_tokens for step in measured), 2),
        median_s=middle,
        p10_s=low,
        p90_s=high,
        num_steps=len(measured),
    )
    return with_point(profile, made), f"batch {point.batch_size}: {middle * 1e3:.1f} ms"


def add_prefill(engine: EngineProcess, chunk: int, tensor_parallel_size: int, profile: Profile) -> tuple[Profile, str]:
    """Measure a prefill step. Returns the profile with it, and the result in words. Raises: TooFewSteps without any
    step."""
    steps = engine.prefill(chunk_tokens=chunk, num_steps=PREFILL_STEPS)
    if not steps:
        raise TooFewSteps(f"no step computed all of {chunk} prompt tokens")
    median_s = median(step.seconds for step in steps)
    made = PrefillPoint(
        tensor_parallel_size=tensor_parallel_size, chunk_tokens=chunk, median_s=median_s, num_steps=len(steps)
    )
    return with_prefill(profile, made), f"{chunk / median_s:,.0f} prompt tokens/s"


def with_point(profile: Profile, point: Point) -> Profile:
    """The profile with `point` in the place of an equal one, and its curve fitted again."""
    changed = _with(profile, "points", point, "tensor_parallel_size", "context_tokens", "batch_size")
    return _with_fit(changed, point.tensor_parallel_size, point.context_tokens, thorough=False)


def with_prefill(profile: Profile, point: PrefillPoint) -> Profile:
    return _with(profile, "prefill", point, "tensor_parallel_size", "chunk_tokens")


def with_engine(profile: Profile, facts: EngineFacts) -> Profile:
    return _with(profile, "engines", facts, "tensor_parallel_size")


def _with(profile: Profile, part: str, new: Any, *names: str) -> Profile:
    """The profile with `new` in a part, instead of an entry with equal fields `names`. The part is sorted by these
    fields."""
    place = attrgetter(*names)
    others = [each for each in getattr(profile, part) if place(each) != place(new)]
    return profile.model_copy(update={part: tuple(sorted([*others, new], key=place)), "updated": now()})


def finished(profile: Profile) -> Profile:
    """The profile with all its fits, each tested on points left out."""
    for tensor_parallel_size, context in sorted({(p.tensor_parallel_size, p.context_tokens) for p in profile.points}):
        profile = _with_fit(profile, tensor_parallel_size, context, thorough=True)
    for facts in profile.engines:
        profile = with_engine(profile, _with_prefill_fit(profile, facts))
    return profile


def _with_fit(profile: Profile, tensor_parallel_size: int, context: int, *, thorough: bool) -> Profile:
    where = (tensor_parallel_size, context)
    points = [p for p in profile.points if (p.tensor_parallel_size, p.context_tokens) == where]
    sizes, seconds = [p.batch_size for p in points], [p.median_s for p in points]
    fit = fit_curve(sizes, seconds)
    errors = leave_one_out(sizes, seconds) if thorough else None
    made = CurveFit(
        tensor_parallel_size=tensor_parallel_size,
        context_tokens=context,
        mean_context_tokens=fmean(p.mean_context_tokens for p in points),
        batch_sizes=fit.curve.batch_sizes,
        seconds=fit.curve.seconds,
        r_squared=fit.r_squared,
        residuals=dict(zip(sizes, fit.residuals, strict=True)),
        left_out_errors=None if errors is None else {left.batch_size: left.error for left in errors},
        median_left_out_error=median(abs(left.error) for left in errors) if errors else None,
    )
    return _with(profile, "fits", made, "tensor_parallel_size", "context_tokens")


def _with_prefill_fit(profile: Profile, facts: EngineFacts) -> EngineFacts:
    """Facts of the engine with the fitted cost of prompt tokens beside a decode step of one candidate."""
    points = [p for p in profile.prefill if p.tensor_parallel_size == facts.tensor_parallel_size]
    if not points or facts.tensor_parallel_size not in profile.tensor_parallel_sizes:
        return facts
    cost = profile.cost(facts.tensor_parallel_size)
    per_token, fixed = fit_prefill(
        [p.chunk_tokens for p in points], [p.median_s - cost.ptl(1, p.chunk_tokens / 2) for p in points]
    )
    return facts.model_copy(update={"prefill_s_per_token": per_token, "step_prefill_s": fixed})
