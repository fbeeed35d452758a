"""Requests that reach the engine core with our fields themselves, as from a trainer's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason

from tests.kernel.core.scheduler_runs import TracedRun, assert_nothing_left
from vllm_rollout.adapter.names import learned_name
from vllm_rollout.kernel.core.joining import JoinRefused
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.kernel.wire import TAG_KEY

JOIN = {"rollout_group_id": "q1", "rollout_group_size": 2, "rollout_num_candidates": 4}
PROMPT = {"rollout_group_size": 2, "rollout_num_candidates": 4}
"""Fields of a request whose group is named by its prompt."""


def ends(run: TracedRun, *request_ids: str) -> list[tuple[str, int | str | None]]:
    return [(str(run.last(id).finish_reason), run.last(id).stop_reason) for id in request_ids]


def add(run: TracedRun, lengths: list[int], fields: dict[str, Any], name: str = "r", **kwargs: Any) -> list[str]:
    ids = [f"{name}{position}" for position in range(len(lengths))]
    for id, length in zip(ids, lengths, strict=True):
        run.add(id, length, extra_args=dict(fields), **kwargs)
    return ids


def test_siblings_race_and_end_in_words_that_any_client_reads(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    ids = add(run, [5, 60, 9, 70], JOIN)
    run.run()
    assert ends(run, *ids) == [("stop", None), ("abort", "surplus"), ("stop", None), ("abort", "surplus")]
    assert [run.last(id).kv_transfer_params for id in ids] == [None] * 4
    assert_nothing_left(run)


def test_every_token_is_sent_at_once(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    (id,) = add(run, [30], {**JOIN, "rollout_group_size": 1, "rollout_num_candidates": 1})
    run.run()
    assert [len(output.new_token_ids) for output in run.outputs[id]] == [1] * 30


def test_what_else_is_in_extra_args_stays_and_the_callers_own_is_not_changed(
    new_run: Callable[..., TracedRun],
) -> None:
    run = new_run()
    fields = {**JOIN, "theirs": 1}
    request = run.add("a", 5, extra_args=fields)
    assert fields == {**JOIN, "theirs": 1}
    assert request.sampling_params.extra_args.keys() == {"theirs", TAG_KEY}
    run.run()


@pytest.mark.parametrize(
    "value", [[1], "x", 7, {}, ["g", 0, {"group_size": 1, "num_candidates": 1}, 1], b"", b"g", b"\x91\x01"]
)
def test_what_a_client_of_vllms_own_server_writes_in_the_place_of_a_tag_is_none(new_run, value) -> None:
    run = new_run()
    (id,) = add(run, [5], {TAG_KEY: value})
    run.run()
    assert ends(run, id) == [("stop", None)]
    assert run.last(id).kv_transfer_params is None
    assert_nothing_left(run)


def test_another_prompt_or_namespace_is_another_group(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    ids = [
        *add(run, [5, 6, 40, 40], JOIN, "a"),
        *add(run, [20, 21, 40, 40], {**JOIN, "rollout_namespace": "run 2"}, "b"),
    ]
    run.run()
    assert [reason for _, reason in ends(run, *ids)] == [None, None, "surplus", "surplus"] * 2
    assert run.num_tokens("b0") == 20, "the first group's end does not concern it"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rollout_redundancy": 8}, "rollout_redundancy needs rollout_group_size in vLLM's own engine"),
        ({"rollout_group_id": "q"}, "rollout_group_size: is required to join a group"),
        ({"rollout_num_candidates": 8}, "rollout_num_candidates needs rollout_group_size"),
        (
            {**JOIN, "rollout_group_size": 5},
            "rollout_num_candidates: rollout_num_candidates counts all siblings and must be between",
        ),
        ({**JOIN, "rollout_grup": 5}, "rollout_grup: is not a field of this version"),
    ],
)
def test_a_bad_field_ends_its_request_with_what_is_wrong(
    new_run: Callable[..., TracedRun], fields: dict[str, Any], said: str
) -> None:
    run = new_run()
    add(run, [9], fields, "bad")
    add(run, [9], {}, "plain")
    run.run()
    output = run.last("bad0")
    assert output.finish_reason == FinishReason.ERROR
    assert output.stop_reason.startswith(said)
    assert run.num_tokens("bad0") == 0
    assert run.num_tokens("plain0") == 9
    assert_nothing_left(run)


def test_a_prompt_that_comes_in_parts_has_no_group(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    request = run.add("plain", 9)
    request.resumable, request.sampling_params.extra_args = True, dict(JOIN)
    with pytest.raises(JoinRefused, match="rollout_group_id is for a request whose prompt comes whole"):
        run.scheduler._joining.tag(request)


def test_a_sibling_that_disagrees_is_told_which_field(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    ids = add(run, [5, 6, 40], JOIN)
    (other,) = add(run, [5], {**JOIN, "rollout_group_size": 3}, "other")
    run.run()
    assert run.last(other).finish_reason == FinishReason.ERROR
    assert run.last(other).stop_reason.startswith("rollout_group_size of this group is 2, as its first candidate said")
    assert ends(run, *ids)[2] == ("abort", "surplus")


def test_siblings_without_an_id_are_requests_of_one_prompt(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    both = [
        *add(run, [5, 60, 9, 70], PROMPT, "a", prompt_token_ids=[7, 8]),
        *add(run, [80, 30, 90, 20], PROMPT, "b", prompt_token_ids=[7, 9]),
    ]
    run.run()
    won, lost = ("stop", None), ("abort", "surplus")
    assert ends(run, *both) == [won, lost, won, lost, lost, won, lost, won]
    assert_nothing_left(run)


def test_a_full_group_without_an_id_leaves_the_next_ones_to_another(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    first = add(run, [5, 6, 40, 41], PROMPT, "first")
    second = add(run, [15, 50, 16, 51], PROMPT, "second")
    other_terms = add(run, [70, 71, 72], {**PROMPT, "rollout_num_candidates": 3}, "other")
    run.run()
    reasons = [reason for _, reason in ends(run, *first, *second, *other_terms)]
    assert reasons == [None, None, "surplus", "surplus", None, "surplus", None, "surplus", None, None, "surplus"]
    assert_nothing_left(run)


def test_a_later_batch_is_not_judged_by_an_earlier_one_that_was_never_whole(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    for batch in range(3):  # three of the four that were announced come
        ids = add(run, [5, 6, 40], PROMPT, f"batch{batch}-")
        run.run()
        assert [reason for _, reason in ends(run, *ids)] == [None, None, "surplus"], batch
    assert len(run.scheduler._joining._prompt_groups) == 0


def test_groups_that_are_never_whole_are_bounded(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    table = run.scheduler.group_steps._table
    table._max_waiting = 8
    for batch in range(20):
        add(run, [3], PROMPT, f"open{batch}-")
        add(run, [3], {**JOIN, "rollout_group_id": f"q{batch}"}, f"named{batch}-")
        run.run()
    assert len(table) == table.num_waiting == 8
    assert not run.scheduler._joining._numbers


@pytest.mark.parametrize("id", ["x" * 513, "漢" * 129])
def test_an_id_that_would_fill_memory_is_refused(new_run: Callable[..., TracedRun], id: str) -> None:
    run = new_run()
    run.add(id, 5, extra_args=dict(JOIN))
    run.run()
    ((reason, said),) = ends(run, id)
    assert (reason, len(said) < 300) == ("error", True)
    assert "at most 512 characters (128 where not all are ASCII), got" in said
    assert_nothing_left(run)


def test_an_adapter_of_a_large_name_is_learned_of_by_its_digest() -> None:
    names = [learned_name(LoRARequest(name, 1, "/adapter")) for name in ("sql", "x" * 2**20, "y" * 2**20)]
    assert (names[0], len(set(names)), max(map(len, names)) < 100) == ("sql", 3, True)
    assert learned_name(None) == BASE_MODEL
