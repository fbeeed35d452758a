"""A race inside a real engine, on both model runners."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import HERE, python_path, run_script

pytestmark = pytest.mark.versions

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": python_path(HERE / "v2_on_cpu")}


@pytest.fixture(scope="module", params=["v1", "v2"])
def race(request: pytest.FixtureRequest, tiny_model: str) -> dict[str, Any]:
    result = run_script("race.py", tiny_model, **(V2 if request.param == "v2" else {}))
    mixin = {"v1": "CPURunnerV1Mixin", "v2": "RunnerV2Mixin"}[request.param]
    assert any(name.startswith(f"{mixin}@") for name in result["runner"])
    return result


def test_the_worker_extension_slot_is_left_to_the_trainer(race: dict[str, Any]) -> None:
    assert race["extension"] == [0]


def test_losers_stop_in_the_step_the_group_completes(race: dict[str, Any]) -> None:
    # Every candidate is cut, so a group closes when so many are that too few are left to end by themselves.
    num_candidates, group_size = len(race["lengths"]), race["group_size"]
    closing_length = sorted(race["lengths"])[num_candidates - group_size]
    for start in range(0, len(race["raced"]), num_candidates):
        rows = race["raced"][start : start + num_candidates]
        assert sorted(row[0] for row in rows) == ["finished"] * group_size + ["surplus"] * (num_candidates - group_size)
        for state, token_ids, finish_reason, *_ in rows:
            assert finish_reason == ("length" if state == "finished" else "abort")
            assert len(token_ids) == closing_length if state == "surplus" else len(token_ids) < closing_length


def test_what_a_stopped_candidate_made_is_the_beginning_of_what_it_would_have_made(race: dict[str, Any]) -> None:
    for whole, raced in zip(race["whole"], race["raced"], strict=True):
        assert raced[1] == whole[1][: len(raced[1])]


def test_confidence_is_what_the_full_log_probabilities_say(race: dict[str, Any]) -> None:
    for _, tokens, _, confidence, expected in race["whole"] + race["raced"]:
        assert tokens
        assert confidence == pytest.approx(expected, rel=1e-3)  # mean and standard deviation


def test_scoring_changes_no_token(race: dict[str, Any]) -> None:
    assert [row[:3] for row in race["scored"]] == [row[:3] for row in race["whole"]]


def test_a_candidate_is_scored_by_the_states_that_produced_its_tokens_at_the_detection_lengths_and_its_last_one(
    race: dict[str, Any],
) -> None:
    for row, shown in zip(race["scored"], race["shown"], strict=True):
        # One that ends with the very token of a detection length is not judged there any more.
        lives_on = {str(length) for length in race["detection_lengths"] if len(row[1]) > length}
        assert shown.keys() == {*lives_on, "0"}
    for shown in (each for its in race["shown"] for each in its.values()):
        assert shown["hidden_error"] < 1e-3
        assert shown["logit"][0] == pytest.approx(shown["logit"][1], abs=1e-2)
        assert shown["mean"][0] == pytest.approx(shown["mean"][1], rel=1e-3)
        assert shown["head_version"] == 3
