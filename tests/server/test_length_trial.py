"""Several detection lengths in one rollout, "auto", and scores of whole trajectories, over HTTP."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vllm_rollout import RolloutClient
from vllm_rollout.config import TRIAL_LENGTHS

from .fake_engine import FakeEngine
from .fake_learning import succeeded
from .learning_steps import DETECTION_LENGTH, PRUNING, post, rewards_of, roll, teach

pytestmark = pytest.mark.anyio

LENGTHS = [10, 4, 8]
LONG = {"min_tokens": TRIAL_LENGTHS[-1] + 10}
PLAIN = {"group_size": 8, "redundancy": 0}
PATH = "/v1/quality_head/detection_lengths"


async def trial(http, **params) -> dict:
    response = await http.get(PATH, params=params)
    assert response.status_code == 200, response.text
    return response.json()


async def test_without_a_trial_nothing_is_recommended_and_the_reason_says_what_to_do(http):
    answer = await trial(http)
    assert (answer["recommended"], answer["lengths"], answer["num_candidates"]) == (None, [], 0)
    assert '"detection_length": [16, 48, 128]' in answer["reason"]


async def test_a_list_stops_nobody_and_each_length_is_reported(http):
    plan = {**PRUNING, "detection_length": LENGTHS}
    answer = await roll(http, pruning=plan, **PLAIN)
    assert (answer.detection_length, answer.usage.num_pruned) == (4, 0)
    assert all(t.would_prune is False for group in answer.groups for t in group.trajectories)
    await teach(http, 10, pruning=plan, **PLAIN)
    report = await trial(http)
    assert [row["detection_length"] for row in report["lengths"]] == sorted(LENGTHS)
    assert report["num_candidates"] == 10 * 24
    for row in report["lengths"]:
        assert 0.6 < row["auc"] < 1
        assert 0 < row["auc_error"] < 0.1
    costs = [row["cost_ratio"] for row in report["lengths"]]
    assert all(earlier < later for earlier, later in pairwise(costs))
    assert report["recommended"] == 4, "all lengths know the same here, and the first saves most"
    for length in LENGTHS:  # each has a calibration and a head of its own
        response = await http.get("/v1/quality_head/report", params={"detection_length": length})
        assert response.json()["head"]["detection_length"] == length


@pytest.mark.parametrize("ratio", ["0", "1.5", "much"])
async def test_a_keep_ratio_out_of_range_is_explained(http, ratio):
    response = await http.get(PATH, params={"keep_ratio": ratio})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "keep_ratio"


@pytest.mark.thorough
async def test_auto_compares_first_says_so_and_then_prunes_at_what_is_recommended(http):
    plan = {**PRUNING, "detection_length": "auto"}
    fields = {"pruning": plan, "sampling": {"seed": 5, **LONG}}
    answer = await roll(http, **fields)
    warning, *_ = answer.warnings
    assert warning.startswith('detection_length: "auto" cannot choose yet')
    assert ", ".join(map(str, TRIAL_LENGTHS)) in warning
    assert answer.usage.num_pruned == 0
    for seed in range(30):
        answer = await roll(http, **{**fields, "sampling": {"seed": seed, **LONG}})
        await post(http, answer)
    recommended = (await trial(http))["recommended"]
    assert recommended == TRIAL_LENGTHS[0]
    answer = await roll(http, **fields)
    assert (answer.warnings, answer.detection_length) == ([], recommended)
    assert answer.usage.num_pruned > 0
    assert {c.num_tokens for group in answer.groups for c in group.candidates if c.state == "pruned"} == {recommended}
    num_tried = (await trial(http))["num_candidates"]
    await post(http, answer)
    assert (await trial(http))["num_candidates"] == num_tried
    answer = await roll(http, **fields, audit_ratio=1.0)
    assert (answer.usage.num_pruned, answer.detection_length) == (0, recommended)
    receipt = await post(http, answer)
    assert (await trial(http))["num_candidates"] == num_tried + receipt.counts.accepted, "the choice can be another one"


@pytest.mark.parametrize(
    ("length", "mode", "words"),
    [([8, 4], "active", "several lengths are compared in shadow mode only"), ([8, 8], "shadow", "different ones"),
     ([], "shadow", "at least 1 item"), ([1] * 7, "shadow", "at most 6 items"), ("best", "shadow", "'auto'"),
     ([0], "shadow", "greater than or equal to 1")],
)  # fmt: skip
async def test_what_is_no_choice_of_lengths_is_explained(http, length, mode, words):
    body = {"prompts": [{"prompt": "a"}], "group_size": 2, "pruning": {"detection_length": length, "mode": mode}}
    response = await http.post("/v1/rollouts", json=body)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["param"].startswith("pruning.detection_length")
    assert words in error["message"]


async def test_every_trajectory_has_a_final_score_that_votes_can_take(http, engine: FakeEngine):
    plan = {**PRUNING, "final_score": True, "mode": "shadow"}
    engine.lengths = {index: 4 if index < 2 else 20 for index in range(8)}
    answer = await roll(http, pruning=plan, **PLAIN, sampling={"seed": 3})
    assert all(t.final_score is None for group in answer.groups for t in group.trajectories), "no head is trained"
    await post(http, answer)
    for seed in range(8):
        answer = await roll(http, pruning=plan, **PLAIN, sampling={"seed": 100 + seed})
        assert (await post(http, answer)).counts.accepted == 24, "also those that ended before detection"
    for group in answer.groups:
        short = [t for t in group.trajectories if t.num_tokens < DETECTION_LENGTH]
        assert len(short) == 2
        assert all(t.score is None for t in short)
        for t in group.trajectories:
            assert t.final_score is not None
            assert 0 < t.final_success_probability < 1
        answers = ["right" if succeeded(t.token_ids) else "wrong" for t in group.trajectories]
        weights = [t.final_score for t in group.trajectories]
        vote = await http.post("/v1/votes", json={"answers": answers, "method": "quality", "weights": weights})
        assert vote.json()["num_without_weight"] == 0
    right = [t.final_score for g in answer.groups for t in g.trajectories if succeeded(t.token_ids)]
    wrong = [t.final_score for g in answer.groups for t in g.trajectories if not succeeded(t.token_ids)]
    assert sum(right) / len(right) > sum(wrong) / len(wrong)
    report = await http.get("/v1/quality_head/report", params={"detection_length": 0})
    assert report.json()["head"]["detection_length"] == 0
    report = await http.get("/v1/quality_head/report")
    assert report.json()["detection_length"] == DETECTION_LENGTH, "that of ends is asked for by name"


async def test_a_client_asks_for_the_report(http, client: RolloutClient):
    await teach(http, 2, pruning={**PRUNING, "detection_length": LENGTHS}, **PLAIN)
    report = client.detection_lengths(keep_ratio=0.25)
    assert [row.detection_length for row in report.lengths] == sorted(LENGTHS)
    assert report.keep_ratio == 0.25
    assert len(rewards_of(await roll(http))) == 12
