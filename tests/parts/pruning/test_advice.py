"""Is pruning worth it, beside groups of as many candidates as it keeps?"""

import random

import pytest

from vllm_rollout.parts.pruning.rules.advice import MIN_GROUPS, Advice, advise
from vllm_rollout.parts.pruning.rules.report import RewardedCandidate
from vllm_rollout.parts.pruning.rules.survivors import choose_survivors

LENGTH = 10
AFTER = 7 * LENGTH
"""A pruned candidate has generated an eighth of an answer."""
NUM_GROUPS = 600


def rewarded(
    rate: float, *, told: float, survival: tuple[float, float] = (0.5, 0.5), active: bool = True, concentration=20.0
) -> list[RewardedCandidate]:
    """Groups of 16 of prompts with this mean success rate. A binary score is right about success with chance `told`,
    and says who survives with which probability: those it expects to fail, those it expects to succeed."""
    rng = random.Random(5)
    right = rate * told / (rate * told + (1 - rate) * (1 - told))
    wrong = rate * (1 - told) / (rate * (1 - told) + (1 - rate) * told)
    outcomes = []
    for g in range(NUM_GROUPS):
        of_prompt = rng.betavariate(rate * concentration, (1 - rate) * concentration)
        positives = [rng.random() < of_prompt for _ in range(16)]
        scores = [positive == (rng.random() < told) for positive in positives]
        drawn = choose_survivors({i: survival[s] for i, s in enumerate(scores)}, seed=1, group=str(g), at_least=1)
        for i, (positive, score) in enumerate(zip(positives, scores, strict=True)):
            if active and i not in drawn.kept:
                continue
            outcomes.append(
                RewardedCandidate(
                    scores={"head": float(score)},
                    success_probabilities={"head": right if score else wrong},
                    positive=positive,
                    weight=1 / drawn.probabilities[i] if active else 1.0,
                    group=f"rollout/{g}",
                    active=active,
                    keep=i in drawn.kept,
                    survival_probability=drawn.probabilities[i],
                    cold=False,
                    tokens_after=AFTER,
                    is_sample=True,
                )
            )
    return outcomes


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_pruning_at_random_is_worth_what_its_tokens_are(rate: float, active: bool):
    """Eight of sixteen at random are eight candidates, and eight beginnings of an eighth each: 8 / 9."""
    advice = advise(rewarded(rate, told=0.5, active=active), LENGTH)
    assert advice.cheaper == "fewer"
    assert advice.value == pytest.approx(8 / 9, rel=0.05)
    assert (advice.num_groups, advice.num_kept) == (NUM_GROUPS, 8.0)
    assert advice.num_candidates == pytest.approx(16.0)
    assert "groups of 8 without pruning" in advice.reason


@pytest.mark.parametrize("active", [True, False])
def test_a_score_that_finds_what_is_rare_pays(active: bool):
    advice = advise(rewarded(0.05, told=0.8, survival=(0.4, 0.9), active=active), LENGTH)
    assert advice.cheaper == "prune"
    assert advice.value > 1.15


def test_steering_where_success_is_in_the_middle_does_not_pay():
    """The rewards of survivors differ as before, but those who are chosen by the score are more alike."""
    steered = advise(rewarded(0.5, told=0.9, survival=(0.2, 0.8)), LENGTH)
    assert steered.cheaper == "fewer"
    assert steered.value < 0.8


def test_what_pruned_candidates_have_generated_counts():
    late = [outcome._replace(tokens_after=0) for outcome in rewarded(0.5, told=0.5)]
    assert advise(late, LENGTH).value == pytest.approx(1 / 2, rel=0.05)


def test_nothing_is_advised_by_what_says_nothing():
    outcomes = rewarded(0.5, told=0.5)
    few = [o for o in outcomes if int(o.group.split("/")[1]) < MIN_GROUPS - 1]
    nothing_known = "64 groups have to be judged and rewarded in which nobody races"
    assert advise([], LENGTH) == Advice(None, nothing_known, 0)
    assert advise(few, LENGTH) == Advice(None, nothing_known, MIN_GROUPS - 1)
    assert advise([o._replace(is_sample=False) for o in outcomes], LENGTH) == Advice(None, nothing_known, 0)
    assert advise([o._replace(cold=True) for o in outcomes], LENGTH) == Advice(None, nothing_known, 0)
    alike = advise([o._replace(positive=True) for o in outcomes], LENGTH)
    assert (alike.cheaper, alike.reason) == (None, "no reward differs from the others")
    kept = advise([o._replace(active=False, keep=True) for o in outcomes], LENGTH)
    assert (kept.cheaper, kept.reason) == (None, "pruning keeps nearly all, or nearly none")
