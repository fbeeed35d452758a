"""Groups that wait for siblings: how many, and how long."""

import random

import pytest

from vllm_rollout.config import UNMET_S
from vllm_rollout.kernel.rules.ranks import Ranks
from vllm_rollout.kernel.rules.sibling_table import SiblingTable


def waiting_table(*names: str, **limits: float) -> SiblingTable[str]:
    """Groups of these names, one of which begins to wait each second."""
    table: SiblingTable[str] = SiblingTable(**limits)
    for at, name in enumerate(names):
        table.put(name, name.upper())
        table.wait(name, float(at))
    return table


def test_what_has_waited_longer_than_the_limit_is_forgotten_oldest_first():
    table = waiting_table("a", "b", "c", max_wait_s=10)
    assert table.forget_waiting(10.0) == []
    assert table.forget_waiting(11.5) == ["a", "b"]
    assert (table.forget_waiting(11.5), len(table), table.num_waiting) == ([], 1, 1)
    assert table.remove("c") == "C"
    assert (len(table), table.num_waiting, table.forget_waiting(99.0)) == (0, 0, [])


def test_what_waits_again_begins_anew_and_what_does_not_wait_is_not_forgotten():
    table = waiting_table("a", "b", max_wait_s=10)
    table.put("b", "B")
    table.wait("a", 5.0)
    assert table.forget_waiting(12.0) == []
    assert table.forget_waiting(16.0) == ["a"]
    assert (table.find("a"), table.find("b"), table.num_waiting) == (None, "B", 0)


def test_of_too_many_the_one_that_has_waited_longest_makes_room():
    table = waiting_table("a", "b", max_waiting=2)
    table.put("c", "C")
    assert table.wait("c", 2.0) == "a"
    assert [table.find(name) for name in "abc"] == [None, "B", "C"]


@pytest.mark.parametrize("seed", range(10))
def test_what_does_not_wait_is_kept_and_what_waits_is_bounded_whatever_happens(seed):
    chance, table, running = random.Random(seed), SiblingTable(max_waiting=3), set()
    for _ in range(200):
        name = str(chance.randrange(12))
        if name in running and chance.random() < 0.6:
            running.remove(name)
            forgotten = table.wait(name, 0.0)
            assert forgotten not in running
        else:
            running.add(name)
            table.put(name, name)
        assert len(running) <= len(table) <= len(running) + 3
        assert all(table.find(name) == name for name in running)


def test_ranks_forget_groups_as_the_engine_does():
    ranks = Ranks(2)
    assert ranks.join("a", 4) == 0
    ranks.leave_joined("a", now_s=100.0)
    assert ranks.forget_waiting(600.0) == []
    assert ranks.forget_waiting(701.0) == ["a"]
    assert (len(ranks), ranks.loads) == (0, [0, 0])
    assert ranks.join("a", 4) == 1, "it goes where any new group would"


def test_what_has_waited_for_long_is_overdue_once():
    table = waiting_table("a", "b")
    assert table.overdue(UNMET_S) == []
    assert table.overdue(UNMET_S + 0.5) == ["a"]
    table.put("b", "B")
    assert table.overdue(UNMET_S + 5) == []
    table.wait("b", UNMET_S)
    table.put("a", "A")
    table.wait("a", UNMET_S)
    assert table.overdue(2 * UNMET_S + 1) == ["b"], "the other one was told"
    table.remove("a")
    table.put("a", "A")
    table.wait("a", 0.0)
    assert table.overdue(UNMET_S + 1) == ["a"], "it is another group"
