"""The order of a step: one test per rule, then whole runs in random order of events."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.rules.group_steps import Run
from tests.support.steps import group_steps
from vllm_rollout.kernel.rules.step import NO_VERDICTS, GroupSteps, LaunchRefused, Phase, Step, StepPart
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import CandidateId


class Listener(StepPart):
    """A part that writes down who has been stopped in each phase."""

    name = "listener"

    def __init__(self) -> None:
        self.stopped: list[tuple[Phase, int]] = []

    def phases(self) -> Mapping[Phase, Callable[[Step], None]]:
        return {phase: partial(self.look, phase) for phase in get_args(Phase)}

    def look(self, phase: Phase, step: Step) -> None:
        self.stopped.append((phase, len(step.stop)))


def test_a_part_decides_in_every_phase_and_groups_are_settled_after_the_first():
    part = Listener()
    run = Run(GroupSteps([part]))
    run.launch("a", [1, 9, 9], GroupTerms(1, 3))
    run.step()
    assert part.stopped == [("told", 0), ("settled", 2), ("groups", 2), ("ends", 2)]


def test_a_candidate_with_other_terms_of_a_part_is_refused_with_both_values():
    steps = GroupSteps([Listener()])
    steps.launch("a", GroupTerms(1, 2, parts={"listener": "these"}))
    with pytest.raises(LaunchRefused, match=r"listener of this group is 'these', .* got 'those'"):
        steps.launch("a", GroupTerms(1, 2, parts={"listener": "those"}))


def test_what_is_too_long_is_given_up_in_the_step_that_reaches_the_cap():
    run = Run()
    run.launch("a", [2, 2, 9], GroupTerms(2, 3, early_stop=False, patience=2.0))
    assert [run.step().stop for _ in range(3)] == [{}, {}, {}]
    assert run.step().stop == {CandidateId("a", 2): "surplus"}
    assert not run.steps.has_events


def test_a_group_that_waits_costs_no_step_and_gives_up_who_comes_late_and_is_too_long():
    steps, terms = group_steps(), GroupTerms(1, 3, early_stop=False, patience=2.0)
    first, group = steps.launch("a", terms)
    steps.ended(first, group, "stop", 3)
    steps.close_step({}, {}.__getitem__, now_s=0.0)
    assert group.length_cap == 6
    assert not steps.has_events
    late, _ = steps.launch("a", terms)
    assert steps.close_step({}, {late: 5}.__getitem__, now_s=1.0).stop == {}
    assert steps.close_step({}, {late: 6}.__getitem__, now_s=2.0).stop == {late: "surplus"}
    assert steps.forget_waiting(10_000.0) == ["a"]
    assert not steps.has_events


def test_a_group_that_makes_place_for_one_that_waits_is_over():
    steps = GroupSteps([], max_idle=2)
    over = []
    for name in "abc":
        first, group = steps.launch(name, GroupTerms(1, 3, early_stop=False))
        steps.ended(first, group, "stop", 3)
        over.append(steps.close_step({}, {}.__getitem__).over)
    assert (over, len(steps)) == ([(), (), ("a",)], 2)


def test_a_cancelled_group_defers_what_runs_and_keeps_what_has_finished():
    run = Run()
    run.launch("a", [2, 9, 9], GroupTerms(3, 3))
    run.step()
    assert run.steps.cancel("a")
    verdicts = run.step()
    assert verdicts.stop == {CandidateId("a", 1): "deferred", CandidateId("a", 2): "deferred"}
    assert run.groups["a"].state(0) == "finished"
    assert verdicts.over == ("a",)
    assert not run.steps.cancel("a")


def test_candidates_that_nobody_needs_stop_as_surplus_and_their_siblings_go_on():
    run = Run()
    run.launch("a", [2, 9, 9, 3], GroupTerms(4, 4, early_stop=False))
    run.step()
    run.steps.give_up("unknown", [0])
    run.steps.give_up("a", [0])
    run.steps.give_up("a", [1, 7])
    assert run.step().stop == {CandidateId("a", 1): "surplus"}
    assert [run.groups["a"].state(index) for index in range(4)] == ["finished", "surplus", "running", "running"]


@pytest.mark.parametrize(("length", "cancelled", "state"), [(9, True, "deferred"), (1, False, "surplus")])
def test_a_sibling_that_comes_after_the_end_or_the_cancellation_is_stopped_by_the_next_step(length, cancelled, state):
    run, terms = Run(), GroupTerms(1, 3)
    run.launch("a", [length], terms)
    assert run.steps.cancel("a") if cancelled else run.steps.close_step({}, len) is NO_VERDICTS
    run.step()
    id, _ = run.steps.launch("a", terms)
    run.lengths[id], run.running[id] = 9, 0
    assert run.step().stop == {id: state}


def test_a_group_that_completes_in_the_step_of_its_cancellation_is_complete():
    run = Run()
    run.launch("a", [1, 9], GroupTerms(1, 2))
    run.steps.cancel("a")
    assert run.step().stop == {CandidateId("a", 1): "surplus"}


def test_a_candidate_that_names_other_terms_or_a_taken_index_is_refused_and_changes_nothing():
    run = Run()
    run.launch("a", [3, 3], GroupTerms(1, 3))
    with pytest.raises(LaunchRefused, match=r"num_candidates of this group is 3, as its first candidate said, got 4"):
        run.steps.launch("a", GroupTerms(1, 4))
    with pytest.raises(LaunchRefused, match="index 1 of this group is taken"):
        run.steps.launch("a", GroupTerms(1, 3), 1)
    assert run.groups["a"].num_running == 2
    assert run.steps.launch("a", GroupTerms(1, 3))[0] == CandidateId("a", 2)


def test_a_refused_candidate_does_not_keep_an_idle_group_from_being_forgotten():
    run = Run(max_idle=1)
    for group_id in "ab":
        run.launch(group_id, [1], GroupTerms(1, 2, early_stop=False))
        run.step()
        with pytest.raises(LaunchRefused):
            run.steps.launch(group_id, GroupTerms(2, 2))
    assert len(run.steps) == 1


races = st.lists(
    st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 6), st.booleans()),
    min_size=1,
    max_size=5,
)
cancels = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4), st.booleans()), max_size=3)


@pytest.mark.thorough
@settings(max_examples=200)
@given(races, cancels)
def test_every_candidate_has_one_end_whatever_happens(groups, cancels):
    run = Run()
    for number, (lengths, size, early_stop) in enumerate(groups):
        terms = GroupTerms(min(size, len(lengths)), len(lengths), early_stop, None if early_stop else 1.5)
        run.launch(str(number), lengths, terms)
    assert_each_ends_once(run, cancels)


def assert_each_ends_once(
    run: Run, cancels: list[tuple[int, int, bool]], see: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Run all groups to their ends, with these events in between. `see`: returns what parts observe in a step."""
    over = []
    for step in range(1, 14):
        for at, number, some in cancels:
            if at == step:
                run.steps.give_up(str(number), [0, 2]) if some else run.steps.cancel(str(number))
        over += run.step(see()).over
    assert set(run.ends) == set(run.lengths)
    assert sorted(over) == sorted(run.groups)
    assert len(run.steps) == 0
    assert not run.steps.has_events
    for (group_id, index), (end, _) in run.ends.items():
        state = run.groups[group_id].state(index)
        assert state == end if end != "stop" else state in ("finished", "surplus")
