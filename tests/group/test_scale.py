import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.group.judging.scale import GUESS, MAX_STRENGTH, Estimate, Scale, estimate

BASE = Estimate(1.0, 2.0, MAX_STRENGTH)


def drawn(count: int, center: float = 0.0, width: float = 1.0) -> list[float]:
    """Evenly spread quantiles of a normal distribution."""
    steps = [math.sqrt(2) * _erfinv((2 * i + 1) / count - 1) for i in range(count)]
    return [center + width * step for step in steps]


def _erfinv(y: float) -> float:
    low, high = -6.0, 6.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < y else (low, middle)
    return low


def test_a_first_version_is_its_own_measure():
    center, width, strength = estimate(drawn(400, 5.0, 3.0), GUESS)
    assert (center, width) == (pytest.approx(5.0), pytest.approx(3.0, rel=0.01))
    assert strength == MAX_STRENGTH


def test_without_scores_the_scale_is_the_predecessors():
    assert estimate([], BASE) == BASE


def test_within_chance_the_predecessor_stays():
    center, width, _ = estimate(drawn(16, 1.3, 1.8), BASE)
    assert abs(center - 1.0) < 0.05
    assert width == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(("factor", "shift"), [(2.0, 0.0), (3.0, 0.0), (1 / 3, 0.0), (1.0, 4.0), (3.0, 4.0), (1e-6, 0)])
def test_another_head_soon_is_its_own_measure(factor, shift):
    scores = drawn(32, factor * BASE.center + shift, factor * BASE.width)
    center, width, _ = estimate(scores, BASE)
    assert abs(center - (factor * BASE.center + shift)) < 0.2 * max(1.0, factor) * BASE.width
    assert width == pytest.approx(factor * BASE.width, rel=0.25)


def test_a_small_change_is_followed_once_there_are_scores_enough_to_see_it():
    near = [estimate(drawn(count, 1.6, 2.0), BASE).center for count in (16, 1000)]
    assert near[0] < 1.1
    assert near[1] == pytest.approx(1.6, abs=0.1)


def test_a_few_scores_tell_no_width():
    assert estimate([0.0, 9.0, 1.0], BASE).width == BASE.width
    assert estimate([7.0] * 40, BASE).width == BASE.width, "nor do equal ones"


def test_a_score_far_out_moves_little():
    scores = drawn(100, 0.0, 1.0)
    center, width, _ = estimate([*scores, 1e30], GUESS)
    assert abs(center) < 0.1
    assert width == pytest.approx(1.0, rel=0.2)


scores_lists = st.lists(st.integers(-1000, 1000).map(lambda n: n / 16), min_size=4, max_size=40)


@settings(max_examples=100, deadline=None)
@given(scores_lists, st.sampled_from([0.125, 4.0, 64.0]), st.integers(-64, 64), st.sampled_from([0.0, 5.0, 256.0]))
def test_a_linear_change_of_all_scores_changes_the_scale_as_much(scores, factor, shift, strength):
    base = Estimate(0.5, 2.0, strength)
    moved = Estimate(factor * base.center + shift, factor * base.width, strength)
    center, width, told = estimate(scores, base)
    changed = estimate([factor * score + shift for score in scores], moved)
    close = 1e-6 * (factor * width + abs(shift))
    assert changed.center == pytest.approx(factor * center + shift, rel=1e-6, abs=close)
    assert changed.width == pytest.approx(factor * width, rel=1e-6)
    assert changed.strength == pytest.approx(told, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-3e38, 3e38), min_size=1, max_size=40),
    st.floats(-3e38, 3e38),
    st.floats(1e-38, 3e38),
    st.floats(0, MAX_STRENGTH),
)
def test_any_scores_make_a_scale_that_can_be_saved(scores, center, width, strength):
    scale = Scale(3, Estimate(center, width, strength), Estimate(center, width, strength), len(scores), 1)
    scale.follow(scores)
    assert Scale.from_state(scale.to_state()).to_state() == scale.to_state()
    assert all(0 <= scale.normalize(score) <= 1 for score in scores)


def test_scores_keep_their_place_while_the_scale_is_within_its_error():
    scale = Scale.after(1, BASE)
    assert not scale.follow(drawn(16, 1.2, 2.0))
    assert (scale.now.center, scale.now.width) == (BASE.center, BASE.width)
    assert scale.follow(drawn(64, 9.0, 2.0))
    assert scale.now.center == pytest.approx(9.0, abs=0.3)


def test_the_sigmoid_holds_for_scores_of_any_size():
    scale = Scale.after(0, GUESS)
    assert [scale.normalize(x) for x in (0.0, 1e38)] == [0.5, 1.0]
    assert scale.normalize(1.5) == pytest.approx(1 / (1 + math.exp(-1.5)))
    assert scale.normalize(-1e38) == pytest.approx(0.0)
    rng = random.Random(0)
    ordered = sorted(rng.gauss(0, 3) for _ in range(50))
    assert sorted(map(scale.normalize, ordered)) == list(map(scale.normalize, ordered))
