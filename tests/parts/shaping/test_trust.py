"""Weight of a prompt's own history in estimates."""

from random import Random

import pytest

from tests.parts.shaping.test_history import finished, history_of
from vllm_rollout.parts.shaping.rules.history import LengthHistory
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, LengthStatistics
from vllm_rollout.parts.shaping.rules.trust import HistoryTrust, trusted

NUM_PROMPTS = 64


def seen(epochs: list[list[float]], within: float = 0.3, seed: int = 1) -> LengthHistory:
    """`epochs`: of each, the median length of each prompt's answers."""
    chance = Random(seed)
    history = LengthHistory()
    for medians in epochs:
        for number, median in enumerate(medians):
            history.observe(
                str(number), finished(*(round(median * chance.lognormvariate(0, within)) for _ in range(8)))
            )
    return history


def medians(seed: int) -> list[float]:
    chance = Random(seed)
    return [1000 * chance.lognormvariate(0, 0.7) for _ in range(NUM_PROMPTS)]


def trust_of(*epochs: list[float]) -> float:
    return seen(list(epochs)).statistics([]).trust


def test_what_holds_is_believed_and_what_misled_no_longer():
    same, other = medians(1), medians(2)
    assert trust_of(same) == 1.0, "nothing was predicted"
    assert trust_of(same, same) > 0.9
    assert trust_of(same, other) < 0.3, "an update has changed which prompts are long"
    assert trust_of(same, [1e6 / median for median in same]) == 0.0, "the long ones are the short ones now"
    assert trust_of(same, other, other, other) > 0.8, "and it is believed again when it holds again"


def test_lengths_that_all_change_together_say_nothing_against_histories():
    same = medians(1)
    assert trust_of(same, [10 * median for median in same]) > 0.9
    assert trust_of(same, [median / 10 for median in same]) > 0.9


def test_one_group_decides_nothing():
    trust = HistoryTrust()
    trust.observe(100.0, 5000.0)
    assert trust.slope == 1.0
    trust.observe(5000.0, 100.0)
    assert 0 <= trust.slope < 1.0


def test_lengths_are_drawn_towards_those_of_the_data_set_as_far_as_histories_are_not_believed():
    dataset, known = LengthMoments(100.0, 50.0, 9), LengthMoments(400.0, 1600.0, 2)

    def expected(trust: float) -> LengthMoments:
        (lengths,) = trusted(LengthStatistics(dataset, [known], trust))
        return lengths

    assert expected(1.0) == known
    half = expected(0.5)
    assert (half.mean, half.std) == (pytest.approx(200.0), pytest.approx(20.0))
    assert expected(0.0).mean == pytest.approx(100.0)
    assert trusted(LengthStatistics(dataset, [None, known], 1.0)) == [dataset, known]
    assert trusted(LengthStatistics(None, [None])) == [None]
    nothing = LengthMoments(0.0, 0.0, 1)
    assert trusted(LengthStatistics(dataset, [nothing], 0.5)) == [nothing]


def test_statistics_are_of_the_prompts_that_are_asked_for():
    history = history_of([("a", finished(10, 30)), ("b", finished(50, 70))])
    said = history.statistics(["b", "never", "a"])
    assert said == LengthStatistics(history.dataset(), [history.of("b"), None, history.of("a")], 1.0)
