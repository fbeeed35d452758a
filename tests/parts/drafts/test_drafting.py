"""The rule for drafts on devices with known costs, with estimates that may be wrong."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.drafts.rules import (
    MARGIN,
    MAX_DRAFT_TOKENS,
    MAX_TRIAL_SHARE,
    NUM_BINS,
    NUM_FIRST_PLAIN,
    TRIAL_WORTH,
    BatchCost,
    DraftingRule,
    bin_of,
)

STEP_S = 0.02
Device = Callable[[int, int], float]
"""Seconds of a step by rows and drafts."""


def bound_by_memory(num_rows: int, num_drafts: int) -> float:
    """Reading the weights takes as long as computing 200 tokens."""
    return STEP_S * max(1.0, (num_rows + num_drafts) / 200)


def bound_by_arithmetic(num_rows: int, num_drafts: int) -> float:
    """Step time of a device on which each token costs the same."""
    return STEP_S * (num_rows + num_drafts)


def like_a_cpu(num_rows: int, num_drafts: int) -> float:
    """A step takes as long as 20 tokens, beside its own."""
    return STEP_S * (20 + num_rows + num_drafts)


def slow_to_verify(num_rows: int, num_drafts: int) -> float:
    """Tokens are free, and any draft at all costs a third of a step."""
    return STEP_S * (1.0 + (num_drafts > 0) / 3)


def lengths_of(rule: DraftingRule, probabilities: list[list[float]]) -> list[int]:
    """Number of verified drafts of each row."""
    bins = [[bin_of(value) for value in values] for values in probabilities]
    counts = Counter(chain(*bins))
    return rule.choose(len(bins), [counts[bin] for bin in range(NUM_BINS)]).lengths(bins)


def speed_up(
    device: Device,
    num_rows: int,
    true: list[float],
    said: list[float] | None = None,
    *,
    steps: int = 2000,
    seed: int = 1,
) -> float:
    """Tokens per second over those without drafts, where each row always has drafts with these true probabilities."""
    rule, rng = DraftingRule(), Random(seed)
    bins = [bin_of(value) for value in said or true]
    num_tokens, seconds, pending = 0, 0.0, [0] * num_rows
    for _ in range(steps):
        took = device(num_rows, sum(pending)) * rng.uniform(0.9, 1.1)
        drafted, accepted = [0] * NUM_BINS, [0] * NUM_BINS
        for num in pending:
            draw = rng.random()
            num_accepted = sum(draw < value for value in true[:num])
            for place in range(num):
                drafted[bins[place]] += 1
                accepted[bins[place]] += place < num_accepted
            num_tokens += 1 + num_accepted
        rule.verified(drafted, accepted)
        rule.took(num_rows, sum(pending), took)
        seconds += took
        longest = rule.longest(num_rows)
        pending = lengths_of(rule, [(said or true)[:longest]] * num_rows) if longest else [0] * num_rows
    return num_tokens / seconds * device(num_rows, 0) / num_rows


def rollout_s(device: Device, lengths: list[int], true: list[float], seed: int, rule: DraftingRule | None) -> float:
    """Seconds of a rollout whose rows have such drafts in every other step, 10 % of luck in each step, and a rule that
    is told of a step when the next one is chosen, as a worker tells it; None: without drafts."""
    rng, left, seconds, pending, before = Random(seed), list(lengths), 0.0, [0] * len(lengths), None
    while left:
        took = device(len(left), sum(pending)) * rng.uniform(0.9, 1.1)
        drafted, accepted = [0] * NUM_BINS, [0] * NUM_BINS
        for row, num in enumerate(pending):
            draw = rng.random()
            num_accepted = sum(draw < value for value in true[:num])
            for place in range(num):
                drafted[bin_of(true[place])] += 1
                accepted[bin_of(true[place])] += place < num_accepted
            left[row] -= 1 + num_accepted
        seconds += took
        this, left = (len(left), sum(pending), took), [tokens for tokens in left if tokens > 0]
        pending = [0] * len(left)
        if rule is not None and left:
            rule.verified(drafted, accepted)
            has_drafts = [rng.random() < 0.5 for _ in left]
            if longest := rule.longest(len(left)):
                pending = lengths_of(rule, [true[:longest] if some else [] for some in has_drafts])
            if before is not None:
                rule.took(*before)
            before = this
    return seconds


MANY = [pytest.param(num, marks=pytest.mark.thorough) for num in (100, 256)]
LIKELY = [0.7, 0.5, 0.35, 0.25, 0.15, 0.1]


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
def test_where_the_device_waits_for_its_memory_drafts_bring_nearly_all_they_can(num_rows):
    reads = 1 + sum(LIKELY[: 200 // num_rows - 1])
    assert speed_up(bound_by_memory, num_rows, LIKELY) > 0.85 * reads


@pytest.mark.parametrize("device", [bound_by_memory, bound_by_arithmetic, slow_to_verify])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 32, *MANY])
@pytest.mark.parametrize("true", [LIKELY, [0.2, 0.05], [0.02], []])
def test_drafts_cost_two_percent_at_most_wherever_they_do_not_pay(device, num_rows, true):
    assert speed_up(device, num_rows, true) > 0.98


@pytest.mark.parametrize(
    ("device", "shortest"), [(like_a_cpu, 8), (like_a_cpu, 64), (bound_by_arithmetic, 64), (slow_to_verify, 64)]
)
@pytest.mark.parametrize("num_rows", [1, 4, 64])
@pytest.mark.parametrize("true", [LIKELY, [0.2, 0.05], [0.02]])
def test_also_a_short_rollout_whose_batch_shrinks_loses_two_percent_at_most(device, num_rows, true, shortest):
    drafted = plain = 0.0
    for seed in range(20):
        lengths = [Random(f"{seed}/{row}").randint(shortest, shortest + 64) for row in range(num_rows)]
        drafted += rollout_s(device, lengths, true, seed, DraftingRule())
        plain += rollout_s(device, lengths, true, seed, None)
    assert plain / drafted > 0.98


def test_a_trial_is_made_when_the_one_before_is_timed_and_little_was_lost():
    rule, costs, looked = DraftingRule(), [], []
    for step in range(1000):
        longest = rule.longest(4)
        looked.append(longest > 0)
        num = sum(lengths_of(rule, [[0.02]] * 4)) if longest and step < 900 else 0
        costs.append(num)
        if step:
            rule.took(4, costs[-2], STEP_S * (1 + costs[-2] / 4))
    trials = [step for step, num in enumerate(costs) if num]
    assert trials[0] == NUM_FIRST_PLAIN + 1, "the first one is made at once"
    lost = 0.25 * (1 - TRIAL_WORTH * 0.025)
    for num, step in enumerate(trials[:4]):
        assert 0 <= step - num * lost / MAX_TRIAL_SHARE < 4
    assert sum(looked[40:64]) <= 4, "who may not try looks for drafts in one step of eight"
    assert len(trials) == 10, "later ones are 128 steps apart"


def test_a_trial_loses_what_it_takes_longer_less_half_of_what_it_should_bring():
    cost = BatchCost()
    assert cost.took(0, STEP_S) == 0
    cost.trial_tokens = 0.2
    assert cost.took(0.25, 1.25 * STEP_S) == pytest.approx(0.15 * STEP_S)
    assert cost.took(0.25, 1.25 * STEP_S) == 0, "it is no trial"
    cost.trial_tokens = 0.8
    assert cost.took(0.25, 1.25 * STEP_S) == 0, "nothing is gained by one"


def test_drafts_that_pay_are_no_trial():
    rule = DraftingRule()
    cost = rule._cost(4)
    cost.fixed, cost.slope, cost.trial_tokens = 0.0, 0.1, 0.2
    assert lengths_of(rule, [[0.9]] * 4) == [1] * 4
    assert cost.trial_tokens is None


def test_a_trial_expects_what_its_drafts_bring_and_has_no_more_than_there_are():
    rule = DraftingRule()
    for _ in range(3):
        rule.longest(16)
    cost, counts = rule._cost(16), [0] * NUM_BINS
    counts[4] = 3  # where a quarter of 16 is wanted
    assert rule.choose(16, counts).most == 3
    assert cost.trial_tokens == pytest.approx(3 / 16 * rule.accepted_ratio(4))


def test_a_trial_has_the_likeliest_drafts():
    rule = DraftingRule()
    for _ in range(3):
        rule.longest(8)
    assert lengths_of(rule, [[0.1, 0.1], [0.3], [0.2], [0.3, 0.1], [0.1], [], [], []]) == [0, 1, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("device", [bound_by_memory, bound_by_arithmetic, slow_to_verify])
@pytest.mark.parametrize("num_rows", [1, 16, 128])
def test_estimates_that_lie_are_found_out(device, num_rows):
    assert speed_up(device, num_rows, [0.03, 0.0, 0.0], [0.95, 0.9, 0.85]) > 0.98
    if device is bound_by_memory and num_rows < 128:
        assert speed_up(device, num_rows, LIKELY, [value / 10 for value in LIKELY]) > 1.3, "the other way round, too"


def test_a_device_that_becomes_slow_to_verify_has_no_more_drafts():
    rule, rng = DraftingRule(), Random(0)

    def drafts_of(device: Device, steps: int) -> list[int]:
        taken, num = [], 0
        for _ in range(steps):
            rule.took(8, num, device(8, num) * rng.uniform(0.95, 1.05))
            longest = rule.longest(8)
            num = sum(lengths_of(rule, [LIKELY[:longest]] * 8)) if longest else 0
            taken.append(num)
        return taken

    assert sum(drafts_of(bound_by_memory, 400)[-100:]) > 100 * 8
    assert sum(drafts_of(bound_by_arithmetic, 1000)[-300:]) < 0.02 * 300 * 8
    assert sum(drafts_of(bound_by_memory, 2000)[-100:]) > 100 * 8, "and has them again"


def test_a_batch_size_that_is_new_believes_what_its_neighbour_has_seen():
    rule = DraftingRule()
    for _ in range(40):
        rule.took(16, 0, STEP_S)
        rule.took(16, 32, STEP_S * 1.1)
    rule.took(8, 0, STEP_S)
    rule.took(8, 0, STEP_S)
    assert rule.longest(8) == MAX_DRAFT_TOKENS
    assert lengths_of(rule, [[0.6, 0.4]] * 8) == [2] * 8


@given(
    st.lists(st.integers(0, 5), min_size=NUM_BINS, max_size=NUM_BINS),
    st.integers(1, 9),
    st.floats(0, 0.5),
    st.floats(0, 2),
)
def test_drafts_are_chosen_as_if_all_choices_were_tried(num_drafts, num_rows, fixed, slope):
    rule = DraftingRule()
    cost = rule._cost(num_rows)
    cost.fixed, cost.slope, cost.num_trials, cost.since_drafts = fixed, slope, 99, 0

    def rate(least: int) -> float:
        taken = sum(num_drafts[least:])
        tokens = num_rows + sum(num_drafts[bin] * rule.accepted_ratio(bin) for bin in range(least, NUM_BINS))
        return tokens / num_rows / cost.ratio(taken / num_rows)

    least, most = rule.choose(num_rows, num_drafts)
    assert most == sum(num_drafts[least:])
    best = max(map(rate, range(NUM_BINS)))
    assert rate(least) == pytest.approx(best if best > MARGIN else 1.0)


def test_a_higher_estimate_is_never_believed_less():
    rule = DraftingRule()
    rule.verified([0] * 5 + [100] + [0] * 14, [0] * 5 + [90] + [0] * 14)
    ratios = [rule.accepted_ratio(bin) for bin in range(NUM_BINS)]
    assert ratios == sorted(ratios)
    assert ratios[6] > 0.7 > 0.3 > ratios[4], "what lies above has not been seen as often"


def test_steps_that_something_held_up_do_not_end_drafts():
    cost = BatchCost()
    for _ in range(20):
        cost.took(0, STEP_S)
        cost.took(2, STEP_S * 1.1)
    before = cost.ratio(2)
    cost.took(2, 100 * STEP_S)
    assert cost.ratio(2) < 1.5 * before
    cost.took(0, 100 * STEP_S)
    assert cost.plain_s < 2 * STEP_S
