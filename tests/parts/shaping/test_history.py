import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.config import HISTORY_KEY_CHARS
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.memories.rules import MAX_HISTORY_PROMPTS
from vllm_rollout.parts.shaping.rules.history import (
    HISTORY_DATASET_HALF_LIFE,
    HISTORY_PROMPT_WEIGHT,
    LengthHistory,
    ObservedLength,
    observed_lengths,
)
from vllm_rollout.parts.shaping.rules.life_table import PRIOR_LOG_STD

observed = st.lists(st.builds(ObservedLength, st.integers(0, 5000), st.booleans()), max_size=6)
groups = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d"]), observed), max_size=12)


def finished(*lengths: int) -> list[ObservedLength]:
    return [ObservedLength(length, False) for length in lengths]


def cut(*lengths: int) -> list[ObservedLength]:
    return [ObservedLength(length, True) for length in lengths]


def history_of(groups: list[tuple[str, list[ObservedLength]]], max_prompts: int = 100) -> LengthHistory:
    history = LengthHistory(max_prompts)
    for key, lengths in groups:
        history.observe(key, lengths)
    return history


def weights(newest: float, num: int) -> list[float]:
    """Exponential weights of `num` values, oldest first, that sum to 1."""
    raw = [(1 - newest) ** age for age in reversed(range(num))]
    return [weight / sum(raw) for weight in raw]


def test_nothing_is_known_before_the_first_group_of_which_not_all_failed():
    history = history_of([("a", [])])
    assert history.to_state() == LengthHistory().to_state()
    assert history.of("a") is None
    assert history.dataset() is None
    assert history.log_std() == pytest.approx(PRIOR_LOG_STD)
    assert len(history) == 0


def test_a_prompt_averages_exponentially_over_its_groups():
    samples = [[100, 200], [300, 500], [250, 260, 270]]
    history = history_of([("a", finished(*lengths)) for lengths in samples])
    shares = weights(HISTORY_PROMPT_WEIGHT, 3)
    known = history.of("a")
    assert known.num_groups == 3
    assert known.mean == pytest.approx(sum(w * statistics.fmean(x) for w, x in zip(shares, samples, strict=True)))
    assert known.variance == pytest.approx(
        sum(w * statistics.variance(x) for w, x in zip(shares, samples, strict=True))
    )


def test_a_single_length_moves_the_mean_only():
    history = history_of([("a", finished(100))])
    assert history.of("a") is None
    history.observe("a", finished(100, 300))
    history.observe("a", finished(1000))
    shares = weights(HISTORY_PROMPT_WEIGHT, 3)
    known = history.of("a")
    assert known.mean == pytest.approx(shares[0] * 100 + shares[1] * 200 + shares[2] * 1000)
    assert known.variance == 20_000
    assert known.num_groups == 3


def test_the_data_set_has_total_variance_whatever_the_prompts():
    rng = random.Random(0)
    samples = [[rng.randrange(1, 5000) for _ in range(rng.randrange(1, 9))] for _ in range(40)]
    history = history_of([(str(i % 7), finished(*lengths)) for i, lengths in enumerate(samples)])
    shares = weights(1 - 0.5 ** (1 / HISTORY_DATASET_HALF_LIFE), 40)
    mean = sum(w * statistics.fmean(x) for w, x in zip(shares, samples, strict=True))
    second = sum(w * statistics.fmean([v * v for v in x]) for w, x in zip(shares, samples, strict=True))
    known = history.dataset()
    assert known.num_groups == 40
    assert known.mean == pytest.approx(mean)
    assert known.variance == pytest.approx(second - mean**2)


@pytest.mark.thorough
@pytest.mark.parametrize("log_std", [0.4, 1.1])
def test_what_fits_lean_on_is_learned_from_stopped_groups(log_std):
    rng = random.Random(1)
    history = LengthHistory()
    for i in range(600):
        scale = 400 * math.exp(0.5 * rng.gauss(0, 1))
        drawn = sorted(max(1, round(scale * math.exp(log_std * rng.gauss(0, 1)))) for _ in range(16))
        history.observe(str(i), finished(*drawn[:8]) + cut(*[drawn[7]] * 8))
    assert history.log_std() == pytest.approx(log_std, rel=0.1)


def test_groups_that_all_ran_into_the_cap_spread_more_than_short_ones():
    """The sample variance of these groups is 0."""
    history = history_of([("capped", cut(*[1024] * 8)), ("short", finished(*range(100, 180, 10)))])
    assert history.of("capped").std > 10 * history.of("short").std


def test_the_prompt_seen_longest_ago_is_forgotten():
    group = finished(10, 20)
    history = history_of([("a", group), ("b", group), ("a", group), ("c", group)], max_prompts=2)
    assert len(history) == 2
    assert history.of("b") is None
    assert history.of("a").num_groups == 2
    assert history.dataset().num_groups == 4


@pytest.mark.parametrize("key", ["", "x" * (HISTORY_KEY_CHARS + 1), 7, None])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(ValueError, match="key of a prompt must be a string of 1 to"):
        LengthHistory().observe(key, finished(1, 2))


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(groups, groups)
def test_a_restored_history_goes_on_as_the_saved_one(before, after):
    saved = history_of(before, max_prompts=3)
    state = json.loads(json.dumps(saved.to_state()))
    restored = LengthHistory.from_state(state, max_prompts=3)
    assert restored.to_state() == saved.to_state()
    for key, lengths in after:
        saved.observe(key, lengths)
        restored.observe(key, lengths)
    assert restored.to_state() == saved.to_state()
    assert [restored.of(key) for key in "abcd"] == [saved.of(key) for key in "abcd"]
    assert restored.dataset() == saved.dataset()


GOOD = history_of([("a", finished(10, 20)), ("b", finished(30)), ("a", finished(10, 40))]).to_state()
PROMPT = ["a", 1, 10.0, 1, 5.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": None}, "prompts of a length history must be a list"),
        ({"prompts": [PROMPT[:4]]}, r"prompts\[0\] of a length history must be a list of 5"),
        ({"prompts": ["abcde"]}, r"prompts\[0\] of a length history must be a list"),
        ({"prompts": [PROMPT, PROMPT]}, "'a' comes twice"),
        ({"prompts": [[7, *PROMPT[1:]]]}, "key of a prompt"),
        ({"prompts": [["a", 1.0, 10.0, 1, 5.0]]}, "must be an integer in .*, got 1.0"),
        ({"prompts": [["a", 0, 10.0, 0, 0.0]]}, "must be an integer in .*, got 0"),
        ({"prompts": [["a", 1, -10.0, 1, 5.0]]}, "must be a finite number in"),
        ({"prompts": [["a", 1, math.nan, 1, 5.0]]}, "must be a finite number in"),
        ({"prompts": [["a", 1, 1e16, 1, 5.0]]}, "must be a finite number in"),
        ({"prompts": [["a", 1, 10.0, 1, math.inf]]}, "must be a finite number in"),
        ({"prompts": [["a", 1, 10.0, 2, 5.0]]}, "a variance without a group"),
        ({"prompts": [["a", 1, 10.0, 0, 5.0]]}, "a variance without a group"),
        ({"prompts": [["a", 4, 10.0, 1, 5.0]]}, "have seen 4 groups, but the data set 3"),
        ({"dataset": None}, "have seen 3 groups, but the data set 0"),
        ({"dataset": [3, 10.0]}, "dataset of a length history must be a list of 3"),
        ({"dataset": [3, 10.0, -1.0]}, "dataset of a length history must be a finite number"),
        ({"log_lengths": [1.0]}, "log_lengths of a length history must be a list of 2"),
        ({"log_lengths": [1.0, math.nan]}, "log_lengths of a length history must be a finite number"),
        ({"log_lengths": [1.0, 0.0]}, "log_lengths of a length history: a sum without a group"),
        ({"prompts": [], "dataset": None, "log_lengths": [1.0, 7.0]}, "a sum without a group"),
        ({"more": 1}, "has the fields"),
    ],
)
def test_states_that_no_history_can_have_had_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LengthHistory.from_state({**GOOD, **change})
    with pytest.raises(ValueError, match="a length history has the fields"):
        LengthHistory.from_state("state")


def test_a_state_of_too_many_prompts_is_refused():
    with pytest.raises(ValueError, match="at most 1 prompts, got 2"):
        LengthHistory.from_state(GOOD, max_prompts=1)
    too_many = {**GOOD, "prompts": [None] * (MAX_HISTORY_PROMPTS + 1)}
    with pytest.raises(ValueError, match=f"at most {MAX_HISTORY_PROMPTS} prompts"):
        LengthHistory.from_state(too_many)


def test_the_largest_numbers_that_are_accepted_stay_acceptable():
    state = {
        "prompts": [["a", 2**50, 1e15, 2**50, 1e36]],
        "dataset": [2**51, 1e15, 1e36],
        "log_lengths": [1e36, 1e-300],
        "shape": GOOD["shape"],
    }
    history = LengthHistory.from_state(state)
    for lengths in (finished(0), cut(2**31, 2**31), finished(0, 2**31)):
        history.observe("b", lengths)
    assert LengthHistory.from_state(history.to_state()).dataset() == history.dataset()


def test_what_was_cut_or_stopped_is_observed_as_censored_and_what_failed_not_at_all():
    endings = [
        Ending(0, "finished", 10),
        Ending(1, "finished", 20, truncated=True),
        Ending(2, "surplus", 12),
        Ending(3, "pruned", 8),
        Ending(4, "failed", 5),
        Ending(5, "surplus", 0),
        Ending(6, "surplus", 11, ended_by_itself=True),
    ]
    assert observed_lengths(endings) == [(10, False), (20, True), (12, True), (8, True), (11, False)]
