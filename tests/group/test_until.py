"""Groups that end when they teach: what runs, what comes back, what it weighs."""

import json
import math
import random
import re
import time
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import ROOT
from benchmarks.rewards import variance
from benchmarks.rewards.variance_rounds import WAYS, Round
from benchmarks.rewards.variance_weights import ends, signal, weights
from tests.support.work import faster_than_linear
from vllm_rollout.group.rewards.estimates import ESTIMATORS, advantages
from vllm_rollout.group.rewards.until import (
    UNIFORM,
    CandidateReward,
    Decision,
    GroupRewards,
    Prior,
    UntilTerms,
    chance_of_same,
    decide,
    group_weight,
    num_needed,
    num_that_teach,
    num_to_refill,
    prior_of,
    spares_wanted,
)

VOID = None
OUTCOMES = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, VOID]), min_size=16, max_size=16)
SIZES = st.tuples(st.integers(2, 5), st.integers(0, 8)).map(lambda each: (each[0], each[0] + each[1]))
PRIORS = st.tuples(st.floats(0.01, 50), st.floats(0.01, 50)).map(lambda each: Prior(*each))


def play(terms, outcomes, seed, prior=UNIFORM):
    """A whole group whose candidate i gets the reward `outcomes[i]`: (decision, candidates) at its end, in an order of
    events that is drawn."""
    rng = random.Random(seed)
    candidates: list[CandidateReward] = []
    num_graded = 0
    for _ in range(10 * terms.max_candidates):
        decision = decide(terms, candidates, prior)
        for index in decision.stop:
            assert candidates[index].stage in ("running", "awaited")
            candidates[index] = CandidateReward(index, "gone")
        candidates += [CandidateReward(len(candidates) + more, "running") for more in range(decision.launch)]
        assert len(candidates) <= terms.max_candidates
        if decision.kind != "wait":
            return decision, candidates
        index = rng.choice([each.index for each in candidates if each.stage in ("running", "awaited")])
        if candidates[index].stage == "running":
            candidates[index] = CandidateReward(index, "awaited", chance=rng.choice([None, rng.random()]))
        elif outcomes[index] is VOID:
            candidates[index] = CandidateReward(index, "gone")
        else:
            candidates[index] = CandidateReward(index, "graded", outcomes[index], num_graded)
            num_graded += 1
    raise AssertionError(f"a group does not end: {candidates}")


def by_index(terms, outcomes):
    """Reference for the chosen candidates, computed without events."""
    graded = [(index, reward) for index, reward in enumerate(outcomes[: terms.max_candidates]) if reward is not VOID]
    chosen = graded[: terms.group_size]
    for at in range(terms.group_size, len(graded)):
        if len({reward for _, reward in chosen}) > 1:
            break
        chosen[-1] = graded[at]
    if len({reward for _, reward in chosen}) == 1:
        chosen = graded[: terms.group_size]
    return tuple(index for index, _ in chosen)


@given(OUTCOMES, SIZES, st.integers(), PRIORS)
def test_by_index_what_comes_back_is_a_function_of_the_rewards(outcomes, sizes, seed, prior):
    terms = UntilTerms(*sizes)
    decision, candidates = play(terms, outcomes, seed, prior)
    if VOID in outcomes:  # else nobody is missed: who was stopped, or never launched, changes nothing
        outcomes = [each.reward for each in candidates]
    returned = by_index(terms, outcomes)
    assert decision.returned == returned
    assert decision.kind == ("complete" if len(returned) == terms.group_size else "incomplete")
    assert decision.teaches == (len({outcomes[index] for index in returned}) > 1)
    graded = [reward for reward in outcomes[: terms.max_candidates] if reward is not VOID]
    assert decision.num_graded == (num_that_teach(graded, terms.group_size) or len(graded))
    assert decision.success == (pytest.approx(fmean(graded[: terms.group_size])) if graded else None)
    assert not any(each.stage in ("running", "awaited") for each in candidates)


@given(OUTCOMES, SIZES, st.integers())
def test_by_grading_it_teaches_as_soon_as_anything_differs(outcomes, sizes, seed):
    terms = UntilTerms(*sizes, order="grading")
    decision, candidates = play(terms, outcomes, seed)
    graded = [each for each in candidates if each.stage == "graded"]
    assert {each.index for each in graded} >= set(decision.returned)
    assert len(decision.returned) == min(len(graded), terms.group_size)
    assert decision.teaches == (len({each.reward for each in graded}) > 1)
    if len(graded) > terms.group_size:
        assert len({each.reward for each in graded if each.place < len(graded) - 1}) == 1


def test_spares_before_whom_rewards_differ_are_stopped_but_those_that_a_void_one_may_need():
    graded = [CandidateReward(0, "graded", 0.0), CandidateReward(1, "graded", 1.0)]
    running = [CandidateReward(index, "running") for index in (2, 3, 4, 5)]
    assert decide(UntilTerms(4, 8), graded + running) == Decision(stop=(4, 5))
    assert decide(UntilTerms(4, 7), graded + running) == Decision(stop=(5,))
    assert decide(UntilTerms(4, 6), graded + running) == Decision()


def test_a_void_candidate_leaves_its_place_to_a_spare_and_then_to_a_new_one():
    def group(*stages):
        rewards = iter([1.0, 0.0, 1.0])
        return [
            CandidateReward(index, stage, next(rewards) if stage == "graded" else None)
            for index, stage in enumerate(stages)
        ]

    terms = UntilTerms(3, 6)
    assert decide(terms, group("graded", "gone", "graded", "running")).launch == 0
    assert decide(terms, group("graded", "gone", "graded")).launch == 1
    assert decide(terms, group("graded", "gone", "graded", "graded")).returned == (0, 2, 3)
    assert num_to_refill(group_size=3, max_candidates=6, num_launched=4, num_alive=3) == 0
    assert num_to_refill(group_size=3, max_candidates=6, num_launched=4, num_alive=2) == 1
    assert num_to_refill(group_size=3, max_candidates=4, num_launched=4, num_alive=0) == 0


def test_a_group_begins_with_its_size_and_doubles_under_an_even_prior():
    assert decide(UntilTerms(8, 64), []).launch == 8
    same = [CandidateReward(index, "graded", 0.0, index) for index in range(8)]
    assert decide(UntilTerms(8, 64), same).launch == 9
    assert decide(UntilTerms(8, 12), same).launch == 4
    assert decide(UntilTerms(8, 64), same, prior_of(16, 8)).launch == 2
    assert decide(UntilTerms(8, 64), [], prior_of(100, 0, 0.05)).launch == 64


@given(PRIORS, st.integers(0, 12), st.sampled_from([0.0, 1.0]), st.integers(0, 20))
def test_chances_are_those_of_a_beta_binomial(prior, num, reward, more):
    def beta(successes, failures):
        return math.lgamma(successes) + math.lgamma(failures) - math.lgamma(successes + failures)

    seen = (prior.successes + num * reward, prior.failures + num * (1 - reward))
    kinds = [reward] if num else [0.0, 1.0]
    wanted = sum(math.exp(beta(seen[0] + more * kind, seen[1] + more * (1 - kind)) - beta(*seen)) for kind in kinds)
    assert chance_of_same(prior, [reward] * num, more) == pytest.approx(min(1, wanted), rel=1e-6, abs=1e-12)
    assert chance_of_same(prior, [0.0, 1.0], more) == 0


@given(PRIORS, st.integers(1, 12), st.integers(0, 40), st.floats(0.05, 0.95))
def test_as_many_are_needed_as_make_the_chance_and_spares_are_those_beyond_the_group(prior, num, most, chance):
    rewards = [0.0] * num
    need = num_needed(prior, rewards, most, chance)
    assert need == most or chance_of_same(prior, rewards, need) <= 1 - chance + 1e-9
    assert need == 0 or chance_of_same(prior, rewards, need - 1) > 1 - chance - 1e-9
    assert num_needed(prior, [0.0, 1.0], most, chance) == 0
    terms = UntilTerms(8, 64)
    short = max(0, 8 - num)
    assert spares_wanted(terms, prior, rewards, most, chance) == max(
        0, num_needed(prior, rewards, most + short, chance) - short
    )


def test_a_group_that_has_failed_ten_thousand_times_is_decided_on_at_once():
    same = [CandidateReward(index, "graded", 0.0, index) for index in range(16_384)]
    began = time.perf_counter()
    assert decide(UntilTerms(8, 32_768), same).launch == 16_384
    assert time.perf_counter() - began < 2  # it was 13 s, in which no other client was heard


@given(PRIORS, st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 20))
def test_what_the_head_says_of_awaited_rewards_stands_for_them(prior, awaited, num, most):
    rewards = [0.0] * num
    need = num_needed(prior, rewards, most, awaited=awaited)

    def all_same(more):
        fail = math.prod(1 - each for each in awaited) * math.prod(
            (prior.failures + num + drawn) / (sum(prior) + num + drawn) for drawn in range(more)
        )
        succeed = math.prod(awaited) * math.prod(
            (prior.successes + drawn) / (sum(prior) + drawn) for drawn in range(more)
        )
        return fail + (0 if num else succeed)

    assert need == next((more for more in range(most) if all_same(more) <= 0.5 + 1e-9), most)
    assert num_needed(prior, [0.0, 1.0], most, awaited=awaited) == 0


@pytest.mark.parametrize(("chance", "num_launched"), [(0.02, 1), (0.98, 1), (0.5, 0), (None, 0)])
def test_a_group_whose_head_expects_no_difference_goes_on_before_its_rewards_are_there(chance, num_launched):
    awaited = [CandidateReward(index, "awaited", chance=chance) for index in range(4)]
    assert decide(UntilTerms(4, 16), awaited).launch == num_launched
    running = [*awaited, CandidateReward(4, "running")]
    assert decide(UntilTerms(4, 16), running).launch == 0
    half = [*awaited[:2], *(CandidateReward(index, "running") for index in (2, 3))]
    assert decide(UntilTerms(4, 16), half).launch == 0


def test_a_prior_counts_no_more_of_the_past_than_sixteen_rewards():
    assert prior_of(0, 0) == UNIFORM
    assert prior_of(8, 2) == Prior(3, 7)
    assert prior_of(1600, 400, 0.25) == pytest.approx((4.5, 13.5))
    with pytest.raises(ValueError, match=re.escape("chance must be a finite number in [0, 1], got 2")):
        prior_of(0, 0, 2)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((1, 8), "group_size of at least 2, got 1"), ((8, 7), "max_candidates must be at least group_size (8), got 7")],
)
def test_terms_that_could_never_teach_are_refused(sizes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        UntilTerms(*sizes).checked()
    assert UntilTerms(2, 2).checked() == UntilTerms(2, 2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("group_size", "most"), [(2, 2), (2, 5), (3, 3), (3, 7)])
def test_weights_are_those_of_every_sequence_of_rewards(estimator, group_size, most):
    rate = 0.3
    sums = dict.fromkeys(("chance", "ours", "weighed", "graded", "returned", "first"), 0.0)
    for outcomes in product([0.0, 1.0], repeat=most):
        chance = math.prod(rate if reward else 1 - rate for reward in outcomes)
        decision, _ = play(UntilTerms(group_size, most), outcomes, seed=0)
        rewards = [outcomes[index] for index in decision.returned]
        value = sum(a * r for a, r in zip(advantages(rewards, estimator), rewards, strict=True))
        for name, each in (
            ("chance", 1),
            ("ours", value),
            ("weighed", value * group_weight(group_size, decision.num_graded)),
            ("graded", decision.num_graded),
            ("returned", fmean(rewards)),
            ("first", decision.success),
        ):
            sums[name] += chance * each
    exact = weights(rate, group_size, most, estimator)
    plain = exact["plain"] * rate * (1 - rate)
    assert sums["chance"] == pytest.approx(1)
    assert sums["ours"] / plain == pytest.approx(exact["ours"], rel=1e-4)
    assert sums["weighed"] / plain == pytest.approx(exact["ours_weighed"], rel=1e-4)
    assert sums["graded"] == pytest.approx(exact["num_graded"])
    assert sums["returned"] - rate == pytest.approx(exact["bias_of_returned"])
    assert sums["first"] == pytest.approx(rate)
    assert sum(end.chance for end in ends(rate, group_size, None)) == pytest.approx(1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_prompt_that_hardly_ever_succeeds_weighs_as_many_times_more_as_there_are_candidates(estimator):
    rare = weights(1e-6, 8, 32, estimator)
    assert rare["ours"] == pytest.approx(32 / 8, rel=1e-3)
    assert rare["ours_weighed"] == pytest.approx(1 + sum(1 / num for num in range(9, 33)), rel=1e-3)
    assert weights(0.3, 8, 8, estimator)["ours"] == pytest.approx(1)


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_weighed_by_group_size_over_graded_rloo_is_that_of_all_that_were_graded(rate):
    exact = weights(rate, 8, 32, "rloo")
    assert exact["ours_weighed"] == pytest.approx(exact["all_graded"])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_closed_form_is_the_estimators(estimator):
    for right in range(9):
        rewards = [1.0] * right + [0.0] * (8 - right)
        assert signal(estimator, 8, right) == pytest.approx(sum(advantages(rewards, estimator)[:right]), rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_a_round_ends_and_asks_for_no_more_than_it_may(way):
    run = Round(WAYS[way], 0.2, 0).run()
    assert run["candidates"] <= WAYS[way].max_candidates * run["prompts"]
    assert run["tokens"] > 0
    assert run["prompts"] >= 1


def test_the_published_result_is_shown(tmp_path):
    record = json.loads((ROOT / "benchmarks/results/variance.json").read_text())
    assert "### Seconds per group that teaches" in variance.tables(record)
    variance.draw(record, tmp_path / "variance.png")
    assert (tmp_path / "variance.png").read_bytes().startswith(b"\x89PNG")


EVENTS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["awaited", "graded", "gone"]), st.sampled_from([0.0, 0.5, 1.0])),
    unique_by=lambda event: event[0],
)


@given(EVENTS, SIZES, st.sampled_from(["index", "grading"]), st.booleans())
def test_what_follows_from_events_follows_from_what_they_come_to(events, sizes, order, is_late):
    terms = UntilTerms(*sizes, order=order)
    num = min(10, terms.max_candidates)
    candidates = {index: CandidateReward(index, "running") for index in range(num)}
    rewards = GroupRewards(terms)
    rewards.launched(range(num))
    for place, (index, stage, value) in enumerate(events):
        if index >= num:
            continue
        if stage == "awaited":
            rewards.awaited(index, value)
            candidates[index] = CandidateReward(index, stage, chance=value)
        elif stage == "graded":
            if is_late:  # a spare that was stopped, and whose reward came all the same
                rewards.gone(index)
            rewards.graded(index, value)
            candidates[index] = CandidateReward(index, stage, value, place)
        else:
            rewards.gone(index)
            candidates[index] = CandidateReward(index, stage)
        assert rewards.decision() == decide(terms, list(candidates.values())[::-1])


def test_thousands_of_rewards_that_are_all_the_same_take_work_by_their_number():
    def play(num: int) -> None:
        rewards = GroupRewards(UntilTerms(2, num))
        rewards.launched(range(2))
        graded, launched = 0, 2
        while graded < launched:
            rewards.graded(graded, 0.0)
            graded += 1
            more = rewards.decision().launch
            rewards.launched(range(launched, launched + more))
            launched += more
        assert (launched, rewards.decision().kind) == (num, "complete")

    assert faster_than_linear(play, 64, 4096) == {}
