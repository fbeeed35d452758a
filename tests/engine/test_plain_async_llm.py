"""Groups in an AsyncLLM that vLLM builds: no client of ours guards them.

tests/kernel/core/test_joining.py has what else may go wrong.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import run_script

SURPLUS = ["abort", "surplus"]
pytestmark = pytest.mark.versions


@pytest.fixture(scope="module")
def result(tiny_model: str) -> dict[str, Any]:
    return run_script("plain_async_llm.py", tiny_model)


def ends(choices: list[list[Any]]) -> list[list[Any]]:
    """Ends of candidates. A winner's stop reason, its last token, is left out."""
    return [choice[1:] if choice[1] != "stop" else ["stop"] for choice in choices]


def test_a_member_that_disagrees_is_told_so_and_disturbs_nobody(result: dict[str, Any]) -> None:
    tokens, finish_reason, said = result["disagrees"]
    assert (tokens, finish_reason) == (0, "error")
    assert said.startswith("rollout_group_size of this group is 2")
    assert ends(result["others"]) == [["stop"], ["stop"], SURPLUS]


def test_a_sibling_that_is_cancelled_leaves_the_others_alone(result: dict[str, Any]) -> None:
    assert ends(result["cancelled"]) == [["stop"], SURPLUS, ["stop"]]
    assert result["unfinished"] == 0


def test_over_two_ranks_siblings_meet_where_they_are_sent(result: dict[str, Any]) -> None:
    for group in result["pinned"]:
        assert ends(group) == [["stop"], ["stop"], SURPLUS, SURPLUS]
    assert ends(result["spread"])[:2] == [["stop"], ["stop"]], (
        "apart, nobody stops before two have finished on its rank"
    )


def test_requests_and_choices_are_taught_by_the_ids_that_they_were_given(result: dict[str, Any]) -> None:
    assert "abort" not in result["taught"]["ended"]
    assert result["taught"]["statuses"] == ["accepted"] * 6 + ["unknown"] * 2
