"""Runs and rounds that an earlier version kept on disk."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_rollout.parts.rounds.http.body import RoundRequest, RunRequest
from vllm_rollout.parts.rounds.http.earlier import with_new_names


@pytest.mark.parametrize("until", [None, "complete"])
def test_a_run_that_was_kept_without_until_goes_on(until: str | None) -> None:
    sessions = {"max_turns": 3, "until": "complete"}
    kept = {"group_size": 2, "prompts_per_round": 2, "until": until, "sessions": sessions}
    run = RunRequest.model_validate(with_new_names(kept))
    assert run.sessions is not None
    assert run.sessions.max_turns == 3


@pytest.mark.parametrize("kept", [{"until": "variance"}, {"sessions": {"until": "variance"}}])
def test_a_run_that_was_kept_with_until_is_refused(kept: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="removed, leave it out"):
        RunRequest.model_validate(with_new_names({"group_size": 2, "prompts_per_round": 2, **kept}))


@pytest.mark.parametrize(
    ("old", "words"),
    [
        (None, None), ({}, ["logprobs"]), ({"logprobs": False}, []), ({"text": True}, ["text", "logprobs"]),
        ({"text": True, "logprobs": False, "unselected": True}, ["text", "stopped"]),
    ],
)  # fmt: skip
def test_what_an_earlier_version_kept_is_read_under_its_new_names(old: Any, words: list[str] | None) -> None:
    kept = {"group_size": 2, "prompts_per_round": 2, "sampling": {"seed": 3}, "return": old}
    run = RunRequest.model_validate(with_new_names(kept))
    assert (run.sampling_params, run.include) == ({"seed": 3}, words)
    memo = json.dumps({"digest": "d", "sampling": {"seed": 4}, "return": old})
    again = RoundRequest.from_memo(memo)
    assert (again.sampling_params, again.include) == ({"seed": 4}, words)


@pytest.mark.parametrize("kept", [[], None, "text", {"return": 3}, {"return": ["text"]}, {"sessions": 3}])
def test_what_nobody_kept_is_a_type_error(kept: Any) -> None:
    with pytest.raises(TypeError):
        with_new_names(kept)
