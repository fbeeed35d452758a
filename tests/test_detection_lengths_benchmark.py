"""`benchmarks.detection_lengths` against an engine that knows the truth."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.detection_lengths import SCORES, discrimination, measure_on, sizes_of, tables
from benchmarks.pruning import setup as pruning_setup
from benchmarks.pruning.phases import Bench
from vllm_rollout.client.client import AsyncRolloutClient

from .server.conftest import make_app, serving
from .server.fake_engine import FakeEngine
from .test_pruning_benchmark import candidates

ARGUMENTS = Namespace(model="fake", lengths=[4, 10], labels=320, vote_prompts=3, seed=3, max_tokens=40)


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    # the fake engine's hidden truth in place of the checker: an even first token
    monkeypatch.setattr(pruning_setup, "check", lambda problem, text: int(text[1:].partition("\u2028")[0]) % 2 == 0)
    monkeypatch.setattr("benchmarks.pruning.phases.TRAINING_QUIET_S", 0.05)

    async def all_of_it(url: str) -> dict:
        async with AsyncRolloutClient(url) as client:
            bench = Bench(sizes_of(ARGUMENTS), tmp_path, client, lambda done, total, what: None)
            return await measure_on(bench, ARGUMENTS.lengths, 6)

    with serving(make_app(FakeEngine())) as url:
        return asyncio.run(all_of_it(url))


def test_what_is_foretold_is_measured_and_votes_have_final_scores(result):
    trial = result["trial"]
    assert [row["detection_length"] for row in trial["lengths"]] == [4, 10]
    assert trial["recommended"] == 4, "the fake head knows as much at either length"
    assert result["learn"]["num_labels"] >= 320
    assert result["pruned"]["nobody"]["saved_ratio"] == 0
    saved = [result["pruned"][way]["saved_ratio"] for way in ("4", "10")]
    assert saved[0] > saved[1] > 0
    assert result["pruned"]["4"]["num_pruned"] > 0
    signals = result["votes"]["signals"]
    assert signals["quality head, whole trajectory"]["auc"]["value"] > 0.9
    assert result["final"]["head_version"] > 0
    text = tables(result)
    assert "4 (recommended)" in text
    assert "quality head, whole trajectory" in text


def test_scores_are_compared_on_candidates_that_have_all_of_them():
    right_first = candidates("a-0", {2.0: True, 1.0: False}) + candidates("b-0", {0.5: True, 0.0: False})
    records = [replace(record, final_score=-record.score) for record in right_first]
    records.append(replace(records[0], index=9, final_score=None, correct=False, score=99.0))
    told = {name: discrimination(records, of) for name, of in SCORES.items()}
    assert {its["num_candidates"] for its in told.values()} == {4}
    assert told["quality head"]["auc"]["value"] == 3 / 4
    assert told["quality head"]["within_group_auc"] == {"value": 1, "interval": [1, 1]}
    assert told["quality head, whole trajectory"]["within_group_auc"]["value"] == 0
