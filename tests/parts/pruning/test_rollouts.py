"""`pruning` on POST /v1/rollouts: what is scored, what is stopped, what the answer says of it, and which lengths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.pruning.fakes import FakeLearning, succeeded
from tests.parts.pruning.learning_steps import DETECTION_LENGTH, PRUNING, body, post, rewards_of, roll, teach
from vllm_rollout import RolloutClient
from vllm_rollout.config import TRIAL_LENGTHS
from vllm_rollout.kernel.http.answers import EndedCandidate, RolloutAnswer
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.pruning.http.scoring_log import ScoringLog
from vllm_rollout.parts.pruning.rules.fields import MAX_MIN_LABELS
from vllm_rollout.parts.pruning.rules.memory import MAX_DETECTION_LENGTHS
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey, PruningPlan
from vllm_rollout.parts.pruning.rules.report import HeadInfo
from vllm_rollout.parts.pruning.rules.step import SCORING

NO_SCORE = dict.fromkeys(
    ("score", "success_probability", "survival_probability", "signal", "head_version", "confidence",
     "score_weight_version", "would_prune", "shadow_survival_probability")
)  # fmt: skip


def everyone(answer: RolloutAnswer) -> list[EndedCandidate]:
    return [ended for group in answer.groups for ended in (*group.trajectories, *group.candidates)]


def scoring(ended: EndedCandidate) -> dict[str, object]:
    return ended.model_dump(include=set(NO_SCORE))


async def test_without_pruning_nothing_is_scored_and_nothing_is_said(http):
    answer = await roll(http, pruning=None)
    assert (answer.warnings, answer.usage.num_scored, answer.usage.num_pruned) == ([], 0, 0)
    assert all(scoring(ended) == NO_SCORE for ended in everyone(answer))


async def test_a_cold_start_scores_keeps_everyone_and_says_so_once(http):
    answer = await roll(http)
    (warning,) = answer.warnings
    assert warning.startswith("cold start: 24 of 24 scored candidates were kept")
    assert "0 positive and 0 negative, min_labels 8 of each" in warning
    assert "Post rewards to /v1/rollouts/{id}/rewards" in warning
    assert (answer.usage.num_scored, answer.usage.num_pruned) == (24, 0)
    for ended in everyone(answer):
        assert (ended.survival_probability, ended.success_probability, ended.would_prune) == (1.0, None, None)
        assert (ended.signal, ended.head_version, ended.score) == ("confidence", 0, ended.confidence.bottom_windows)
        assert ended.confidence.lowest_window <= ended.confidence.bottom_windows <= ended.confidence.mean


async def test_a_cold_start_counts_the_labels_there_are(http):
    await teach(http, 1, group_size=8, redundancy=0, pruning={**PRUNING, "mode": "shadow"})
    (warning,) = (await roll(http, pruning={**PRUNING, "min_labels": MAX_MIN_LABELS})).warnings
    counts = warning.split("too few labels: ")[1].split(f", min_labels {MAX_MIN_LABELS}")[0]
    positive, negative = (int(word) for word in counts.split() if word.isdigit())
    assert positive + negative == 24
    assert min(positive, negative) > 0


async def test_after_rewards_candidates_are_pruned_with_the_probability_that_is_said(http):
    await teach(http)
    answer = await roll(http)
    assert answer.warnings == []
    assert answer.usage.num_pruned > 0
    assert answer.usage.num_scored == 24
    for group in answer.groups:
        assert (group.status, len(group.trajectories)) == ("complete", 4)
        assert {c.num_tokens for c in group.candidates if c.state == "pruned"} <= {DETECTION_LENGTH}
    for ended in everyone(answer):
        assert (ended.signal, ended.would_prune, ended.shadow_survival_probability) == ("head", None, None)
        assert 0 < ended.success_probability < 1
        assert 0 < ended.survival_probability <= 1
        assert ended.head_version > 0


async def test_shadow_stops_nothing_and_marks_what_active_would_have_stopped(http):
    await teach(http)
    fields = {"group_size": 8, "redundancy": 0}
    shadow = await roll(http, pruning={**PRUNING, "mode": "shadow", "allow_fewer": True}, **fields)
    active = await roll(http, pruning={**PRUNING, "allow_fewer": True}, **fields)
    assert (shadow.usage.num_pruned, shadow.usage.num_finished) == (0, 24)
    for marked, real in zip(shadow.groups, active.groups, strict=True):
        would = {t.index for t in marked.trajectories if t.would_prune}
        assert would == {c.index for c in real.candidates if c.state == "pruned"}
        given = {ended.index: ended.survival_probability for ended in (*real.trajectories, *real.candidates)}
        assert {t.index: t.shadow_survival_probability for t in marked.trajectories} == given
        # A trainer corrects by 1 / survival_probability, and here nothing was at stake.
        assert {t.survival_probability for t in marked.trajectories} == {1.0}
    assert active.usage.num_pruned > 0


@pytest.mark.parametrize("mode", ["active", "shadow"])
async def test_what_ends_before_detection_is_kept_for_sure_and_has_no_score(http, engine: FakeEngine, mode):
    engine.lengths = {i: 4 if i < 4 else 20 for i in range(8)}
    answer = await roll(http, pruning={**PRUNING, "mode": mode}, early_stop=False, sampling_params={"seed": 7})
    assert answer.usage.num_scored == 12
    unscored = {**NO_SCORE, "survival_probability": 1.0}
    if mode == "shadow":
        unscored |= {"would_prune": False, "shadow_survival_probability": 1.0}
    for group in answer.groups:
        assert [scoring(t) for t in group.trajectories] == [unscored] * 4
        assert all(c.score is not None for c in group.candidates)


async def test_chance_depends_on_the_sampling_seed_and_the_prompt_and_is_fresh_without_a_seed(http):
    seeds = []
    run_group = FakeEngine.run_group

    def spy(self, order):
        seeds.append(SCORING.of(order.said).seed)
        return run_group(self, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "run_group", spy)
        for fields in (
            {},
            {},
            {"sampling_params": {}},
            {"sampling_params": {}},
            {"prompts": [{"prompt": text} for text in "xyz"]},
        ):
            await roll(http, **fields)
    first, again, fresh, fresher, others = (set(seeds[start : start + 3]) for start in range(0, 15, 3))
    assert first == again
    assert len(first) == 3
    # the same seed and positions, as in a trainer's next step
    assert not first & others
    assert not fresh & fresher


async def test_confidence_that_cannot_be_seen_is_null(http, engine: FakeEngine):
    engine.part(FakeLearning).blind = True
    engine.part(FakeLearning).heads[HeadKey(DETECTION_LENGTH)] = HeadInfo(DETECTION_LENGTH, 16, 1, 1, 1)
    answer = await roll(http)
    assert {(ended.signal, ended.confidence) for ended in everyone(answer)} == {("head", None)}


async def test_the_score_names_the_weights_that_made_it(http, engine: FakeEngine):
    engine.weight_version = "v1"
    engine.weight_version_from = {DETECTION_LENGTH: "v2"}
    answer = await roll(http)
    assert {ended.score_weight_version for ended in everyone(answer)} == {"v1"}
    engine.weight_version_from = {DETECTION_LENGTH - 1: "v2"}
    assert {ended.score_weight_version for ended in everyone(await roll(http))} == {"v2"}


async def test_a_detection_length_that_max_tokens_never_reaches_is_said_once(http, engine: FakeEngine):
    for max_tokens in (DETECTION_LENGTH, 3):
        answer = await roll(http, sampling_params={"max_tokens": max_tokens})
        (warning,) = answer.warnings
        assert warning.startswith(f"detection_length (8) is not below max_tokens ({max_tokens}): nothing was scored")
        assert warning.endswith("for 3 of 3 prompts. Lower detection_length.")
        assert answer.usage.num_scored == 0
    engine.max_model_len = 10
    prompts = [{"prompt": "12345"}, {"prompt": "1"}]
    (warning, cold) = (await roll(http, prompts=prompts)).warnings
    assert warning.startswith("detection_length (8) is not below max_tokens (5): nothing was scored for 1 of 2 prompts")
    assert cold.startswith("cold start")


async def test_candidates_that_all_end_early_are_said(http, engine: FakeEngine):
    engine.lengths = dict.fromkeys(range(8), 5)
    (warning,) = (await roll(http, sampling_params={})).warnings
    assert warning.startswith("no candidate reached detection_length (8) while it ran: nothing was scored")
    assert "The longest had 5 tokens" in warning


async def test_one_detection_length_too_many_is_said(http):
    for length in range(1, MAX_DETECTION_LENGTHS + 1):
        (warning,) = (await roll(http, pruning={"detection_length": length})).warnings
        assert warning.startswith("cold start")
    (warning,) = (await roll(http, pruning={"detection_length": 9})).warnings
    assert f"judges at {MAX_DETECTION_LENGTHS} different values" in warning


async def test_a_shadow_of_pruning_that_could_never_prune_says_so(http):
    await teach(http)
    answer = await roll(http, pruning={**PRUNING, "mode": "shadow"}, redundancy=0)
    (warning,) = answer.warnings
    assert warning.startswith("nothing would ever be pruned: all 4 candidates are needed for a group of 4")
    assert "(redundancy), or set pruning.allow_fewer to true" in warning
    assert {ended.would_prune for ended in everyone(answer)} == {False}


async def test_an_engine_that_cannot_score_says_why(http, engine: FakeEngine):
    refusal = "this server runs with pipeline parallelism, which has no scores. Start it without."
    engine.part(FakeLearning).pruning_refusal = refusal
    response = await http.post("/v1/rollouts", json=body())
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"]) == ("pruning", f"pruning: {refusal}")
    assert engine.num_launched == 0
    assert (await roll(http, pruning=None)).usage.num_finished > 0


async def test_a_failed_report_does_not_fail_the_rollout(http, engine: FakeEngine):
    engine.dead = True  # after the last token, before the warnings
    (warning,) = (await roll(http)).warnings
    assert "too few labels, min_labels 8" in warning


def test_a_stream_s_last_event_has_the_warnings(client: RolloutClient):
    *_, done = client.stream(["a"], 2, 2, pruning=PRUNING, sampling_params={"max_tokens": 4})
    assert done.warnings[0].startswith("detection_length (8) is not below max_tokens (4)")


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


@pytest.mark.parametrize("ratio", ["0", "1.5", "much"])
async def test_a_keep_ratio_out_of_range_is_explained(http, ratio):
    response = await http.get(PATH, params={"keep_ratio": ratio})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "keep_ratio"


@pytest.mark.thorough
async def test_auto_compares_first_says_so_and_then_prunes_at_what_is_recommended(http):
    plan = {**PRUNING, "detection_length": "auto"}
    fields = {"pruning": plan, "sampling_params": {"seed": 5, **LONG}}
    answer = await roll(http, **fields)
    warning, *_ = answer.warnings
    assert warning.startswith('detection_length: "auto" cannot choose yet')
    assert ", ".join(map(str, TRIAL_LENGTHS)) in warning
    assert answer.usage.num_pruned == 0
    for seed in range(30):
        answer = await roll(http, **{**fields, "sampling_params": {"seed": seed, **LONG}})
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


async def test_every_trajectory_has_a_final_score_that_votes_can_take(http, engine: FakeEngine):
    plan = {**PRUNING, "final_score": True, "mode": "shadow"}
    engine.lengths = {index: 4 if index < 2 else 20 for index in range(8)}
    answer = await roll(http, pruning=plan, **PLAIN, sampling_params={"seed": 3})
    assert all(t.final_score is None for group in answer.groups for t in group.trajectories), "no head is trained"
    await post(http, answer)
    for seed in range(8):
        answer = await roll(http, pruning=plan, **PLAIN, sampling_params={"seed": 100 + seed})
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


async def test_a_list_stops_nobody_and_a_client_asks_for_the_report_of_each_length(http, client: RolloutClient):
    plan = {**PRUNING, "detection_length": LENGTHS}
    answer = await roll(http, pruning=plan, **PLAIN)
    assert (answer.detection_length, answer.usage.num_pruned) == (4, 0)
    assert all(t.would_prune is False for group in answer.groups for t in group.trajectories)
    await teach(http, 2, pruning=plan, **PLAIN)
    report = client.detection_lengths(keep_ratio=0.25)
    assert [row.detection_length for row in report.lengths] == sorted(LENGTHS)
    assert (report.keep_ratio, report.num_candidates) == (0.25, 2 * 24)
    for length in LENGTHS:  # each has a calibration and a head of its own
        assert client.report(length).head.detection_length == length
    assert len(rewards_of(await roll(http))) == 12


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([(500, 200), (90, 8)], ["2 candidates went on from an earlier round", "passed detection_length (8)"]),
        ([(500, 200), (90, 7)], ["is one too many"]),
        ([(500, 200), (6, 2)], ["1 candidates went on from an earlier round"]),
    ],
)
def test_nothing_is_scored_of_candidates_that_passed_the_detection_length_in_an_earlier_round(ends, words):
    """`ends`: tokens of each candidate, and those of an earlier round."""
    log = ScoringLog(GroupPlan(2), PruningPlan(8))
    endings = [Ending(index, "finished", num, num_resumed=resumed) for index, (num, resumed) in enumerate(ends)]
    log.group_over(SimpleNamespace(max_tokens=4096), [SimpleNamespace(parts={}, ending=each) for each in endings])
    (warning,) = log.warnings(None)
    assert all(word in warning for word in words), warning
