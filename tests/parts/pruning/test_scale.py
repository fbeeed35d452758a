import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.pruning.rules.scale import GUESS, MAX_STRENGTH, Estimate, Scale, estimate

BASE = Estimate(1.0, 2.0, MAX_STRENGTH)


def drawn(count: int, center: float = 0.0, width: float = 1.0) -> list[float]:
    """Evenly spread quantiles of a normal distribution."""
    return [NormalDist(center, width).inv_cdf((i + 0.5) / count) for i in range(count)]


OTHER_HEADS = [(2.0, 0.0), (3.0, 0.0), (1 / 3, 0.0), (1.0, 4.0), (3.0, 4.0), (1e-6, 0)]


@pytest.mark.parametrize(
    ("scores", "base", "center", "width"),
    [
        pytest.param(drawn(400, 5.0, 3.0), GUESS, (5.0, 1e-6), (3.0, 0.03), id="a first version"),
        pytest.param([*drawn(100), 1e30], GUESS, (0.0, 0.1), (1.0, 0.2), id="one score far out"),
        pytest.param(drawn(16, 1.3, 1.8), BASE, (1.0, 0.05), (2.0, 0.04), id="within chance the predecessor stays"),
        pytest.param(drawn(16, 1.6, 2.0), BASE, (1.0, 0.1), (2.0, 0.1), id="a small change, not seen yet"),
        pytest.param(drawn(1000, 1.6, 2.0), BASE, (1.6, 0.1), (2.0, 0.1), id="a small change, seen"),
        *(
            pytest.param(
                drawn(32, factor * BASE.center + shift, factor * BASE.width),
                BASE,
                (factor * BASE.center + shift, 0.2 * max(1.0, factor) * BASE.width),
                (factor * BASE.width, 0.25 * factor * BASE.width),
                id=f"another head, x {factor:.2g} + {shift}",
            )
            for factor, shift in OTHER_HEADS
        ),
    ],
)
def test_a_scale_is_that_of_its_scores_as_far_as_they_differ_from_the_version_before(scores, base, center, width):
    """Value and tolerance of center and width."""
    found = estimate(scores, base)
    assert found.center == pytest.approx(center[0], abs=center[1])
    assert found.width == pytest.approx(width[0], abs=width[1])


def test_a_few_scores_tell_no_width():
    assert estimate([0.0, 9.0, 1.0], BASE).width == BASE.width
    assert estimate([7.0] * 40, BASE).width == BASE.width, "nor do equal ones"
    assert estimate([], BASE) == BASE
    assert estimate(drawn(400), GUESS).strength == MAX_STRENGTH


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
