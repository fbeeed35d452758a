"""An exception in our code fails the candidate or the group that it concerns: the engine, and all others, go on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernel.core.scheduler_runs import LOST, WON, TracedRun, add_group, assert_nothing_left
from vllm_rollout.kernel.core.ports import CorePart, CoreParts
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, nothing_seen

LENGTHS = [30, 40, 50, 60]
PLANTED = "planted"


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(PLANTED)


def only_for(wanted: Callable[..., bool], method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, which raises where `wanted` says so."""

    def planted(*args: Any, **kwargs: Any) -> Any:
        return fail() if wanted(*args, **kwargs) else method(*args, **kwargs)

    return planted


def of_group_g(run: TracedRun, place: str) -> tuple[Any, Callable[..., bool]]:
    """The object of a method, and a test of which calls of it are about group g."""
    steps = run.scheduler.group_steps
    group = run.scheduler.launched[("g", 0)].group
    return {
        "settle": (Group, lambda self, *_: self is group),
        "end": (Group, lambda self, *_: self is group),
        "_release": (steps, lambda group_id, *_: group_id == "g"),
    }[place]


@pytest.fixture
def run(new_run) -> TracedRun:
    """With groups g and h of two of four, and an ordinary request o."""
    run = new_run()
    for group_id in ("g", "h"):
        add_group(run, group_id, LENGTHS, 2, stop=["never said"])
    run.add("o", 70)
    return run


def assert_others_go_on(run: TracedRun) -> None:
    assert run.ends([f"h-{index}" for index in range(4)]) == [WON, WON, LOST, LOST]
    assert run.tokens("h-1")[:39] == run.own_tokens("h-1", 39)
    assert len(run.tokens("o")) == 70
    assert_nothing_left(run)
    assert run.scheduler.num_internal_errors > 0


@pytest.mark.parametrize("place", ["settle", "end", "_release"])
def test_a_group_whose_rules_raise_fails_alone(run, monkeypatch, place):
    run.step()
    assert_group_g_fails_alone(run, monkeypatch, *of_group_g(run, place), place)


def assert_group_g_fails_alone(run, monkeypatch, owner, wanted, place):
    """A method of `owner` raises in the calls that are `wanted`."""
    monkeypatch.setattr(owner, place, only_for(wanted, getattr(owner, place)))
    run.run()
    states = [run.state(f"g-{index}") for index in range(4)]
    assert "failed" in states
    for index, state in enumerate(states):
        assert (PLANTED in str(run.note(f"g-{index}").error)) == (state == "failed")
    assert_others_go_on(run)


CANDIDATES: dict[str, tuple[str, str]] = {
    "held outputs": ("held", "add"), "last output": ("held", "finish"), "stop strings": ("stop_strings", "found_at"),
}  # fmt: skip


@pytest.mark.parametrize("place", CANDIDATES.values(), ids=CANDIDATES)
def test_a_candidate_whose_outputs_cannot_be_made_fails_alone(run, place):
    of, name = place
    run.step()
    candidate = run.scheduler.launched[("g", 0)]
    methods = {method: getattr(getattr(candidate, of), method) for method in ("add", "finish") if of == "held"}
    setattr(candidate, of, SimpleNamespace(**{**methods, name: fail}))
    run.run()
    assert run.state("g-0") == "failed"
    assert PLANTED in run.note("g-0").error
    assert run.state("g-1") == "finished"
    assert_others_go_on(run)


@pytest.mark.parametrize("place", ["launch", "_launch"])
def test_a_request_that_cannot_be_launched_fails(run, monkeypatch, place):
    owner = run.scheduler.group_steps if place == "launch" else run.scheduler
    monkeypatch.setattr(owner, place, fail)
    add_group(run, "i", LENGTHS[:2], 1)
    monkeypatch.undo()
    run.run()
    assert [run.state(f"i-{index}") for index in range(2)] == ["failed"] * 2
    assert PLANTED in run.note("i-0").error
    assert run.ends([f"g-{index}" for index in range(4)]) == [WON, WON, LOST, LOST]
    assert_others_go_on(run)


@pytest.mark.parametrize("place", ["_close_step", "_pass_outputs", "_forget_ended", "_stop", "_end_by_stop_strings"])
def test_whatever_else_raises_in_a_step_fails_its_candidates_and_nobody_else(run, monkeypatch, place):
    run.step()
    assert_a_step_that_raises_fails_its_candidates(run, monkeypatch, run.scheduler, place)


def assert_a_step_that_raises_fails_its_candidates(run, monkeypatch, owner, place):
    run.scheduler.group_steps.give_up("g", [3])  # an event in a step in which no candidate ends
    monkeypatch.setattr(owner, place, fail)
    while run.scheduler.group_steps and run.step():
        if place == "_forget_ended" and run.scheduler.faults.num:
            break
    monkeypatch.undo()
    add_group(run, "i", LENGTHS, 2)
    run.run()
    assert all(run.state(f"g-{index}") == "failed" for index in range(3))
    assert run.ends([f"i-{index}" for index in range(4)]) == [WON, WON, LOST, LOST]
    assert len(run.tokens("o")) == 70
    assert_nothing_left(run)


@pytest.mark.parametrize("hook", ["most_running", "stepped", "forget"])
def test_a_part_of_the_core_is_left_out_where_it_raises(run, hook):
    part = type("Failing", (CorePart,), {hook: fail})(run.scheduler)
    run.scheduler.parts = CoreParts([("failing", part)], run.scheduler.faults)
    run.run()
    assert run.ends([f"g-{index}" for index in range(4)]) == [WON, WON, LOST, LOST]
    assert_others_go_on(run)


def test_candidates_that_the_worker_could_not_observe_fail(run):
    sample, told = run.sample, []

    def sample_and_fail(scheduled: Any) -> Any:
        output = sample(scheduled)
        if not told and run.num_steps > 3:
            told.append(True)
            failed = {"g-1": PLANTED, "gone": "?"}
            setattr(output, REPORT_ATTRIBUTE, nothing_seen(len(output.req_ids), failed=failed, num_internal_errors=2))
        return output

    run.sample = sample_and_fail
    run.run()
    assert run.note("g-1").error == PLANTED
    assert run.ends(["g-0", "g-2"]) == [WON, WON]
    assert run.scheduler.num_internal_errors == 2
    assert_others_go_on(run)
