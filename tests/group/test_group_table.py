import random

import pytest

from vllm_rollout.group.group_table import GroupTable
from vllm_rollout.group.lifecycle import Group, GroupTerms


def open_with_candidate(table: GroupTable, group_id: str, num_candidates: int = 1) -> Group:
    group = table.open(group_id, GroupTerms(1, num_candidates))
    group.launch()
    return group


def finish(table: GroupTable, group_id: str, group: Group) -> None:
    for index in [index for index, candidate in group._candidates.items() if candidate.state == "running"]:
        group.end(index, "stop", 1)
    group.settle()
    table.release(group_id)


def test_a_group_is_made_by_the_first_candidate_that_names_it_and_found_by_the_others():
    table = GroupTable()
    first = table.open("a", GroupTerms(2, 3, early_stop=False))
    assert first.terms == GroupTerms(2, 3, early_stop=False)
    assert table.open("a", GroupTerms(2, 3, early_stop=False)) is first
    assert table.open("b", GroupTerms(2, 3, early_stop=False)) is not first
    assert len(table) == 2


def test_a_group_that_is_over_is_forgotten():
    table = GroupTable()
    group = open_with_candidate(table, "a")
    finish(table, "a", group)
    assert len(table) == 0
    assert table.open("a", GroupTerms(1, 1)) is not group


def test_a_group_with_a_running_candidate_is_kept():
    table = GroupTable(max_idle=0)
    group = open_with_candidate(table, "a", num_candidates=2)
    table.release("a")
    assert table.open("a", GroupTerms(1, 2)) is group


def test_a_group_that_waits_for_siblings_is_kept():
    table = GroupTable()
    group = open_with_candidate(table, "a", num_candidates=2)
    finish(table, "a", group)
    assert table.open("a", GroupTerms(1, 2)) is group


def test_the_group_that_has_waited_longest_is_forgotten_first():
    table = GroupTable(max_idle=2)
    groups = {}
    for group_id in "abc":
        groups[group_id] = open_with_candidate(table, group_id, num_candidates=3)
        finish(table, group_id, groups[group_id])
    assert len(table) == 2
    assert table.open("b", GroupTerms(1, 3)) is groups["b"]
    assert table.open("c", GroupTerms(1, 3)) is groups["c"]
    assert table.open("a", GroupTerms(1, 3)) is not groups["a"]


def test_a_sibling_that_arrives_makes_the_wait_start_anew():
    table = GroupTable(max_idle=2)
    groups = {}
    for group_id in ("a", "b"):
        groups[group_id] = open_with_candidate(table, group_id, num_candidates=3)
        finish(table, group_id, groups[group_id])
    finish(table, "a", open_with_candidate(table, "a", num_candidates=3))
    finish(table, "c", open_with_candidate(table, "c", num_candidates=3))
    assert table.open("a", GroupTerms(1, 3)) is groups["a"]
    assert table.open("b", GroupTerms(1, 3)) is not groups["b"]


def test_releasing_an_unknown_group_changes_nothing():
    table = GroupTable()
    open_with_candidate(table, "a")
    table.release("b")
    assert len(table) == 1


@pytest.mark.parametrize("seed", range(10))
def test_running_groups_are_kept_and_idle_ones_bounded_whatever_happens(seed):
    chance = random.Random(seed)
    table = GroupTable(max_idle=3)
    running: dict[str, Group] = {}
    for _ in range(200):
        group_id = str(chance.randrange(12))
        if group_id in running and chance.random() < 0.6:
            finish(table, group_id, running.pop(group_id))
        else:
            group = open_with_candidate(table, group_id, num_candidates=chance.randint(1, 4))
            assert running.setdefault(group_id, group) is group
        assert len(running) <= len(table) <= len(running) + 3
    for group_id, group in running.items():
        assert table.open(group_id, GroupTerms(1, 1)) is group
