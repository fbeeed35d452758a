"""Groups that race each other, step by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.rules.group_steps import Run
from tests.parts.rounds.steps import is_lost, races_of
from tests.support.steps import group_steps
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import CandidateId
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.step import PLACE, RoundsStep

PAIR_OF_THREE = GroupTerms(2, 3)


class Round(Run):
    """Groups that race each other, each named by its position."""

    def __init__(self, lengths: list[list[int]], num_wanted: int, terms: GroupTerms = PAIR_OF_THREE) -> None:
        super().__init__()
        self.terms, self.num_wanted = terms, num_wanted
        self.lost: list[str] = []
        self.num_steps = 0
        for position, group in enumerate(lengths):
            self.enter(position, group)

    def enter(self, position: int, lengths: list[int]) -> None:
        self.launch(f"g{position}", lengths, self.terms, PLACE.value(RacePlace("round", self.num_wanted, position)))

    def run(self) -> None:
        while self.running:
            self.advance()

    def advance(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            self.step()
            self.lost += sorted(id for id, group in self.groups.items() if is_lost(group) and id not in self.lost)

    def cut(self, race_id: str) -> None:
        self.steps.part(RoundsStep).cut(race_id, self.steps)

    def states(self, position: int) -> list[str]:
        return [end for (group_id, _), (end, _) in sorted(self.ends.items()) if group_id == f"g{position}"]


def test_the_others_stop_in_the_step_in_which_enough_groups_are_complete() -> None:
    round = Round([[5, 6, 30], [9, 3, 40], [20, 20, 20]], num_wanted=2)
    round.run()
    assert round.num_steps == 9
    assert round.states(0) == ["stop", "stop", "surplus"]
    assert round.ends[CandidateId("g1", 2)] == ("surplus", 9)
    assert [round.ends[CandidateId("g2", i)] for i in range(3)] == [("deferred", 9)] * 3
    assert len(round.steps) == 0


@pytest.mark.parametrize("num_wanted", [1, 2])
def test_a_sibling_that_comes_after_its_group_is_complete_neither_counts_it_again_nor_makes_it_lose(
    num_wanted: int,
) -> None:
    steps, first_of_two = group_steps(), GroupTerms(1, 2)

    def launch(group_id: str, index: int, position: int) -> tuple[CandidateId, Group]:
        return steps.launch(group_id, first_of_two, index, said=PLACE.value(RacePlace("r", num_wanted, position)))

    (first, group), others = launch("a", 0, 0), {launch("b", index, 1)[0] for index in range(2)}
    steps.ended(first, group, "stop", 1)
    assert steps.close_step({}, lambda _: 1).stop == ({} if num_wanted == 2 else dict.fromkeys(others, "deferred"))
    late, _ = launch("a", 1, 0)
    assert steps.close_step({}, lambda _: 1).stop == {late: "surplus"}
    assert not is_lost(group)


def test_groups_that_complete_in_one_step_tie_by_their_longest_then_by_position() -> None:
    """A group may complete later than its longest candidate would say: candidates start when they start."""
    round = Round([[7, 7, 9], [7, 7, 9], [7, 7, 9]], num_wanted=1)
    round.run()
    assert round.lost == ["g1", "g2"]
    round = Round([[9, 9, 9]], num_wanted=1)
    round.advance(4)
    round.enter(1, [5, 5, 5])
    round.run()
    assert round.lost == ["g0"]
    assert round.states(0) == ["stop", "stop", "stop"]


def test_a_group_that_comes_after_the_cut_is_deferred_at_once_unless_the_race_was_made_wider() -> None:
    round = Round([[2, 2, 2], [8, 8, 8]], num_wanted=1)
    round.run()
    round.enter(2, [5, 5, 5])
    round.advance()
    races_of(round.steps).widen("round", 2)
    round.enter(3, [5, 6, 9])
    round.run()
    assert [round.states(position) for position in (1, 2)] == [["deferred"] * 3] * 2
    assert round.states(3) == ["stop", "stop", "surplus"]


def test_a_race_that_is_cut_from_outside_stops() -> None:
    round = Round([[4, 4, 4], [8, 8, 8]], num_wanted=2)
    round.advance(5)
    round.cut("round")
    round.advance()
    assert round.num_steps == 6
    assert round.states(1) == ["deferred"] * 3


def test_what_is_said_of_a_race_holds_for_groups_that_are_on_their_way() -> None:
    """They were sent before, and come later."""
    round = Round([], num_wanted=1)
    round.cut("round")
    round.enter(0, [8, 8, 8])
    round.advance()
    assert round.states(0) == ["deferred"] * 3
    round.enter(0, [8])  # a sibling that was slower still
    races_of(round.steps).widen("round", 2)
    round.enter(1, [2, 2, 2])
    round.enter(2, [4, 4, 4])
    round.run()
    assert [round.states(position) for position in (1, 2)] == [["stop", "stop", "stop"], ["stop", "stop", "stop"]]


def test_a_group_whose_whole_pool_counts_is_complete_when_nothing_runs() -> None:
    round = Round([[2, 3, 12], [4, 5, 6], [9, 9, 9]], num_wanted=1, terms=GroupTerms(2, 3, early_stop=False))
    round.run()
    assert round.num_steps == 6
    assert round.states(1) == ["stop", "stop", "stop"]
    assert round.ends[CandidateId("g0", 2)] == ("deferred", 6)


def test_a_lost_group_leaves_the_race_uncounted() -> None:
    round = Round([[5, 6, 7], [3, 4, 9]], num_wanted=1, terms=GroupTerms(3, 3))
    for index in range(3):
        id = CandidateId("g1", index)
        round.steps.ended(id, round.groups["g1"], "failed", 0)
        del round.running[id]
    round.run()
    assert round.num_steps == 7
    assert round.lost == []


def test_a_lost_candidate_is_replaced_as_often_as_its_group_allows() -> None:
    steps = group_steps()
    terms = GroupTerms(2, 2, num_replaceable=1)
    ids = [steps.launch("g", terms, index)[0] for index in range(2)]
    group = steps.launch("other", terms, 0)[1] and steps._table.find("g")
    steps.ended(ids[0], group, "failed", 3)
    steps.close_step({}, lambda id: 3)
    assert group.is_replaced(0)
    assert not group.over
    third, _ = steps.launch("g", terms, 2)
    steps.ended(third, group, "failed", 1)
    steps.close_step({}, lambda id: 3)
    assert not group.is_replaced(2)
    steps.ended(ids[1], group, "stop", 4)
    assert steps.close_step({}, lambda id: 4).over == ("g",)


def test_a_forgotten_race_lets_its_groups_go_on() -> None:
    round = Round([[2, 2, 2], [8, 8, 8]], num_wanted=1)
    races_of(round.steps).forget("round")
    round.run()
    assert round.states(1) == ["stop"] * 3
    assert len(races_of(round.steps)) == 0


def test_more_races_than_an_engine_remembers_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.rounds.rules.race.MAX_RACES", 2)
    steps = group_steps()
    for name in "abc":
        steps.launch(f"g{name}", PAIR_OF_THREE, 0, said=PLACE.value(RacePlace(name, 1, 0)))
    assert races_of(steps)._race_of.keys() == {"gb", "gc"}
    assert len(races_of(steps)) == 2


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=3, max_size=3), min_size=1, max_size=8),
    st.integers(1, 8),
    st.booleans(),
)
def test_exactly_as_many_groups_win_as_are_wanted(lengths: list[list[int]], num_wanted: int, early_stop: bool) -> None:
    round = Round(lengths, num_wanted, GroupTerms(2, 3, early_stop))
    round.run()
    assert len(round.ends) == 3 * len(lengths)
    complete = [f"g{p}" for p in range(len(lengths)) if "deferred" not in round.states(p)]
    winners = [id for id in complete if id not in round.lost]
    assert len(winners) == min(num_wanted, len(lengths))
    # They are those whose own end came first.
    own_ends = sorted(sorted(group)[1 if early_stop else 2] for group in lengths)
    assert round.num_steps == own_ends[len(winners) - 1]


@pytest.mark.parametrize("num_wanted", [1, 2])
def test_races_do_not_touch_each_other(num_wanted: int) -> None:
    steps = group_steps()
    for race in "ab":
        for position in range(3):
            for index in range(3):
                steps.launch(
                    f"{race}{position}", PAIR_OF_THREE, index, said=PLACE.value(RacePlace(race, num_wanted, position))
                )
    for position in range(num_wanted):
        group = steps._table.find(f"a{position}")
        for index in range(2):
            steps.ended(CandidateId(f"a{position}", index), group, "stop", 1)
    stopped = steps.close_step({}, lambda id: 1).stop
    assert {id.group_id[0] for id in stopped} == {"a"}
    assert len(steps) == 3
