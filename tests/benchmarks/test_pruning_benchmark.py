"""The pruning benchmark without a model: its measures on records made by hand, its phases on an engine that learns."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.pruning import setup as pruning_setup
from benchmarks.pruning.measures import (
    calibration,
    compare_survivors,
    discrimination,
    learning_curve,
    overview,
    random_in_expectation,
    speed,
    survivors,
)
from benchmarks.pruning.phases import COMPARED, RUN_PHASE, SWEPT, Bench, log_of
from benchmarks.pruning.picture import draw, tables
from benchmarks.pruning.records import Record, Run, records_of
from benchmarks.pruning.results import summarize
from benchmarks.pruning.run import load
from benchmarks.pruning.setup import PHASES, Sizes, evaluation_questions, learning_questions
from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.parts.pruning.rules.assessment import Confidence

FAMILIES = {"families": ("arithmetic", "word_sum")}
LEARNED = {"labels": 300, "learn_prompts": 4, "window": 100, "evaluate_prompts": 12, "vote_prompts": 3}
USED = {"vote_candidates": 16, "blocks": 2, "block_prompts": 3}
SWEEP = {"sweep_blocks": 1, "sweep_block_prompts": 3}
SIZES = Sizes(model="fake", seed=3, max_tokens=64, at_once=32, **FAMILIES, **LEARNED, **USED, **SWEEP)
BLANK = Record(
    prompt_id="evaluate/sums-0",
    index=0,
    state="finished",
    num_tokens=20,
    truncated=False,
    correct=True,
    signal="head",
    score=0.0,
    success_probability=0.5,
    survival_probability=1.0,
    head_version=1,
    confidence=Confidence(1.0, 1.0, 1.0),
)


def candidates(prompt: str, scores: dict[float, bool], **fields: Any) -> list[Record]:
    """One candidate per head score, with what it was worth; its confidence says the opposite."""
    return [
        replace(
            BLANK,
            prompt_id=f"evaluate/{prompt}",
            index=index,
            score=score,
            correct=correct,
            confidence=Confidence(-score, -score, -score),
            **fields,
        )
        for index, (score, correct) in enumerate(scores.items())
    ]


def run(way: str, block: int, wall_s: float, tokens: int) -> Run:
    return Run((way, block), 0.0, wall_s, tokens, 0, 0, (), ())


def test_discrimination_compares_signals_overall_and_within_groups():
    # within each prompt the head is right; between them, easy-0's failure scores above hard-0's success
    records = candidates("easy-0", {3.0: True, 2.0: False}) + candidates("hard-0", {1.0: True, 0.0: False})
    told = discrimination(records)
    assert told["num_candidates"] == 4
    assert told["auc"]["head"]["value"] == 3 / 4
    assert told["auc"]["mean"]["value"] == 1 / 4
    assert told["within_group_auc"]["head"]["value"] == 1
    assert told["within_group_auc_head_above"]["bottom_windows"] == {"value": 1, "interval": [1, 1]}
    low, high = told["auc"]["head"]["interval"]
    assert low == pytest.approx(0.75, abs=0.01)  # both prompts; one prompt twice is judged perfectly
    assert high == 1


def test_intervals_count_prompts_rather_than_candidates():
    once = [r for i in range(6) for r in candidates(f"a-{i}", {float(i): i % 2 == 0, i + 0.5: i % 3 == 0})]
    # ten copies of each candidate tell nothing new
    often = [replace(record, index=10 * copy + record.index) for record in once for copy in range(10)]
    assert discrimination(often)["auc"]["head"]["interval"] == discrimination(once)["auc"]["head"]["interval"]


def test_signals_are_compared_on_the_candidates_that_the_head_scored():
    before = candidates("a-0", {0.1: True, 0.2: False}, signal="confidence", head_version=0)
    after = candidates("a-1", {2.0: True, 1.0: False})
    told = discrimination(before + after)
    assert told["num_candidates"] == 2
    assert told["auc"]["mean"]["value"] == 0


def test_learning_curve_keeps_the_order_of_rewards_and_joins_a_short_rest():
    records = [r for i in range(9) for r in candidates(f"a-{i}", {1.0: i >= 4, 0.0: i < 4})]
    rows = learning_curve(records, window=8)
    assert [(row["num_labels_before"], row["num_labels"]) for row in rows] == [(0, 8), (8, 10)]
    assert [row["auc"]["head"] for row in rows] == [0, 1]
    assert [row["within_group_auc"]["bottom_windows"] for row in rows] == [1, 0]


def test_calibration_stands_beside_what_needs_no_head():
    good = candidates("a-0", {1.0: True, 2.0: True, 3.0: True}, success_probability=0.8)
    bad = candidates("a-1", {0.0: False}, success_probability=0.4)
    told = calibration(good + bad)
    assert told["accuracy_at_half"] == 1
    assert told["accuracy_always"] == 0.75
    assert told["brier"] == pytest.approx((3 * 0.04 + 0.16) / 4)
    assert told["brier_always"] == pytest.approx(0.1875)


def test_random_pruning_in_expectation_matches_draws():
    groups = {"a": [True] * 5 + [False] * 3, "b": [True] * 1 + [False] * 7}
    generator = np.random.default_rng(0)
    drawn = [
        survivors({name: list(generator.choice(group, 4, replace=False)) for name, group in groups.items()})
        for _ in range(4000)
    ]
    mean = sum(told["mean_ratio_product"] for told in drawn) / len(drawn)
    assert random_in_expectation(groups, 0.5) == pytest.approx(mean, abs=0.003)


def test_ways_are_compared_on_the_same_prompts():
    all_alike = {f"p{i}": [True, True] for i in range(10)}
    mixed = {f"p{i}": [True, False] for i in range(10)}
    told = compare_survivors({"none": all_alike, "balance": mixed}, "balance")
    assert told["none"]["mean_ratio_product"] == {"value": 0.25, "interval": [0.25, 0.25]}
    assert told["none"]["distance_from_half"]["value"] == -0.5


def test_speed_is_paired_within_blocks():
    runs = [run("none", 0, 2.0, 100), run("half", 0, 1.0, 60), run("none", 1, 8.0, 100), run("half", 1, 2.0, 50)]
    row = speed(runs, ["none", "half"], "none")["half"]
    assert row["speed_ratio"] == 3  # the median of 2 and 4
    assert row["tokens_ratio"] == pytest.approx((100 / 60 + 2) / 2)
    assert row["throughput_ratio"] == pytest.approx((60 / 50 + 25 / 12.5) / 2)


def test_nothing_that_is_evaluated_was_learned_from():
    sizes = replace(SIZES, families=("arithmetic",), labels=1200)  # so many that another seed asks some of them again
    learned = {question.text for question in learning_questions(sizes)}
    held = evaluation_questions(sizes)
    assert {use: len(found) for use, found in held.items()} == {
        "evaluate": 12,
        "vote": 3,
        "compare": 6,
        "sweep": 3,
    }
    texts = [question.text for found in held.values() for question in found]
    assert len(set(texts)) == len(texts)
    assert not learned & set(texts)


def test_results_of_other_sizes_are_not_mixed(tmp_path):
    output = tmp_path / "pruning.json"
    (tmp_path / "pruning").mkdir()
    stray = tmp_path / "pruning" / "learn.jsonl"
    stray.touch()
    result = load(output, SIZES)
    assert not stray.exists(), "a log without its JSON is of another run"
    output.write_text(json.dumps(result))
    with pytest.raises(ValueError, match="--detection-length must be 8"):
        load(output, replace(SIZES, detection_length=9))
    assert load(output, replace(SIZES, blocks=9))["sizes"]["blocks"] == 9
    output.write_text(json.dumps(result | {"command": "of another run"}))
    stray.touch()
    anew = load(output, replace(SIZES, detection_length=9), anew=True)
    assert anew["sizes"]["detection_length"] == 9
    assert anew["command"] != "of another run"
    assert not stray.exists()
    (tmp_path / "pruning" / "compare.jsonl").touch()
    with pytest.raises(ValueError, match=r"--blocks must be 2.* phase compare was begun with"):
        load(output, replace(SIZES, blocks=9))


@pytest.fixture
def truth(monkeypatch):
    """The fake engine's hidden truth in place of the checker: an even first token."""
    monkeypatch.setattr(pruning_setup, "check", lambda problem, text: int(text[1:].partition("\u2028")[0]) % 2 == 0)
    monkeypatch.setattr("benchmarks.pruning.phases.TRAINING_QUIET_S", 0.05)


def run_phases(url, folder, phases, sizes=SIZES):
    async def all_of_them():
        async with AsyncRolloutClient(url) as client:
            bench = Bench(sizes, folder, client, lambda done, total, what: None)
            return {phase: await RUN_PHASE[phase](bench) for phase in phases}

    return asyncio.run(all_of_them())


@pytest.mark.thorough
@pytest.mark.usefixtures("truth")
def test_phases_learn_use_and_show_what_was_learned(tmp_path):
    engine = FakeEngine()
    phases = ("learn", "evaluate", "compare", "sweep", "fewer")
    with serving(make_app(engine)) as url:
        said = run_phases(url, tmp_path, phases)
        num_launched = engine.num_launched
        run_phases(url, tmp_path, phases)
    assert engine.num_launched == num_launched, "a run that is logged was made again"

    runs = {phase: log_of(tmp_path, phase).runs for phase in PHASES}
    phases = {phase: {**summarize(phase, SIZES, runs), **said.get(phase, {})} for phase in phases}
    learned, evaluated, compared = (phases[phase] for phase in ("learn", "evaluate", "compare"))
    assert learned["num_labels"] >= SIZES.labels
    assert learned["server_report"]["head"]["num_labels"] == learned["num_labels"]
    assert all(run.rewards is None for run in runs["evaluate"] + runs["compare"])
    assert evaluated["discrimination"]["auc"]["head"]["value"] > 0.9
    assert evaluated["discrimination"]["auc_head_above"]["mean"]["value"] > 0.1
    assert evaluated["overview"]["num_candidates"] == 12 * 8 + 3 * 16

    assert [run.key for run in runs["compare"]][: len(COMPARED) + 1] == [*((way, 0) for way in COMPARED), ("random", 1)]
    assert compared["speed"]["none"]["num_pruned"] == 0
    assert all(compared["speed"][way]["num_pruned"] > 0 for way in COMPARED if way != "none")
    names = {f"compare/{question.prompt['id']}" for question in evaluation_questions(SIZES)["compare"]}
    for way in COMPARED:
        mine = [run for run in runs["compare"] if run.key[0] == way]
        assert {record.prompt_id for record in records_of(mine)} == names
    swept = phases["sweep"]["speed"]
    assert [swept[way]["num_pruned"] > 0 for way in SWEPT] == [False, True, True, True]

    result = {"phases": phases}
    text = tables(result)
    fewer = phases["fewer"]["survivors"]
    assert (fewer["fewer"]["num_survivors"], fewer["none"]["num_survivors"]) == (6 * 8, 6 * 16)
    assert {run.records[0].prompt_id.split("/")[0] for run in runs["fewer"]} == {"compare"}
    assert text.count("### ") == 3
    draw(result, tmp_path / "pruning.png")
    assert (tmp_path / "pruning.png").stat().st_size > 10_000


@pytest.mark.usefixtures("truth")
def test_a_phase_needs_what_it_builds_on(tmp_path):
    with serving(make_app(FakeEngine())) as url, pytest.raises(ValueError, match="run phase learn first"):
        run_phases(url, tmp_path, ["evaluate"])
    with pytest.raises(ValueError, match="phase evaluate has not run"):
        summarize("evaluate", SIZES, {phase: [] for phase in PHASES})


def test_numbers_that_are_not_known_are_left_out(tmp_path):
    told = discrimination([])
    assert told["auc"]["head"] == {"value": None, "interval": None}
    learned = {"learning_curve": [], "num_labels": 0}
    draw({"phases": {"learn": learned, "evaluate": {"discrimination": told}}}, tmp_path / "pruning.png")
    assert not any(isinstance(value, float) and math.isnan(value) for value in overview([]).values())
