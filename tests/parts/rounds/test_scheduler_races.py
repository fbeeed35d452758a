"""Groups that race each other in vLLM's own scheduler."""

from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.kernel.core.scheduler_runs import TracedRun, add_group, assert_nothing_left
from tests.kernel.core.test_internal_errors import assert_a_step_that_raises_fails_its_candidates
from tests.parts.rounds.steps import races_of
from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.core.calls import rollout_call
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.rounds.calls import CUT_RACE, FORGET_RACE, NUM_RACES, WIDEN_RACE, WiderRace
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.step import LOST, PLACE

SIZE = 2


def add_race(run: TracedRun, groups: list[list[int]], num_wanted: int, first: int = 0) -> list[list[str]]:
    """Groups of one race; their candidates' request ids."""
    places = [RacePlace("round", num_wanted, first + position) for position in range(len(groups))]
    return [
        add_group(run, f"g{place.position}", lengths, SIZE, said=PLACE.value(place), num_replaceable=len(lengths))
        for place, lengths in zip(places, groups, strict=True)
    ]


def call(run: TracedRun, operation: Operation[Any, Any], argument: Any) -> Any:
    """As an API process asks for it."""
    core = SimpleNamespace(scheduler=run.scheduler)
    return operation.decode_result(rollout_call(core, operation.name, operation.encode_argument(argument)))


def forget(run: TracedRun) -> None:
    assert call(run, NUM_RACES, None) == 1
    call(run, FORGET_RACE, "round")
    assert call(run, NUM_RACES, None) == 0
    assert races_of(run.scheduler)._race_of == {}
    assert_nothing_left(run)


def test_the_others_are_deferred_in_the_step_in_which_enough_groups_are_complete(new_run, loop):
    run = new_run()
    first, second, third, fourth = add_race(run, [[10, 12, 90], [90, 20, 15], [50, 60, 70], [19, 80, 80]], 2)
    run.run()
    assert [run.state(id) for id in [*first, *second]] == [
        "finished", "finished", "surplus", "surplus", "finished", "finished",
    ]  # fmt: skip
    assert [run.num_tokens(id) for id in second] == [20, 20, 15]
    assert [run.state(id) for id in third] == ["deferred"] * 3
    assert [run.state(id) for id in fourth] == ["finished", "deferred", "deferred"]
    for id in [*third, *fourth[1:]]:
        assert run.num_tokens(id) == 20
        assert run.num_dropped(id) == loop.depth - 1
        assert (run.last(id).finish_reason, run.last(id).stop_reason) == (FinishReason.ABORT, "deferred")
        assert not bool(LOST.of(run.note(id).parts))
    forget(run)


def test_a_group_that_completes_with_the_last_winner_has_lost(new_run):
    run = new_run()
    first, second, third = add_race(run, [[10, 10, 90], [11, 20, 90], [20, 12, 90]], 2)
    run.run()
    assert [bool(LOST.of(run.note(id).parts)) for id in [*first, *second]] == [False] * 6
    assert [bool(LOST.of(run.note(id).parts)) for id in third if run.state(id) != "finished"] == [True]
    assert bool(LOST.of(run.note(third[0]).parts))
    assert not bool(LOST.of(run.note(third[1]).parts))  # that was earlier
    forget(run)


def test_what_waits_for_room_is_deferred_without_a_token(new_run):
    run = new_run(max_num_seqs=4)
    _, second, third = add_race(run, [[10, 10], [50, 60], [50, 60]], 1)
    run.run()
    assert [run.state(id) for id in [*second, *third]] == ["deferred"] * 4
    assert [run.num_tokens(id) for id in [*second, *third]] == [10, 10, 0, 0]
    forget(run)


def test_a_group_that_comes_when_the_race_is_over_is_deferred(new_run):
    run = new_run()
    add_race(run, [[10, 12]], 1)
    run.run()
    ((one, two),) = add_race(run, [[50, 60]], 1, first=1)
    run.run()
    assert [run.state(id) for id in (one, two)] == ["deferred"] * 2
    assert run.num_tokens(one) <= 1
    forget(run)


def test_a_lost_candidate_is_awaited_and_its_group_completes(new_run):
    run = new_run()
    ((one, two, three),) = add_race(run, [[30, 40, 90]], 1)
    for _ in range(5):
        run.step()
    run.scheduler.finish_requests(one, RequestStatus.FINISHED_ABORTED)
    run.step()
    assert run.note(one).is_replaced
    assert run.note(one).state == "failed"
    tag = CandidateTag.of(run.requests[two].sampling_params.extra_args)
    run.add("g0-3", 12, extra_args=msgspec.structs.replace(tag, index=3).to_extra_args())
    run.run()
    assert [run.state(id) for id in (two, three, "g0-3")] == ["finished", "surplus", "finished"]
    assert not run.note("g0-3").is_replaced
    forget(run)


def test_a_race_that_is_cut_from_outside_stops_in_the_next_step(new_run):
    run = new_run()
    groups = add_race(run, [[50, 60], [50, 60]], 2)
    for _ in range(10):
        run.step()
    call(run, CUT_RACE, "elsewhere")  # another round's
    call(run, FORGET_RACE, "elsewhere")
    run.step()
    assert run.outputs.get(groups[0][0], [])[-1].finish_reason is None
    call(run, CUT_RACE, "round")
    run.run()
    assert [run.state(id) for ids in groups for id in ids] == ["deferred"] * 4
    assert {run.num_tokens(id) for ids in groups for id in ids} == {12}
    forget(run)


def test_a_wider_race_waits_for_another_group(new_run):
    run = new_run()
    first, second, third = add_race(run, [[10, 12], [20, 25], [30, 40]], 1)
    for _ in range(5):
        run.step()
    call(run, WIDEN_RACE, WiderRace("round", 2))
    call(run, WIDEN_RACE, WiderRace("elsewhere", 9))
    call(run, FORGET_RACE, "elsewhere")
    run.run()
    assert [run.state(id) for id in [*first, *second]] == ["finished"] * 4
    assert [run.state(id) for id in third] == ["deferred"] * 2
    assert [run.num_tokens(id) for id in third] == [25, 25]
    forget(run)


def test_a_race_that_is_forgotten_leaves_its_groups_to_themselves(new_run):
    run = new_run()
    groups = add_race(run, [[10, 12], [20, 25]], 1)
    for _ in range(5):
        run.step()
    call(run, FORGET_RACE, "round")
    call(run, FORGET_RACE, "round")
    run.run()
    assert [run.state(id) for ids in groups for id in ids] == ["finished"] * 4
    assert call(run, NUM_RACES, None) == 0
    assert_nothing_left(run)


def test_a_race_that_cannot_be_settled_fails_the_candidates_of_its_step(new_run, monkeypatch):
    """Races are settled in a step in which a candidate has ended: it has its own last output, without a note."""
    run = new_run()
    for group_id in "gh":
        add_group(run, group_id, [30, 40, 50, 60], 2)
    run.add("o", 70)
    run.step()
    assert_a_step_that_raises_fails_its_candidates(run, monkeypatch, races_of(run.scheduler), "settle")
