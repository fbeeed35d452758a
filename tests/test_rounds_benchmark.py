import json
import math

import numpy as np
import pytest

from benchmarks.common import write_json
from benchmarks.rounds_simulated.picture import draw
from benchmarks.rounds_simulated.run import Part, parts_of, rounds_drawn, rows_of
from benchmarks.rounds_simulated.setup import (
    BETWEEN_SHARE,
    BOTH,
    HBM_BYTES_PER_S,
    MODEL_NAMES,
    MODELS,
    PROMPTS_ONLY,
    RESPONSES_ONLY,
    SYNCHRONOUS,
    lengths,
    speculating,
    sweep_settings,
    workload,
)
from benchmarks.rounds_simulated.tables import bound, end_to_end, row_of, tables
from vllm_rollout.simulator.rounds.prompts import GeneratedDataSet


@pytest.fixture(scope="module")
def sweeps():
    part = Part("7B/8k", [SYNCHRONOUS, RESPONSES_ONLY, PROMPTS_ONLY, BOTH], BETWEEN_SHARE, 640, 1, [5])
    return part.run(lambda: None)


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
@pytest.mark.parametrize("between", [0.18, 0.5, 0.75])
def test_lengths_have_the_quartile_and_the_tail_they_are_fitted_to(name, between):
    data = GeneratedDataSet(lengths(name, between, 4000), seed=1)
    drawn = np.array([c.num_tokens for prompt in data.prompts for c in data.candidates(prompt, 0, 0, 8)])
    assert 950 < np.percentile(drawn, 75) < 1250
    assert 0.5 < 1024 * np.mean(drawn == MODELS[name].max_tokens) < 6
    logs = np.log([[c.num_tokens for c in data.candidates(prompt, 1, 0, 8)] for prompt in data.prompts])
    within = logs.var(axis=1, ddof=1).mean()
    assert (logs.mean(axis=1).var() - within / 8) / (logs.mean(axis=1).var() + within * 7 / 8) == pytest.approx(
        between, abs=0.04
    )


def test_rollouts_are_not_the_whole_step():
    assert end_to_end(1.0, 0.7) == pytest.approx(1)
    assert end_to_end(math.inf, 0.7) == pytest.approx(1 / 0.3)
    assert end_to_end(2.0, 0.7) == pytest.approx(1 / 0.65)


def test_a_period_is_bounded_by_its_long_round():
    assert bound({"prompt_s": 100.0}, {"num_returned": 5, "num_long": 1, "long_s": 125.0}) == 4
    assert bound({"prompt_s": 100.0}, {"num_returned": 4, "num_long": 0, "long_s": None}) is None


def test_every_pair_of_factors_is_swept_once():
    settings = sweep_settings()
    assert settings[0] == SYNCHRONOUS == speculating(1, 1)
    assert len(set(settings)) == len(settings) == 10
    places = list(parts_of(512, 1, range(2)))
    assert len(places) == 3 + 6 + 1 + 3 + 2


def test_rows_say_what_a_run_measured(sweeps):
    rows = rows_of(sweeps)
    both = row_of(rows, 1.25, 1.25)
    assert both is rows[-1]
    outcome = sweeps[0].outcomes[-1]
    assert both["round_s"] == outcome.round_s
    assert both["speed_up"] == rows[0]["prompt_s"] / both["prompt_s"] > 1.5
    assert both["fairness"]["least_returns"] == both["fairness"]["most_returns"] == 1
    assert rows[0]["length_bias"] == 0
    assert both["num_short"] / both["num_long"] == 4


def test_results_are_told_in_tables_and_a_picture(sweeps, tmp_path):
    rows = rows_of(sweeps)
    factors = {(1.0, f): rows[1] for f in (1.1, 1.25, 1.5)} | {(f, 1.0): rows[2] for f in (1.1, 1.25, 1.5)}
    factors |= {(f, f): rows[3] for f in (1.1, 1.25, 1.5)}
    named = [rows[0]] + [
        row | {"prompt_speculation": prompts, "response_speculation": responses}
        for (prompts, responses), row in factors.items()
    ]
    result = {
        "sweep": dict.fromkeys(MODEL_NAMES, named),
        "shares": {name: {"0.18": rows} for name in MODEL_NAMES},
        "queue_order": rows,
        "whole_epochs": {"640": rows},
        "order": {"once": rows},
        "rounds": rounds_drawn(sweeps[0]),
    }
    write_json(tmp_path / "a.json", {"workload": workload(640, 1, 1), **result})
    text = tables(json.loads((tmp_path / "a.json").read_text()))
    assert f"{rows[3]['speed_up']:.2f}" in text
    assert "None" not in text
    draw(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
