"""The simulator beside the emulated device: the same lengths, step costs and drafts, under vLLM's real scheduler."""

from random import Random
from typing import Any

import pytest

from tests.kernel.core.scheduler_runs import NO_AUDITS
from tests.parts.emulation.emulated_run import EmulatedRun
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.parts.emulation.device import cost_of
from vllm_rollout.parts.emulation.settings import Settings, settings_type
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate, Race
from vllm_rollout.simulator.rank import run_races

FLAT = {"step": {"ms": 10, "ms_per_request": 0}}
GPU = {"step": {"ms": 5.2, "ms_per_request": 0.012, "ms_per_context_token": 2e-5, "ms_per_prefilled_token": 0.03}}
COSTLY = {"step": {"ms": 0.5, "ms_per_request": 0.1, "ms_per_prefilled_token": 0.03}}
NUM_PROMPT_TOKENS = 50


def lengths_of(num_groups: int, group_size: int, seed: int) -> list[list[int]]:
    chance = Random(seed)
    return [
        [max(1, min(2000, round(chance.lognormvariate(5.7, 0.8)))) for _ in range(group_size)]
        for _ in range(num_groups)
    ]


def emulated(model: str, settings: Settings, lengths: list[list[int]], drafts: bool, seed: int) -> EmulatedRun:
    """An emulated run. Each `seed` draws other prompts."""
    run = EmulatedRun(model, settings, drafts=drafts, options=NO_AUDITS)
    for number, its in enumerate(lengths):
        run.launch(f"g{number}", its, [100 * (1 + seed) + number] * NUM_PROMPT_TOKENS, GroupTerms(len(its), len(its)))
    run.run()
    return run


def simulated_s(machine: Machine, lengths: list[list[int]], num_earlier: int = 0) -> float:
    races = []
    for number, its in enumerate(lengths):
        pool = [PoolCandidate(length, "stop", length, False, None, None) for length in its]
        races.append(Race(str(number), GroupPlan(len(its)), pool, NUM_PROMPT_TOKENS, num_earlier=num_earlier))
    return run_races(machine, races).seconds


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("device", "num_groups", "group_size"), [(GPU, 1, 2), (GPU, 1, 16), (GPU, 4, 8), (COSTLY, 1, 16)]
)
def test_seconds_are_those_of_the_emulated_device(
    tiny_model: str, device: dict[str, Any], num_groups: int, group_size: int
) -> None:
    settings = settings_type().model_validate(device)
    took = {(drafts, where): 0.0 for drafts in (False, True) for where in ("emulated", "simulated")}
    for seed in range(2 if num_groups * group_size > 2 else 6):
        lengths = lengths_of(num_groups, group_size, seed)
        for drafts in (False, True):
            took[drafts, "emulated"] += emulated(tiny_model, settings, lengths, drafts, seed).seconds
            machine = Machine(cost_of(settings)).with_drafts(drafts)
            took[drafts, "simulated"] += simulated_s(machine, lengths)
    assert took[False, "simulated"] == pytest.approx(took[False, "emulated"], rel=0.002)
    assert took[True, "simulated"] == pytest.approx(took[True, "emulated"], rel=0.03)
    assert took[True, "emulated"] < took[False, "emulated"]


def test_steps_are_those_of_the_emulated_device_where_all_take_the_same_time(tiny_model: str) -> None:
    steps, said = 0, 0.0
    for seed in range(2):
        lengths = lengths_of(1, 16, seed)
        steps += len(emulated(tiny_model, settings_type().model_validate(FLAT), lengths, True, seed).steps)
        said += simulated_s(Machine().with_drafts(True), lengths)
    assert said == pytest.approx(steps, rel=0.03)


@pytest.mark.thorough
def test_a_prompt_that_comes_again_is_as_much_faster_as_on_the_emulated_device(tiny_model: str) -> None:
    settings = settings_type().model_validate(GPU)
    lengths = [[900, 800, 700, 600, 500, 400, 300, 200]]
    first, again = [], []
    for prompt in range(4):
        run = EmulatedRun(tiny_model, settings, drafts=True, options=NO_AUDITS)
        took = []
        for number in range(2):
            before = run.seconds
            run.launch(f"g{number}", lengths[0], [100 + prompt] * NUM_PROMPT_TOKENS, GroupTerms(8, 8))
            run.run()
            took.append(run.seconds - before)
        first.append(took[0])
        again.append(took[1])
    machine = Machine(cost_of(settings)).with_drafts(True)
    assert sum(first) / 4 == pytest.approx(simulated_s(machine, lengths), rel=0.03)
    assert sum(again) / 4 == pytest.approx(simulated_s(machine, lengths, num_earlier=8), rel=0.03)
    assert sum(again) < 0.92 * sum(first)
