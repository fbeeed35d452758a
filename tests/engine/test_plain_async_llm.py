"""Groups that go wrong in an AsyncLLM that vLLM builds: no client of ours guards them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import run_script

SURPLUS = ["abort", "surplus"]


@pytest.fixture(scope="module")
def result(tiny_model: str) -> dict[str, Any]:
    return run_script("plain_async_llm.py", tiny_model, "1")


def ends(choices: list[list[Any]]) -> list[list[Any]]:
    """Who won and who lost; a winner's stop reason is the token at which it stopped."""
    return [choice[1:] if choice[1] != "stop" else ["stop"] for choice in choices]


def test_a_member_that_disagrees_is_told_so_and_disturbs_nobody(result: dict[str, Any]) -> None:
    tokens, finish_reason, said = result["disagrees"]
    assert (tokens, finish_reason) == (0, "error")
    assert said.startswith("rollout_group_size of this group is 2")
    assert ends(result["others"]) == [["stop"], ["stop"], SURPLUS]


def test_a_member_that_comes_after_the_end_is_surplus_at_once(result: dict[str, Any]) -> None:
    tokens, *end = result["late"]
    assert end == SURPLUS
    assert tokens <= 2


def test_more_members_than_announced_begin_another_group(result: dict[str, Any]) -> None:
    first, second, last = (result["more_than_announced"][part] for part in (slice(4), slice(4, 8), slice(8, None)))
    for group in (first, second):
        assert ends(group) == [["stop"], ["stop"], SURPLUS, SURPLUS]
    assert ends(last) == [["stop"]]


def test_batches_that_are_never_whole_do_not_meet(result: dict[str, Any]) -> None:
    for batch in result["later_batches"]:
        assert ends(batch) == [["stop"], ["stop"], SURPLUS]
    assert ends(result["never_whole"]) == [["stop"]] * 64


def test_a_sibling_that_is_aborted_or_cancelled_leaves_the_others_alone(result: dict[str, Any]) -> None:
    assert ends(result["aborted"]) == [["abort", None], ["stop"], SURPLUS, ["stop"]]
    assert ends(result["cancelled"]) == [["stop"], SURPLUS, ["stop"]]
    assert result["unfinished"] == 0


def test_over_two_ranks_siblings_meet_where_they_are_sent(tiny_model: str) -> None:
    result = run_script("plain_async_llm.py", tiny_model, "2")
    for group in result["pinned"]:
        assert ends(group) == [["stop"], ["stop"], SURPLUS, SURPLUS]
    assert ends(result["spread"])[:2] == [["stop"], ["stop"]], (
        "apart, nobody stops before two have finished on its rank"
    )
    assert result["unfinished"] == 0
