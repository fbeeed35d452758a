"""Benchmarks at RollPacker's scale: the machines and lengths that go in, and what is made of rounds and moves."""

import numpy as np
import pytest

from benchmarks import moves_emulated
from benchmarks.emulated import EmulatedDataSet, Workload
from benchmarks.rollpacker import BETWEEN_SHARE, HBM_BYTES_PER_S, MODEL_NAMES, MODELS
from benchmarks.rounds_emulated import RoundRow, num_prompts, simulated, summary_of, table, terms_of
from vllm_rollout.parts.emulation.device import StepWork, step_seconds
from vllm_rollout.parts.emulation.settings import Settings

ITS = Workload("7B/8k", num_ranks=2, num_prompts=8, group_size=2, seed=5)


@pytest.mark.parametrize(("name", "num_ranks", "step_s"), [
    ("7B/8k", 16, 0.004543), ("14B/16k", 16, 0.004388), ("32B/32k", 32, 0.009701),
])  # fmt: skip
def test_a_step_reads_the_weights_and_the_kv_cache_once(name, num_ranks, step_s):
    model = MODELS[name]
    assert model.machine.num_ranks == num_ranks
    assert model.cost.ptl(1, 0) == model.cost.ptl(64, 0) == pytest.approx(step_s, rel=1e-3)
    per_token = model.kv_bytes_per_token / model.tensor_parallel_size / HBM_BYTES_PER_S
    for batch_size, context in ((1, 500), (40, 9000), (64, 60_000)):
        expected = model.cost.ptl(1, 0) + batch_size * context * per_token
        assert model.cost.ptl(batch_size, context) == pytest.approx(expected)
    large = 4 * model.weight_bytes / HBM_BYTES_PER_S / model.cost.prefill_s_per_token / model.tensor_parallel_size
    assert model.cost.ptl(large, 0) > 1.5 * step_s


def test_kv_bytes_are_those_of_the_model_cards():
    assert [MODELS[name].kv_bytes_per_token for name in MODEL_NAMES] == [57_344, 196_608, 262_144]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_lengths_have_the_quartile_and_the_tail_they_are_fitted_to(name):
    data = EmulatedDataSet(Workload(name, 1, 8, 8, seed=1), 3000)
    drawn = np.array([[c.num_tokens for c in data.candidates(prompt, 0, 0, 8)] for prompt in data.prompts])
    assert 950 < np.percentile(drawn, 75) < 1250
    assert 0.5 < 1024 * np.mean(drawn == MODELS[name].max_tokens) < 6
    logs = np.log(drawn)
    within = logs.var(axis=1, ddof=1).mean()
    between = logs.mean(axis=1).var() - within / 8
    assert between / (between + within) == pytest.approx(BETWEEN_SHARE, abs=0.04)


@pytest.mark.parametrize(("batch", "context"), [(1, 0), (100, 1000), (290, 4000)])
def test_a_step_takes_as_long_on_the_emulated_device_as_in_the_simulator(batch, context):
    emulated = step_seconds(Settings.model_validate(ITS.device))(StepWork(batch, batch * context, 0))
    assert emulated == pytest.approx(ITS.machine.cost.ptl(batch, context))


def test_a_period_hands_in_what_fills_its_long_round():
    assert num_prompts(terms_of(ITS, 1.0, 1.25)) == 16
    terms = terms_of(ITS, 1.25, 1.25)
    data = EmulatedDataSet(ITS, num_prompts(terms))
    assert [each.kind for each in simulated(ITS, terms, data)] == ["short"] * 4 + ["long"]
    assert sorted(each["id"] for each in data.in_order(ITS.seed)) == sorted(prompt.id for prompt in data.prompts)


def test_a_prompt_is_the_same_each_time_it_runs():
    data = EmulatedDataSet(ITS, 8)
    first = data.candidates(data.prompts[3], 0, 0, 4)
    assert data.candidates(data.prompts[3], 0, 2, 2) == first[:2]
    assert all(each.num_tokens <= ITS.model.max_tokens for each in first)


WORKLOAD = {"model": {"title": "7B"}, "prompts": 8, "group_size": 8, "ranks": 2, "speed": 0.5}


def test_settings_are_compared_with_the_first():
    plain = summary_of([RoundRow("short", 40.0, 800, 100.0, 1000, 8)] * 2)
    ours = summary_of([RoundRow("short", 10.0, 100, 50.0, 1000, 8), RoundRow("long", 30.0, 800, 300.0, 1000, 8)])
    settings = [
        {"prompt_speculation": f, "response_speculation": f, "emulated": its, "simulated": its, "idle_share": 0.01}
        for f, its in ((1.0, plain), (1.25, ours))
    ]
    shown = table({"settings": settings, "workload": WORKLOAD})
    assert "| 1.25 | 1.25 | 10.0 | 30.0 | 2.00 | 2.00 | 0.0 % | 100 | 8.0 | 1.0 % |" in shown


def test_moves_are_compared_with_staying():
    its = Workload("7B/8k", num_ranks=4, num_prompts=16, group_size=4, seed=5)
    data = EmulatedDataSet(its, 16)
    ways = {}
    for way in moves_emulated.WAYS:
        simulated_way = moves_emulated.simulated(its, data, way)
        ways[way] = {"emulated": {**simulated_way, "move_seconds": None, "idle_share": 0}, "simulated": simulated_way}
    assert ways["stay"]["simulated"]["num_moves"] == 0
    for way in ("consolidate", "scale-down"):
        assert ways[way]["simulated"]["freed_rank_s"] > ways["stay"]["simulated"]["freed_rank_s"]
    shown = moves_emulated.table({"ways": ways, "workload": WORKLOAD | {"ranks": 4}}).splitlines()
    assert [line.split(" | ")[2:5] for line in shown[4:5]] == [["1.000", "1.000", "0.0 %"]]
    assert len(shown) == 4 + len(ways)
