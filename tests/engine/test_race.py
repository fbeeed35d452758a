"""Groups in one in-process engine of vLLM's own: what stock vLLM says is said, races end when they are decided."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import V2, run_script


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> dict[str, Any]:
    return run_script("one_engine.py", "all", tiny_model)


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.thorough)])
def race(request: pytest.FixtureRequest, tiny_model: str) -> dict[str, Any]:
    if request.param == "v1":
        result = request.getfixturevalue("engine")
    else:
        result = run_script("one_engine.py", "race", tiny_model, **V2)
    mixin = {"v1": "CPURunnerV1Mixin", "v2": "RunnerV2Mixin"}[request.param]
    assert any(name.startswith(f"{mixin}@") for name in result["runner"])
    return result


def test_requests_without_our_fields_and_groups_without_redundancy_are_identical_to_stock(engine: dict) -> None:
    assert len(engine["stock"]) >= 200
    assert engine["untagged"] == engine["stock"]
    assert engine["tagged"] == engine["stock"]


def test_a_round_is_over_in_the_step_in_which_enough_groups_are_complete(engine: dict) -> None:
    """In the synchronous loop, the only one on a CPU. `tests/parts/rounds/test_scheduler_races.py` has both."""
    rounds = engine["rounds"]
    assert rounds["scheduler"] == "RolloutScheduler"
    cut = ["deferred", 12, False]
    assert rounds["clear"] == [
        [["finished", 5, False], ["finished", 9, False], ["surplus", 9, False]],
        [["finished", 12, False], ["finished", 7, False], ["surplus", 12, False]],
        [cut] * 3,
        [cut] * 3,
    ]
    assert rounds["tie"] == [
        [["finished", 5, False], ["finished", 9, False], ["surplus", 9, False]],
        [["surplus", 12, False], ["finished", 12, False], ["finished", 12, False]],
        [["finished", 12, True], ["finished", 11, False], ["surplus", 12, True]],  # said by whoever ends in that step
        [cut] * 3,
    ]
    assert rounds["clear_left"] == rounds["tie_left"] == [0, 0, 0]


@pytest.mark.versions
def test_the_worker_extension_slot_is_left_to_the_trainer(race: dict[str, Any]) -> None:
    assert race["extension"] == [0]


@pytest.mark.versions
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


@pytest.mark.versions
def test_what_a_stopped_candidate_made_is_the_beginning_of_what_it_would_have_made(race: dict[str, Any]) -> None:
    for whole, raced in zip(race["whole"], race["raced"], strict=True):
        assert raced[1] == whole[1][: len(raced[1])]


@pytest.mark.versions
def test_confidence_is_what_the_full_log_probabilities_say(race: dict[str, Any]) -> None:
    for _, tokens, _, confidence, expected in race["whole"] + race["raced"]:
        assert tokens
        assert confidence == pytest.approx(expected, rel=1e-3)  # mean and standard deviation


@pytest.mark.versions
def test_scoring_changes_no_token(race: dict[str, Any]) -> None:
    assert [row[:3] for row in race["scored"]] == [row[:3] for row in race["whole"]]


@pytest.mark.versions
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


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["joined", "by_prompt", "scored"])
def test_groups_of_single_requests_race(engine: dict, kind: str) -> None:
    (first,), (second,), *losers = engine["plain"][kind]
    assert [first[:2], second[:2]] == [[6, "stop"], [9, "stop"]]
    for ((tokens, finish_reason, stop_reason),) in losers:
        assert (finish_reason, stop_reason) == ("abort", "surplus")
        assert tokens <= 11, "stopped in the step of the second end, or the one already scheduled"


@pytest.mark.versions
def test_the_n_of_one_request_are_a_group_and_a_plain_one_is_vllms(engine: dict) -> None:
    plain = engine["plain"]
    assert sorted(end[1] for end in plain["n"][0]) == ["abort", "abort", "stop", "stop"]
    assert plain["plain"] == [[[12, "stop", 6]]]
    (((tokens, finish_reason, said),),) = plain["refused"]
    assert (tokens, finish_reason) == (0, "error")
    assert said.startswith("rollout_redundancy needs rollout_group_size"), "what needs our client is refused in words"
