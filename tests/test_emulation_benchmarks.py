"""The benchmarks of the emulated device: what they hand from a real run to an emulated one, and to the simulator."""

import json

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from benchmarks.emulation.lengths import Seen, emulated_rows, lengths_of
from benchmarks.emulation.run import drift_of, summarize
from benchmarks.emulation.run import table as emulation_table
from benchmarks.emulation.ways import WAYS, Asked
from benchmarks.rounds_emulated.run import RoundRow, summary_of
from benchmarks.rounds_emulated.run import table as rounds_table
from benchmarks.rounds_emulated.workload import EmulatedDataSet, Workload
from vllm_rollout.emulation.device import Work, step_seconds
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.simulator.rounds.replay import RunConditions, replay_run
from vllm_rollout.simulator.rounds.settings import RoundSetting
from vllm_rollout.trace.rows import RolloutPrompt

ITS = Workload("7B/8k", num_ranks=2, prompts_per_round=8, group_size=2, seed=5)


def recorded(id: str, lengths: list[int], ends: list[str] | None = None) -> RolloutPrompt:
    return RolloutPrompt(id=id, lengths=lengths, ends=ends)


def test_a_deferred_prompt_is_as_long_as_in_the_round_that_returned_it():
    short = [recorded("a", [7, 30, 30], ["stop", "deferred", "deferred"]), recorded("b", [5, 9], ["stop", "surplus"])]
    long = [recorded("a", [7, 80])]
    lengths = lengths_of([short, long])
    assert lengths["a"] == [Seen(7, "stop"), Seen(80, "stop"), Seen(30, "deferred")]
    assert lengths["b"] == [Seen(5, "stop"), Seen(9, "surplus")]


def test_a_stopped_candidate_gets_its_full_length_where_it_is_known_and_longer():
    lengths = lengths_of([[recorded("a", [9, 9, 9, 4], ["surplus", "surplus", "pruned", "stop"])]])
    full = lengths_of([[recorded("a", [50, 8], ["stop", "stop"])]])
    (row,) = map(json.loads, emulated_rows(lengths, full, {"a": "digest"}, max_tokens=100))
    assert row["prompt_id"] == "digest"
    assert row["lengths"] == [50, 100, 100, 4]
    assert row["ends"] == ["stop", "length", "length", "stop"]


def test_an_error_is_that_of_the_median_pass():
    real = {(way, repeat): [Asked(seconds, 100) for seconds in (9.0, 10.0, 18.0)] for way in WAYS for repeat in (0, 1)}
    emulated = {(way, repeat): Asked(11.0 + repeat, 110) for way, repeat in real}
    result = summarize(real, emulated)
    assert result["ways"]["rounds"]["ratio"] == pytest.approx(1.15)
    assert result["ways"]["rounds"]["spread"] == pytest.approx(2.0)
    assert result["largest_error"] == pytest.approx(0.15)
    sizes = {"prompts": 1, "group_size": 1, "redundancy": 1, "prompts_per_round": 1, "max_tokens": 1}
    shown = emulation_table({**result, "workload": {"sizes": sizes}})
    assert "| 20.0 | 23.0 | 15.0 % | 2.00 | 1.100 |" in shown


def test_drift_is_read_from_the_metrics():
    registry = CollectorRegistry()
    drift = Gauge("vllm_rollout:step_time_drift", "Live over profiled.", ["batch_sizes"], registry=registry)
    drift.labels("8-15").set(1.25)
    assert drift_of(generate_latest(registry).decode()) == {"8-15": 1.25}


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
