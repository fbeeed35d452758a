"""Choice of survivors: their probabilities, and the part of chance."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.pruning.rules.survivors import chance, choose_survivors

TRIALS = 4000


def drawn(wanted, at_least):
    """Survivors for each seed from 0 on."""
    return [
        choose_survivors(dict(enumerate(wanted)), seed=seed, group="g", at_least=at_least) for seed in range(TRIALS)
    ]


def within(frequency: float, p: float) -> bool:
    """4.5 standard errors: the seeds are fixed, so this holds always or never."""
    return abs(frequency - p) <= 4.5 * math.sqrt(p * (1 - p) / TRIALS) + 1e-9


@pytest.mark.parametrize("at_least", [0, 2, 5])
@pytest.mark.parametrize(
    "wanted",
    [
        (0.05, 0.3, 0.5, 0.5, 0.7, 0.95),
        (0.3,),
        (0.9, 0.05),
        (0.05, 0.05, 0.95, 0.95, 0.5),
        (0.2,) * 5,
        (0.95,) * 3,
        (0.05, 0.07, 0.6, 0.61),
        (1.0, 0.05, 0.5),
        (0.5, 0.5),
    ],
)
def test_each_is_kept_with_the_probability_that_is_reported(wanted, at_least):
    all_drawn = drawn(wanted, at_least)
    probabilities = all_drawn[0].probabilities
    numbers = {len(survivors.kept) for survivors in all_drawn}
    assert min(numbers) >= min(at_least, len(wanted))
    total = sum(probabilities.values())
    assert numbers <= {math.floor(total + 1e-9), math.ceil(total - 1e-9)}
    for index, p in probabilities.items():
        assert p >= wanted[index]
        assert within(sum(index in survivors.kept for survivors in all_drawn) / TRIALS, p)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.integers(0, 40), st.floats(0.01, 1.0), max_size=20),
    st.integers(0, 25),
    st.integers(0, 1000),
    st.randoms(use_true_random=False),
)
def test_floor_holds_and_the_order_of_siblings_does_not_matter(wanted, at_least, seed, rng):
    survivors = choose_survivors(wanted, seed=seed, group="g", at_least=at_least)
    assert len(survivors.kept) >= min(at_least, len(wanted))
    assert survivors.kept <= wanted.keys() == survivors.probabilities.keys()
    assert all(wanted[index] <= p <= 1 for index, p in survivors.probabilities.items())
    if sum(wanted.values()) >= at_least:
        assert survivors.probabilities == wanted
    else:
        assert sum(survivors.probabilities.values()) == pytest.approx(min(at_least, len(wanted)))
    shuffled = list(wanted.items())
    rng.shuffle(shuffled)
    assert choose_survivors(dict(shuffled), seed=seed, group="g", at_least=at_least) == survivors


def test_the_floor_raises_all_by_the_same_until_they_are_certain():
    raised = choose_survivors({0: 0.2, 1: 0.4, 2: 0.9}, seed=0, group="g", at_least=2).probabilities
    assert raised == pytest.approx({0: 0.4, 1: 0.6, 2: 1.0})


def test_chance_is_the_same_in_every_process_and_uniform():
    assert chance(7, "q1", 3) == 0.1678228050004691
    draws = sorted(chance(0, "group", i) for i in range(2000))
    assert 0 <= draws[0] <= draws[-1] < 1
    assert max(abs(draw - (i + 0.5) / 2000) for i, draw in enumerate(draws)) < 1.36 / math.sqrt(2000)
    assert len({chance(1, "12", 3), chance(11, "2", 3), chance(1, "1", 23), chance(1, "2:3", 1)}) == 4


def test_draws_of_different_indices_and_groups_are_independent():
    pairs = [
        (0 in choose_survivors({0: 0.5}, seed=s, group="g").kept, i in choose_survivors({i: 0.5}, seed=s, group=g).kept)
        for s in range(2000)
        for i, g in [(1, "g"), (0, "h")]
    ]
    assert sum(a == b for a, b in pairs) / len(pairs) == pytest.approx(0.5, abs=0.04)
