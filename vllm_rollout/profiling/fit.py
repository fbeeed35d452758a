"""Fits a continuous piecewise linear curve with free breakpoints to step times, and measures the fit's errors.

Invariant: a fit is never worse than the best line, and does not fall where the measurements do not.

Errors are relative: a step of 8 candidates counts as much as a step of 256. The price of a long tail depends on small
batches.

Source: DARTS Appendix A (three pieces).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from vllm_rollout.config import MIN_STEP_S
from vllm_rollout.parts.shaping.rules.cost import PTLCurve

NUM_PIECES = 3
POINTS_PER_PIECE = 3
"""Least number of points that a piece spans, its ends included. With two it would follow a single slow step."""
NUM_REFINEMENTS = 3
"""Rounds in which each breakpoint is moved to its best place between its neighbours."""
GOLDEN = (5**0.5 - 1) / 2
SEARCH_STEPS = 24
"""Steps of a golden-section search, which narrow its interval to 1e-5 of its length."""


class Fit(NamedTuple):
    """A curve, and its errors on the points that it was fitted to."""

    curve: PTLCurve
    r_squared: float
    """Share of the variance of seconds that the fit explains."""
    residuals: tuple[float, ...]
    """Relative error by point: (fitted - measured) / measured."""


class LeftOut(NamedTuple):
    """An interior point, predicted by the curve through all other points."""

    batch_size: int
    error: float
    """Relative error: (predicted - measured) / measured."""


def fit_curve(batch_sizes: Sequence[float], seconds: Sequence[float], num_pieces: int = NUM_PIECES) -> Fit:
    """Least squares in relative error, over breakpoints and values. Few points get fewer pieces, one point a constant.

    Raises: ValueError for no points, points that do not ascend, or times that are not positive.
    """
    x, y = np.asarray(batch_sizes, float), np.asarray(seconds, float)
    if len(x) != len(y) or len(x) == 0 or np.any(np.diff(x) <= 0) or np.any(~np.isfinite(y)) or np.any(y <= 0):
        raise ValueError(
            "a fit needs ascending batch sizes, each with a positive time, got "
            f"{list(map(float, x))} and {list(map(float, y))}"
        )
    if len(x) == 1:
        return _fit_of(x, y, x, y)
    problem = _Problem(x, y)
    best = _Solution(problem, ())
    for pieces in range(2, num_pieces + 1):
        if len(x) >= POINTS_PER_PIECE * pieces:
            guesses = [*_first_guesses(x, y, pieces - 1), *_with_one_more(x, best.breakpoints)]
            found = min((_Solution(problem, breakpoints) for breakpoints in guesses), key=_error_of)
            best = min(best, _refined(problem, found), key=_error_of)
    return _fit_of(x, y, best.knots, best.values)


def leave_one_out(batch_sizes: Sequence[int], seconds: Sequence[float]) -> list[LeftOut]:
    """Error at each interior point of a fit to all other points, breakpoints included."""
    found = []
    for i in range(1, len(batch_sizes) - 1):
        others = [j for j in range(len(batch_sizes)) if j != i]
        curve = fit_curve([batch_sizes[j] for j in others], [seconds[j] for j in others]).curve
        found.append(LeftOut(batch_sizes[i], curve(batch_sizes[i]) / seconds[i] - 1))
    return found


def fit_prefill(chunks: Sequence[float], extra_s: Sequence[float]) -> tuple[float, float]:
    """Seconds per prompt token and fixed seconds per step, neither negative, by least squares in relative error.

    `extra_s`: seconds by which a step with prompt tokens exceeds a decode step, for each of `chunks`.
    """
    x, y = np.asarray(chunks, float), np.maximum(np.asarray(extra_s, float), MIN_STEP_S)
    if len(x) == 0:
        return 0.0, 0.0
    columns = np.stack([x, np.ones_like(x)], axis=1) / y[:, None]
    slope, fixed = _non_negative(columns, np.ones_like(y), first=0)
    return float(slope), float(fixed)


class _Problem:
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y
        self.monotone = bool(np.all(np.diff(y) >= 0))


class _Solution:
    """The best values at both ends and at given breakpoints."""

    def __init__(self, problem: _Problem, breakpoints: Sequence[float]) -> None:
        x, y = problem.x, problem.y
        self.knots = np.array([x[0], *breakpoints, x[-1]])
        basis = _hats(x, self.knots) / y[:, None]
        ones = np.ones_like(y)
        self.values = np.linalg.lstsq(basis, ones, rcond=None)[0]
        if problem.monotone and np.any(np.diff(self.values) < 0):
            # In increments instead of values, all but the first of them at least 0.
            cumulative = np.tril(np.ones((len(self.knots), len(self.knots))))
            self.values = cumulative @ _non_negative(basis @ cumulative, ones, first=1)
        self.values = np.maximum(self.values, MIN_STEP_S)
        self.error = float(np.sum((basis @ self.values - 1) ** 2))

    @property
    def breakpoints(self) -> tuple[float, ...]:
        return tuple(self.knots[1:-1])


def _error_of(solution: _Solution) -> float:
    return solution.error


def _hats(x: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Weights of the knots' values in a linear interpolation at x # [num_points, num_knots]"""
    left = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
    share = (x - knots[left]) / (knots[left + 1] - knots[left])
    hats = np.zeros((len(x), len(knots)))
    rows = np.arange(len(x))
    hats[rows, left] = 1 - share
    hats[rows, left + 1] += share
    return hats


def _non_negative(columns: np.ndarray, target: np.ndarray, first: int) -> np.ndarray:
    """Least squares with non-negative coefficients from `first` on. Tries every choice of coefficients that are 0."""
    count = columns.shape[1]
    best, best_error = np.zeros(count), np.inf
    for kept in product((True, False), repeat=count - first):
        chosen = [*range(first), *(first + i for i, keep in enumerate(kept) if keep)]
        if not chosen:
            continue
        found = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
        if np.any(found[first:] < 0):
            continue
        error = float(np.sum((columns[:, chosen] @ found - target) ** 2))
        if error < best_error:
            best, best_error = np.zeros(count), error
            best[chosen] = found
    return best


def _first_guesses(x: np.ndarray, y: np.ndarray, num_breakpoints: int) -> Iterator[tuple[float, ...]]:
    """Candidates for breakpoints: every choice of points, and of gaps in which the lines on either side meet."""
    for chosen in combinations(range(len(x)), num_breakpoints):
        if all(np.diff([0, *chosen, len(x) - 1]) >= POINTS_PER_PIECE - 1):
            yield tuple(x[i] for i in chosen)
    for chosen in combinations(range(1, len(x)), num_breakpoints):
        ends = [0, *chosen, len(x)]
        if any(np.diff(ends) < POINTS_PER_PIECE):
            continue
        lines = [_line(x[start:stop], y[start:stop]) for start, stop in pairwise(ends)]
        meetings = [_meeting(line, other) for line, other in pairwise(lines)]
        if all(x[i - 1] <= meeting <= x[i] for i, meeting in zip(chosen, meetings, strict=True)):
            yield tuple(meetings)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    columns = np.stack([x, np.ones_like(x)], axis=1) / y[:, None]
    slope, base = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
    return float(slope), float(base)


def _with_one_more(x: np.ndarray, breakpoints: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    """These breakpoints and one more point, if every piece then has its least number of points."""
    for place in set(x[1:-1]) - set(breakpoints):
        knots = sorted([x[0], *breakpoints, place, x[-1]])
        counts = [np.count_nonzero((x >= left) & (x <= right)) for left, right in pairwise(knots)]
        if min(counts) >= POINTS_PER_PIECE:
            yield tuple(knots[1:-1])


def _meeting(line: tuple[float, float], other: tuple[float, float]) -> float:
    """The x at which two lines meet. NaN for parallel lines."""
    return (line[1] - other[1]) / (other[0] - line[0]) if line[0] != other[0] else np.nan


def _refined(problem: _Problem, best: _Solution) -> _Solution:
    for _ in range(NUM_REFINEMENTS):
        for i in range(len(best.breakpoints)):
            best = min(best, _moved(problem, best, i), key=_error_of)
    return best


def _moved(problem: _Problem, solution: _Solution, i: int) -> _Solution:
    """The solution with breakpoint `i` at its best place between neighbouring points. Every piece keeps its points."""
    x, knots = problem.x, solution.knots
    before, after = knots[i], knots[i + 2]
    low = x[min(np.searchsorted(x, before) + POINTS_PER_PIECE - 1, len(x) - 1)]
    high = x[max(np.searchsorted(x, after, side="right") - POINTS_PER_PIECE, 0)]
    at = int(np.searchsorted(x, knots[i + 1]))
    low, high = max(low, x[max(at - 1, 0)]), min(high, x[min(at + 1, len(x) - 1)])
    if low >= high:
        return solution
    breakpoints = list(solution.breakpoints)

    def at_place(place: float) -> _Solution:
        breakpoints[i] = place
        return _Solution(problem, breakpoints)

    left, right = at_place(high - GOLDEN * (high - low)), at_place(low + GOLDEN * (high - low))
    for _ in range(SEARCH_STEPS):
        if left.error <= right.error:
            high, right = right.knots[i + 1], left
            left = at_place(high - GOLDEN * (high - low))
        else:
            low, left = left.knots[i + 1], right
            right = at_place(low + GOLDEN * (high - low))
    return min(left, right, key=_error_of)


def _fit_of(x: np.ndarray, y: np.ndarray, knots: np.ndarray, values: np.ndarray) -> Fit:
    curve = PTLCurve(tuple(map(float, knots)), tuple(map(float, values)))
    fitted = np.array([curve(size) for size in x])
    total = float(np.sum((y - y.mean()) ** 2))
    missed = float(np.sum((y - fitted) ** 2))
    r_squared = 1 - missed / total if total > 0 else float(missed <= 1e-18)
    return Fit(curve, r_squared, tuple(map(float, fitted / y - 1)))
