"""Simulated rounds at the sizes that the parallelism planner wants."""

from __future__ import annotations

import pytest

from tests.simulator.traces import LINEAR, future
from vllm_rollout.group.cost import CostModel, PTLCurve
from vllm_rollout.group.planner import QUIET_ROUNDS
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.rounds.prompts import DataPrompt
from vllm_rollout.simulator.rounds.replay import RunConditions, replay_run
from vllm_rollout.simulator.rounds.settings import parse_rounds
from vllm_rollout.simulator.rounds.sizes import SizedMachines

ROUND = "prompts_per_round=2,prompt_speculation=1,response_speculation=1"
QUICK = CostModel(((0.0, PTLCurve((1.0, 2.0), (0.5, 1.0))),))
"""Twice as fast as LINEAR."""


class Alike:
    """Prompts whose candidates all have the same length."""

    def __init__(self, num_prompts: int, num_tokens: int) -> None:
        self.prompts = [DataPrompt(number, str(number), 0, None) for number in range(num_prompts)]
        self._num_tokens = num_tokens

    def candidates(self, prompt, epoch, attempt, count):
        return [future(self._num_tokens)] * count


def sizes_of_run(num_tokens: int, kv_tokens: int, start: int, *, quick_larger=False, knows_costs=False, rounds=8):
    costs = {1: LINEAR, 2: QUICK if quick_larger else LINEAR}
    machines = {size: Machine(cost, kv_capacity_tokens=size * kv_tokens) for size, cost in costs.items()}
    sizes = SizedMachines(machines, start, knows_costs)
    its = RunConditions(Alike(2 * rounds, num_tokens), machines[start], sizes=sizes)
    return replay_run(its, parse_rounds(ROUND, 4))


def test_a_round_that_preempts_gets_a_larger_machine_for_the_next():
    outcome = sizes_of_run(40, 200, start=1)  # 8 candidates of 40 tokens
    assert [each.tensor_parallel_size for each in outcome.rounds] == [1] + [2] * 7
    first, *others = outcome.rounds
    assert first.num_preemptions > 0
    assert {each.num_preemptions for each in others} == {0}
    assert outcome.num_preemptions == first.num_preemptions


@pytest.mark.parametrize(
    ("quick_larger", "knows_costs", "sizes_after"), [(False, True, 1), (True, True, 2), (True, False, 1)]
)
def test_quiet_rounds_halve_it_unless_the_profile_calls_that_slower(quick_larger, knows_costs, sizes_after):
    outcome = sizes_of_run(10, 200, start=2, quick_larger=quick_larger, knows_costs=knows_costs)
    sizes = [each.tensor_parallel_size for each in outcome.rounds]
    assert sizes == [2] * QUIET_ROUNDS + [sizes_after] * 4


def test_without_sizes_a_round_says_none():
    its = RunConditions(Alike(4, 10), Machine(LINEAR))
    assert {each.tensor_parallel_size for each in replay_run(its, parse_rounds(ROUND, 4)).rounds} == {None}
