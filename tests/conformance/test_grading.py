"""Record of a reward function's calls: another grade is not taken for this one."""

import pytest

from conformance.grading import Case, assert_as_called, assert_same
from vllm_rollout.parts.rewards.grading import Grade, Trajectory

SAYS = {"right": [1.0], "void": [None], "verl's": {"score": -1.0, "acc": False}}


def score(completions, **columns):
    return SAYS[completions[0]]


def case(text: str) -> Case:
    return Case(f"{__name__}:score", Trajectory("?", text, {}), {"completions": [text]})


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("right", Grade("ok", 1.0)),
        ("void", Grade("void")),
        ("verl's", Grade("ok", -1.0)),
        ("raises", Grade("error", reason="the reward function raised KeyError: 'raises'")),
    ],
)
def test_a_grade_is_what_the_function_says_and_nothing_else(text, grade):
    assert_as_called(case(text), grade)
    for other in (Grade("ok", 0.0), Grade("timeout", 0.0), Grade("error", reason="KeyError: 'other'")):
        with pytest.raises(AssertionError):
            assert_as_called(case(text), other)


def test_gradings_are_counted_by_what_they_came_to():
    said = assert_same([case("right"), case("void"), case("right"), case("raises")])
    assert said == "4 gradings by 1 functions as when called directly: 1 error, 2 ok 1, 1 void"
