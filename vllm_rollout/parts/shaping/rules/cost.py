"""Seconds of a rollout from the lengths of its candidates and a profile of the engine.

Invariant: the closed form equals the sum of `CostModel.ptl` over every single step.

Source: DARTS 4.2.1 (Eq. 4), Appendix A (three-piece linear curves), Appendix B (Eq. 6). Beyond the paper: a step's time
also depends on the context of the candidates in it, prompts are prefilled, and candidates beyond `max_num_seqs` wait.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from statistics import NormalDist
from typing import NamedTuple

from vllm_rollout.config import MIN_STEP_S

MAX_SIMULATED_CANDIDATES = 4096
"""Most candidates per rank whose cost is simulated one by one. Beyond, the result is extrapolated from these."""


class StepTime(NamedTuple):
    """Measurement of one engine step."""

    batch_size: int
    num_tokens: int
    """Tokens computed in the step. More than `batch_size` when it prefills."""
    context_tokens: float
    """Prompt and output tokens so far, mean over the requests that are still running."""
    seconds: float


@dataclass(frozen=True, slots=True)
class PTLCurve:
    """PTL over batch size at one context length: continuous and piecewise linear.

    Beyond its ends the curve goes on with the end piece's slope, on the right never downwards.
    """

    batch_sizes: tuple[float, ...]
    """Knots of the curve, ascending."""
    seconds: tuple[float, ...]
    """Time of one decode step, at the knots."""

    def __post_init__(self) -> None:
        if not self.batch_sizes or len(self.batch_sizes) != len(self.seconds):
            raise ValueError(
                "a PTL curve needs one time for each of at least one batch size, got "
                f"{len(self.batch_sizes)} batch sizes and {len(self.seconds)} times"
            )
        if any(not 0 < value < math.inf for value in (*self.batch_sizes, *self.seconds)):
            raise ValueError(
                f"batch sizes and seconds of a PTL curve must be positive numbers, got {self.batch_sizes} and "
                f"{self.seconds}"
            )
        if any(after <= before for before, after in zip(self.batch_sizes, self.batch_sizes[1:], strict=False)):
            raise ValueError(f"batch sizes of a PTL curve must ascend, got {self.batch_sizes}")

    def __call__(self, batch_size: float) -> float:
        """Seconds of one decode step with this many candidates, at least `MIN_STEP_S`."""
        sizes, seconds = self.batch_sizes, self.seconds
        if len(sizes) == 1:
            return max(seconds[0], MIN_STEP_S)
        left = min(max(bisect_right(sizes, batch_size) - 1, 0), len(sizes) - 2)
        slope = (seconds[left + 1] - seconds[left]) / (sizes[left + 1] - sizes[left])
        if batch_size > sizes[-1]:
            return max(seconds[-1] + max(slope, 0.0) * (batch_size - sizes[-1]), MIN_STEP_S)
        return max(seconds[left] + slope * (batch_size - sizes[left]), MIN_STEP_S)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times of engine steps at one tensor-parallel size."""

    curves: tuple[tuple[float, PTLCurve], ...]
    """(context in tokens, curve), ascending by context."""
    prefill_s_per_token: float = 0.0
    """Extra seconds of a step per prompt token that it computes."""
    step_prefill_s: float = 0.0
    """Extra seconds of a step that prefills, beyond its prompt tokens and a decode step."""
    max_num_seqs: int | None = None
    """Candidates that run at once. The others wait. None: no limit."""

    def __post_init__(self) -> None:
        contexts = [context for context, _ in self.curves]
        if not contexts or any(not 0 <= context < math.inf for context in contexts):
            raise ValueError(f"a cost model needs curves at contexts of 0 tokens or more, got contexts {contexts}")
        if any(after <= before for before, after in itertools.pairwise(contexts)):
            raise ValueError(f"the contexts of a cost model must ascend, got {contexts}")
        for name in ("prefill_s_per_token", "step_prefill_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")

    def ptl(self, batch_size: float, context_tokens: float) -> float:
        """Seconds of one decode step. `context_tokens`: mean of prompt and output tokens so far over the candidates.

        Linear between contexts. Beyond them the line goes on with the end's slope, but never falls: longer contexts do
        not make a step faster.
        """
        return _ContextLine.of(self, batch_size).sum(context_tokens, 1)

    def decode_time(self, batch_size: float, context_tokens: float, num_steps: int) -> float:
        """Seconds of `num_steps` decode steps of the same candidates. The mean context grows by one in each."""
        return _ContextLine.of(self, batch_size).sum(context_tokens, num_steps)


class BudgetSlope(NamedTuple):
    """A line through the cost of two budgets (Eq. 6)."""

    seconds_per_candidate: float
    """k of Eq. 6."""
    base_s: float
    """Cost of the lower budget, in seconds."""


@dataclass(frozen=True, slots=True)
class _ContextLine:
    """PTL over context at one batch size: piecewise linear, from context 0 on."""

    contexts: tuple[float, ...]
    seconds: tuple[float, ...]
    slopes: tuple[float, ...]
    """Slopes to the right of each knot."""

    @classmethod
    def of(cls, cost: CostModel, batch_size: float) -> _ContextLine:
        contexts = [context for context, _ in cost.curves]
        seconds = [curve(batch_size) for _, curve in cost.curves]
        slopes = [
            (seconds[i + 1] - seconds[i]) / (contexts[i + 1] - contexts[i]) for i in range(len(contexts) - 1)
        ] or [0.0]
        if contexts[0] > 0:
            # The slope is bounded by the floor at context 0, so that the line has no kink between knots.
            first = min(max(slopes[0], 0.0), (seconds[0] - MIN_STEP_S) / contexts[0])
            seconds.insert(0, seconds[0] - first * contexts[0])
            contexts.insert(0, 0.0)
            slopes.insert(0, first)
        if len(slopes) < len(contexts):
            slopes.append(max(slopes[-1], 0.0))
        return cls(tuple(contexts), tuple(seconds), tuple(slopes))

    def sum(self, context: float, num_steps: int) -> float:
        """Seconds of `num_steps` steps at contexts `context`, `context` + 1, …"""
        total = 0.0
        piece = max(bisect_right(self.contexts, context) - 1, 0)
        while num_steps > 0:
            count = num_steps
            if piece + 1 < len(self.contexts):
                count = min(num_steps, math.ceil(self.contexts[piece + 1] - context))
            start = self.seconds[piece] + self.slopes[piece] * (context - self.contexts[piece])
            total += count * start + self.slopes[piece] * count * (count - 1) / 2
            context += count
            num_steps -= count
            piece += 1
        return total


def rollout_time(
    lengths: Sequence[int],
    cost: CostModel,
    prompt_tokens: Sequence[int] | int = 0,
    prefill_tokens: int | None = None,
) -> float:
    """Seconds until the last candidate has ended. All arrive at the start, in this order, on one engine.

    Args:
        lengths: output tokens of each candidate, known or assumed.
        prompt_tokens: of each candidate, or one number for all.
        prefill_tokens: prompt tokens that are computed, if the prefix cache saves some of them
            (`computed_prompt_tokens`). Default: all.

    Source: DARTS Eq. 4, with contexts, prefill and a queue in front of `max_num_seqs` slots.
    """
    prompts = [prompt_tokens] * len(lengths) if isinstance(prompt_tokens, int) else prompt_tokens
    if prefill_tokens is None:
        prefill_tokens = sum(prompts)
    waiting = iter(zip(lengths, prompts, strict=True))
    slots = cost.max_num_seqs or max(1, len(lengths))
    lines: dict[int, _ContextLine] = {}
    running: list[tuple[int, int]] = []
    """(last step of a candidate, its prompt tokens less its first step). The context is the second plus the step."""
    offsets = step = num_prefill_steps = 0
    seconds = 0.0
    while True:
        started = False
        while len(running) < slots and (candidate := next(waiting, None)) is not None:
            length, prompt = candidate
            if length > 0:
                heappush(running, (step + length, prompt - step))
                offsets += prompt - step
                started = True
        num_prefill_steps += started
        if not running:
            return seconds + num_prefill_steps * cost.step_prefill_s + prefill_tokens * cost.prefill_s_per_token
        batch_size = len(running)
        if (line := lines.get(batch_size)) is None:
            line = lines[batch_size] = _ContextLine.of(cost, batch_size)
        end = running[0][0]
        seconds += line.sum(offsets / batch_size + step, end - step)
        step = end
        while running and running[0][0] == step:
            offsets -= heappop(running)[1]


def computed_prompt_tokens(prompt_tokens: int, num_candidates: int, block_size: int) -> int:
    """Prompt tokens that a group computes: siblings share full blocks, but none shares the prompt's last token."""
    if num_candidates < 1 or prompt_tokens < 1:
        return 0
    shared = (prompt_tokens - 1) // block_size * block_size
    return prompt_tokens + (num_candidates - 1) * (prompt_tokens - shared)


def budget_slope(
    cost: CostModel,
    mean_tokens: float,
    std_tokens: float,
    lower: int,
    upper: int,
    num_ranks: int = 1,
    prompt_tokens: float = 0,
    max_tokens: int | None = None,
) -> BudgetSlope:
    """k and T(lower) of Eq. 6: the secant of Eq. 4 between budgets of `lower` and `upper` candidates in all.

    The lengths of a budget are quantiles of the log-normal distribution with this mean and standard deviation, cut at
    `max_tokens`, spread evenly over the ranks. With `upper == lower` k is the cost of one candidate more.
    """
    upper = max(upper, lower + 1)
    lengths = partial(log_normal_lengths, mean_tokens, std_tokens, max_tokens=max_tokens)
    base, most = (_time_of_budget(total / num_ranks, lengths, cost, round(prompt_tokens)) for total in (lower, upper))
    return BudgetSlope((most - base) / (upper - lower), base)


def log_normal_lengths(mean_tokens: float, std_tokens: float, count: int, max_tokens: int | None = None) -> list[int]:
    """`count` quantiles of a log-normal distribution of lengths, cut at `max_tokens`. Each is at least 1.

    Their order has a stride of the golden ratio, so that long ones arrive mixed, not sorted.
    """
    variance = math.log1p((std_tokens / mean_tokens) ** 2)
    normal = NormalDist(math.log(mean_tokens) - variance / 2, math.sqrt(variance)) if variance else None
    most = math.inf if max_tokens is None else max_tokens
    stride = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, count) != 1:
        stride += 1

    def quantile(probability: float) -> int:
        length = math.exp(normal.inv_cdf(probability)) if normal else mean_tokens
        return max(1, round(min(length, most)))

    return [quantile((i * stride % count + 0.5) / count) for i in range(count)]


def _time_of_budget(
    num_candidates: float, lengths: Callable[[int], list[int]], cost: CostModel, prompt_tokens: int
) -> float:
    """Eq. 4 of a rank with this many candidates, linear between whole numbers of them."""

    def time_of(count: int, cost: CostModel = cost) -> float:
        return rollout_time(lengths(count), cost, prompt_tokens) if count else 0.0

    most = max(MAX_SIMULATED_CANDIDATES, 4 * (cost.max_num_seqs or 0))
    if num_candidates <= most:
        below = math.floor(num_candidates)
        share, base = num_candidates - below, time_of(below)
        return base + share * (time_of(below + 1) - base) if share else base
    if cost.max_num_seqs is None:
        # All run at once: each length of a sample stands for several candidates.
        return time_of(most, _several_at_once(cost, num_candidates / most))
    # The engine is full: each waiting candidate adds its share of the time.
    per_candidate = (time_of(most) - time_of(most // 2)) / (most - most // 2)
    return time_of(most) + (num_candidates - most) * per_candidate


def _several_at_once(cost: CostModel, weight: float) -> CostModel:
    """A cost model with these times, and with batch sizes counted in units of `weight` candidates."""
    curves = tuple(
        (context, PTLCurve(tuple(size / weight for size in curve.batch_sizes), curve.seconds))
        for context, curve in cost.curves
    )
    return CostModel(curves, cost.prefill_s_per_token * weight, cost.step_prefill_s)
