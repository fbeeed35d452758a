"""Number of spare candidates if not all have places. Otherwise the paper's budget stays."""

from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest

from tests.parts.pruning.steps import pruned_by
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.shaping.rules.allocation import BatchPrompt, allocate_batch
from vllm_rollout.parts.shaping.rules.launch_order import WaitingGroup, steps, uniforms
from vllm_rollout.parts.shaping.rules.moments import LengthMoments
from vllm_rollout.parts.shaping.rules.played_budget import played_budget

PLAN = GroupPlan(8, 8)
NUM_PROMPTS = 32
ALIKE, APART = (LengthMoments(1000, (spread * 1000) ** 2, 3) for spread in (0.5, 2.5))
"""As log-normal lengths of sigma 0.5 and 1.4."""


def played(lengths: LengthMoments, num_places: int, total: int = 384, plan: GroupPlan = PLAN) -> int:
    """Played budget of equal prompts."""

    def shares(total: int) -> list[int]:
        return [total // NUM_PROMPTS] * NUM_PROMPTS

    return played_budget(total, shares, plan, [(lengths, 16_384)] * NUM_PROMPTS, num_places)


def test_spares_go_where_answers_are_alike_and_stay_where_they_differ():
    assert played(ALIKE, 16) == 256
    assert played(APART, 32) == played(APART, 400, total=256) == 512
    assert played(ALIKE, 16) == played(ALIKE, 16, total=512), "wherever it comes from"


@pytest.mark.parametrize(
    ("num_places", "changes"),
    [
        pytest.param(512, {}, id="all have places"),
        pytest.param(16, {"early_stop": False}, id="nobody is stopped"),
        pytest.param(16, {"patience": 1.5}, id="the longest is waited for"),
        pytest.param(16, {"parts": pruned_by(PruningPlan(16))}, id="scores stop them, too"),
        pytest.param(16, {"redundancy": 0}, id="no spares"),
    ],
)
def test_elsewhere_the_papers_budget_stays(num_places, changes):
    total = 256 if "redundancy" in changes else 384
    assert played(ALIKE, num_places, total, replace(PLAN, **changes)) == total


def test_a_gain_that_may_be_luck_changes_nothing():
    nearly = LengthMoments(1000, 850.0**2, 3)
    assert played(nearly, 96, 448) == 448


@pytest.mark.parametrize(("lengths", "num_places", "most"), [(ALIKE, 16, 0.9), (ALIKE, 64, 0.95), (APART, 64, 0.95)])
def test_it_is_faster_than_the_papers_budget_with_lengths_drawn_anew(lengths, num_places, most):
    def taken(total: int, seed: int) -> float:
        plan = replace(PLAN, redundancy=total // NUM_PROMPTS - 8)
        uniform = uniforms(seed)
        groups = [WaitingGroup(plan, lengths, 16_384).draw(uniform) for _ in range(NUM_PROMPTS)]
        return steps((length for group in groups for length in group), num_places)

    total = played(lengths, num_places)
    assert fmean(taken(total, seed) / taken(384, seed + 100) for seed in range(30)) < most


def test_a_batch_says_that_places_decided_its_budget_and_shares_it_out():
    known = [BatchPrompt(LengthMoments(1000, (std * 1000) ** 2, 3), 10, 16_384) for std in (0.2, 0.5)] * 16
    allocate = partial(allocate_batch, [*known, BatchPrompt()], APART, None, group_size=8, max_candidates=16)
    batch = allocate(race=PLAN, num_places=16)
    assert batch.budget.source == "places"
    assert batch.budget.total == 33 * 8 == sum(its.num_candidates for its in batch.prompts)
    assert allocate(race=PLAN).budget.source == allocate(num_places=16).budget.source == "default"
    assert allocate(race=PLAN, num_places=33 * 16).budget.total == 33 * 12
