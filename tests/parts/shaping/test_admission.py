"""Admission of candidates by vLLM's real scheduler when the KV cache is nearly full."""

from random import Random

import pytest

from tests.kernel.core.scheduler_runs import NO_AUDITS
from tests.parts.emulation.emulated_run import EmulatedRun
from tests.parts.pruning.steps import judge_of
from tests.parts.shaping.steps import lengths_of
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.shaping.rules.admission import most_running
from vllm_rollout.parts.shaping.rules.history import ObservedLength

DEVICE = {"step": {"ms": 5.0, "ms_per_request": 0.02, "ms_per_prefilled_token": 0.03}}
GROUP_SIZE, NUM_BLOCKS = 8, 300


def run_of(
    model: str, known: list[int], num_groups: int = 32, *, max_tokens: int = 1_000_000, **limits: int
) -> EmulatedRun:
    """All groups at once; `known`: lengths of answers that ended before."""
    settings = Settings.model_validate(DEVICE)
    run = EmulatedRun(model, settings, drafts=False, options=NO_AUDITS, num_blocks=NUM_BLOCKS, **limits)
    if known:
        lengths = [ObservedLength(length, False) for length in known]
        lengths_of(judge_of(run.scheduler)).observe("before", lengths)
    chance = Random(1)
    for number in range(num_groups):
        lengths = [max(1, round(200 * chance.lognormvariate(0, 0.5))) for _ in range(GROUP_SIZE)]
        terms = GroupTerms(GROUP_SIZE, GROUP_SIZE)
        run.launch(f"g{number}", lengths, [100 + number] * 40, terms, max_tokens=max_tokens)
    run.run()
    return run


@pytest.mark.thorough
def test_where_lengths_are_known_candidates_have_room_to_grow_and_few_are_preempted(tiny_model):
    plain, careful = run_of(tiny_model, []), run_of(tiny_model, [150, 200, 300])
    assert {id: plain.tokens(id) for id in plain.outputs} == {id: careful.tokens(id) for id in careful.outputs}
    assert plain.scheduler.num_preemptions > 3 * careful.scheduler.num_preemptions > 0
    assert careful.seconds < 1.01 * plain.seconds, "no place that is needed stands empty"


def test_a_candidate_that_nothing_runs_beside_is_admitted_however_long_answers_are(tiny_model):
    run = run_of(tiny_model, [1_000_000, 2_000_000], 2)
    assert len(run.outputs) == 2 * GROUP_SIZE
    assert max(step.work.num_requests for step in run.steps) == 1


def test_with_room_for_all_the_limit_is_the_number_of_places(tiny_model):
    run = run_of(tiny_model, [2, 3], 2, max_num_seqs=7)
    assert max(step.work.num_requests for step in run.steps) == 7
    field = "max_num_active_reqs" if hasattr(run.scheduler, "max_num_active_reqs") else "max_num_running_reqs"
    assert getattr(run.scheduler, field) == 7


def test_nobody_gets_room_beyond_its_own_limit(tiny_model):
    """Short answers to an evaluation, beside a training whose answers are long."""
    seconds = []
    for known in ([32, 32], [2500, 3500]):
        run = run_of(tiny_model, known, 0)
        for number in range(16):
            run.launch(f"g{number}", [32] * 8, [100 + number] * 40, GroupTerms(8, 8), max_tokens=32)
        run.run()
        seconds.append(run.seconds)
    assert seconds[1] == seconds[0]


@pytest.mark.parametrize(("free", "mean", "most"), [(1000, 400, 20), (999, 400, 19), (0, 400, 1), (10, 0, 80)])
def test_as_many_run_as_have_an_eighth_of_a_mean_length_each(free, mean, most):
    assert most_running(free, mean) == most
