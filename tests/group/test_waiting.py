"""Groups that wait for siblings: how many, and how long."""

from vllm_rollout.group.group_table import GroupTable, WaitingGroups
from vllm_rollout.group.lifecycle import GroupTerms
from vllm_rollout.group.placement import Placement


def test_what_has_waited_longer_than_the_limit_expires_oldest_first():
    waiting = WaitingGroups(max_wait_s=10)
    for at, name in enumerate("abc"):
        assert waiting.add(name, float(at)) is None
    assert waiting.expire(10.0) == []
    assert waiting.expire(11.5) == ["a", "b"]
    assert (waiting.expire(11.5), len(waiting)) == ([], 1)


def test_what_waits_again_begins_anew_and_what_does_not_wait_does_not_expire():
    waiting = WaitingGroups(max_wait_s=10)
    for name in "ab":
        waiting.add(name, 0.0)
    waiting.discard("b")
    waiting.discard("nobody")
    waiting.add("a", 5.0)
    assert waiting.expire(12.0) == []
    assert waiting.expire(16.0) == ["a"]


def test_of_too_many_the_oldest_makes_room():
    waiting = WaitingGroups(max_number=2, max_wait_s=10)
    assert [waiting.add(name, 0.0) for name in "abc"] == [None, None, "a"]
    assert len(waiting) == 2


def test_where_time_stands_still_nothing_expires():
    waiting = WaitingGroups(max_wait_s=10)
    waiting.add("a", 0.0)
    assert waiting.expire(0.0) == []


def test_a_group_whose_siblings_never_come_is_not_met_by_those_who_use_its_name_later():
    table = GroupTable()
    old = table.open("a", GroupTerms(2, 8))
    for _ in range(2):
        old.end(old.launch(), "stop", 5)
    assert old.settle().stop == ()
    assert table.release("a", now_s=100.0) is False
    assert table.forget_waiting(600.0) == []
    assert table.find("a") is old
    assert table.forget_waiting(701.0) == ["a"]
    assert table.open("a", GroupTerms(2, 8)) is not old
    assert (len(table), table.num_idle) == (1, 0)


def test_the_placement_forgets_as_the_engine_does():
    placement = Placement(2)
    assert placement.join("a", 4) == 0
    placement.leave_joined("a", now_s=100.0)
    assert placement.forget_waiting(600.0) == []
    assert placement.forget_waiting(701.0) == ["a"]
    assert (len(placement), placement.loads) == (0, [0, 0])
    assert placement.join("a", 4) == 1, "it goes where any new group would"
