import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.pruning.rules.success import (
    MAX_LABEL_WEIGHT,
    MAX_SUM,
    NO_REWARDS,
    SUCCESS_HALF_LIFE,
    SuccessHistory,
)


def rows(history: SuccessHistory) -> list:
    return [row for some in history.prompts(2) for row in some]


def test_sums_by_hand():
    history = SuccessHistory()
    assert history.of("a") == NO_REWARDS
    assert history.of("a").rate is None
    history.observe("a", True, SUCCESS_HALF_LIFE)
    history.observe("a", False, SUCCESS_HALF_LIFE)
    assert history.of("a") == pytest.approx((1.5 * SUCCESS_HALF_LIFE, 0.5 * SUCCESS_HALF_LIFE))
    assert history.of("a").rate == pytest.approx(1 / 3)
    assert history.of("b") == NO_REWARDS


def test_weights_undo_pruning():
    """Half of 8 candidates succeed; 1 of 4 of those that fail is kept, with probability 1/4."""
    history = SuccessHistory()
    for _ in range(4):
        history.observe("a", True, 1.0)
    history.observe("a", False, 4.0)
    assert history.of("a").rate == pytest.approx(0.5, abs=0.05)


def test_the_prompt_rewarded_longest_ago_is_forgotten():
    history = SuccessHistory(max_prompts=2)
    for key in ("a", "b", "a", "c"):
        history.observe(key, True)
    assert [row[0] for row in rows(history)] == ["a", "c"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.floats(1.0, MAX_LABEL_WEIGHT)), max_size=200),
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.floats(1.0, MAX_LABEL_WEIGHT)), max_size=9),
)
def test_a_restored_history_goes_on_as_the_saved_one(before, after):
    history = SuccessHistory(max_prompts=3)
    for reward in before:
        history.observe(*reward)
    restored = SuccessHistory.from_state(json.loads(json.dumps(rows(history))), max_prompts=3)
    for reward in after:
        history.observe(*reward)
        restored.observe(*reward)
    assert rows(restored) == rows(history)
    assert all(0 <= row[2] <= row[1] <= MAX_SUM for row in rows(history))


@pytest.mark.parametrize(
    "rows",
    [
        *(
            [row]
            for row in (
                ["a", 1.0],
                ["", 1.0, 0.0],
                [7, 1.0, 0.0],
                ["a", 0.0, 0.0],
                ["a", 1.0, 1.5],
                ["a", 1.0, -0.5],
                ["a", float("nan"), 0.0],
                ["a", 2 * MAX_SUM, 0.0],
                ["a", True, 0.0],
                {"a": 1},
            )
        ),
        [["a", 1.0, 0.0], ["a", 2.0, 0.0]],
        [["a", 1.0, 0.0], ["b", 2.0, 0.0], ["c", 2.0, 0.0]],
    ],
)
def test_what_no_history_has_been_is_refused(rows):
    with pytest.raises(ValueError, match="success history"):
        SuccessHistory.from_state(rows, max_prompts=2)
