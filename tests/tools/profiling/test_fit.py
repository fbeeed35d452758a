"""Continuous piecewise linear fits with free breakpoints."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.shaping.rules.cost import PTLCurve
from vllm_rollout.profiling.fit import POINTS_PER_PIECE, fit_curve, fit_prefill, leave_one_out
from vllm_rollout.profiling.grid import default_batch_sizes

SIZES = default_batch_sizes(256)


def relative_error(curve, sizes, seconds):
    return sum((curve(size) / second - 1) ** 2 for size, second in zip(sizes, seconds, strict=True))


@st.composite
def three_pieces(draw):
    """A curve whose pieces have at least three points each; slopes differ by a factor of two or more."""
    first = draw(st.integers(POINTS_PER_PIECE, len(SIZES) - 2 * POINTS_PER_PIECE))
    second = draw(st.integers(first + POINTS_PER_PIECE, len(SIZES) - POINTS_PER_PIECE))
    knots = [float(SIZES[0])]
    knots += [draw(st.floats(SIZES[i - 1], SIZES[i])) for i in (first, second)] + [float(SIZES[-1])]
    slopes = [draw(st.floats(0, 1e-4)), draw(st.floats(3e-4, 1e-3)), draw(st.floats(2e-3, 1e-2))]
    seconds = [draw(st.floats(1e-3, 0.1))]
    for i, slope in enumerate(slopes):
        seconds.append(seconds[-1] + slope * (knots[i + 1] - knots[i]))
    return PTLCurve(tuple(knots), tuple(seconds))


times = st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=14)


@pytest.mark.thorough
@settings(max_examples=40)
@given(three_pieces())
def test_an_exact_three_piece_curve_is_found(curve):
    fit = fit_curve(SIZES, [curve(size) for size in SIZES])
    assert max(map(abs, fit.residuals)) < 1e-6
    assert fit.r_squared == pytest.approx(1)
    assert fit.curve.batch_sizes[1:-1] == pytest.approx(curve.batch_sizes[1:-1], rel=1e-3)


@settings(max_examples=40)
@given(times)
def test_more_pieces_are_never_worse_than_fewer(seconds):
    sizes = SIZES[: len(seconds)]
    errors = [relative_error(fit_curve(sizes, seconds, n).curve, sizes, seconds) for n in (1, 2, 3)]
    assert errors[1] <= errors[0] + 1e-9
    assert errors[2] <= errors[1] + 1e-9


@pytest.mark.thorough
@settings(max_examples=40)
@given(times)
def test_a_curve_rises_where_the_measurements_do(seconds):
    seconds = sorted(seconds)
    fit = fit_curve(SIZES[: len(seconds)], seconds)
    assert all(np.diff(fit.curve.seconds) >= -1e-12)


@settings(max_examples=40)
@given(times)
def test_every_piece_spans_its_points_and_the_ends_are_the_ends(seconds):
    sizes = np.array(SIZES[: len(seconds)])
    knots = fit_curve(sizes, seconds).curve.batch_sizes
    assert (knots[0], knots[-1]) == (sizes[0], sizes[-1])
    if len(knots) > 2:
        for left, right in itertools.pairwise(knots):
            assert np.count_nonzero((sizes >= left - 1e-9) & (sizes <= right + 1e-9)) >= POINTS_PER_PIECE


@pytest.mark.parametrize(("num_points", "num_knots"), [(1, 1), (2, 2), (5, 2), (6, 3), (8, 3), (9, 4), (14, 4)])
def test_fewer_points_get_fewer_pieces(num_points, num_knots):
    sizes = SIZES[:num_points]
    assert len(fit_curve(sizes, [0.01 + 1e-5 * size**1.7 for size in sizes]).curve.batch_sizes) == num_knots


def test_a_single_slow_step_is_not_followed():
    seconds = [0.03 + 0.002 * size for size in SIZES]
    slow = list(seconds)
    slow[5] *= 1.3
    curve = fit_curve(SIZES, slow).curve
    assert curve(SIZES[5]) == pytest.approx(seconds[5], rel=0.15)


def test_small_batches_count_as_much_as_large_ones():
    """Least squares in seconds would give the first points up."""
    seconds = [0.010 if size < 8 else 0.01 + 0.004 * (size - 7) for size in SIZES]
    fit = fit_curve(SIZES, seconds)
    assert max(map(abs, fit.residuals[:4])) < 0.02


def test_constant_times_have_a_perfect_fit():
    fit = fit_curve((1, 2, 4), (0.5, 0.5, 0.5))
    assert fit.curve(3) == pytest.approx(0.5)
    assert fit.r_squared == 1


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((), ()), ((1, 2), (0.1,)), ((2, 1), (0.1, 0.2)), ((1, 2), (0.1, 0.0)), ((1, 2), (0.1, float("nan")))],
)
def test_points_that_cannot_be_fitted_are_refused(sizes, seconds):
    with pytest.raises(ValueError, match="a fit needs ascending batch sizes"):
        fit_curve(sizes, seconds)


def test_every_interior_point_is_left_out_once():
    sizes = SIZES[:9]
    seconds = [0.01 + 0.001 * size for size in sizes]
    left_out = leave_one_out(sizes, seconds)
    assert [left.batch_size for left in left_out] == list(sizes[1:-1])
    assert max(abs(left.error) for left in left_out) < 1e-9


def test_a_point_that_stands_out_is_seen_when_it_is_left_out():
    sizes = SIZES[:12]
    seconds = [0.01 + 0.001 * size for size in sizes]
    seconds[6] *= 1.5
    errors = {left.batch_size: left.error for left in leave_one_out(sizes, seconds)}
    assert errors[sizes[6]] == pytest.approx(1 / 1.5 - 1, abs=0.02)
    assert leave_one_out((1, 2), (0.1, 0.2)) == []


def test_prefill_is_a_slope_and_a_fixed_part():
    chunks = (16, 64, 256, 1024)
    slope, fixed = fit_prefill(chunks, [0.02 + 0.001 * chunk for chunk in chunks])
    assert slope == pytest.approx(0.001)
    assert fixed == pytest.approx(0.02)


@settings(max_examples=40)
@given(st.lists(st.floats(-0.1, 1), max_size=5))
def test_neither_part_of_prefill_is_negative(extra):
    slope, fixed = fit_prefill([16 * 4**i for i in range(len(extra))], extra)
    assert slope >= 0
    assert fixed >= 0
