"""The benchmarks of the emulated device: what they hand to an emulated run, and to the simulator."""

import pytest

from benchmarks.rounds_emulated.run import RoundRow, summary_of
from benchmarks.rounds_emulated.run import table as rounds_table
from benchmarks.rounds_emulated.workload import EmulatedDataSet, Workload
from vllm_rollout.emulation.device import Work, step_seconds
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.simulator.rounds.replay import RunConditions, replay_run
from vllm_rollout.simulator.rounds.settings import RoundSetting

ITS = Workload("7B/8k", num_ranks=2, prompts_per_round=8, group_size=2, seed=5)


@pytest.mark.parametrize(("batch", "context"), [(1, 0), (100, 1000), (290, 4000)])
def test_a_step_takes_as_long_on_the_emulated_device_as_in_the_simulator(batch, context):
    emulated = step_seconds(Settings.model_validate(ITS.device))(Work(batch, batch * context, 0))
    assert emulated == pytest.approx(ITS.machine.cost.ptl(batch, context))


def test_a_period_hands_in_what_fills_its_long_round():
    assert ITS.num_prompts(ITS.terms(1.0, 1.25)) == 16
    terms = ITS.terms(1.25, 1.25)
    data = EmulatedDataSet(ITS, ITS.num_prompts(terms))
    outcome = replay_run(RunConditions(data, ITS.machine, seed=ITS.seed), RoundSetting.of(terms))
    assert [each.kind for each in outcome.rounds] == ["short"] * 4 + ["long"]
    assert sorted(each["id"] for each in data.in_order(ITS.seed)) == sorted(prompt.id for prompt in data.prompts)


def test_a_prompt_is_the_same_each_time_it_runs():
    data = EmulatedDataSet(ITS, 8)
    first = data.candidates(data.prompts[3], 0, 0, 4)
    assert data.candidates(data.prompts[3], 0, 2, 2) == first[:2]
    assert all(each.num_tokens <= ITS.max_tokens for each in first)


def test_settings_are_compared_with_the_first():
    plain = summary_of([RoundRow("short", 40.0, 800, 100.0, 1000, 8)] * 2)
    ours = summary_of([RoundRow("short", 10.0, 100, 50.0, 1000, 8), RoundRow("long", 30.0, 800, 300.0, 1000, 8)])
    settings = [
        {"prompt_speculation": f, "response_speculation": f, "emulated": its, "simulated": its, "idle_share": 0.01}
        for f, its in ((1.0, plain), (1.25, ours))
    ]
    workload = {"model": {"title": "7B"}, "prompts_per_round": 8, "group_size": 8, "ranks": 2, "speed": 0.5}
    shown = rounds_table({"settings": settings, "workload": workload})
    assert "| 1.25 | 1.25 | 10.0 | 30.0 | 2.00 | 2.00 | 0.0 % | 100 | 8.0 | 1.0 % |" in shown
