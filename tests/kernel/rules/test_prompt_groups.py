"""The group of a joining request that names no group."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.plan import GroupJoin
from vllm_rollout.kernel.rules.prompt_groups import PromptGroups


def test_requests_of_a_key_fill_one_group_after_the_other():
    groups = PromptGroups()
    assert [groups.join("q", 3) for _ in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert groups.join("another", 3) == 3


def test_the_open_group_stays_open_when_an_earlier_one_is_over():
    groups = PromptGroups()
    earlier = [groups.join("q", 2) for _ in range(2)]
    later = groups.join("q", 2)
    for number in earlier:
        groups.leave(number)
    assert groups.join("q", 2) == later


def test_a_group_of_which_nothing_runs_takes_nobody():
    groups = PromptGroups()
    first = groups.join("q", 8)
    groups.leave(first)
    assert len(groups) == 0
    second = groups.join("q", 8)
    assert second != first
    assert groups.join("q", 8) == second


def test_a_name_is_used_as_it_is_and_a_number_is_given_back():
    groups = PromptGroups()
    with groups.named(GroupJoin(2, 4, name="q1"), "prompt") as name:
        assert (name, len(groups)) == ("q1", 0)
    with groups.named(GroupJoin(2, 4), "prompt") as number, groups.named(GroupJoin(2, 4), "prompt") as same:
        assert number == same
        with groups.named(GroupJoin(2, 5), "prompt") as other_terms:
            assert other_terms != number
    assert len(groups) == 0


@given(st.lists(st.tuples(st.sampled_from("pq"), st.booleans()), max_size=80), st.integers(1, 4))
def test_whatever_comes_and_goes_a_group_has_at_most_its_candidates_and_one_key(events, num_candidates):
    groups, running, joined = PromptGroups(), [], {}
    for key, comes in events:
        if comes:
            number = groups.join(key, num_candidates)
            assert number in running or number not in joined, "nobody joins a group of which nothing runs"
            joined.setdefault(number, []).append(key)
            running.append(number)
        elif running:
            groups.leave(running.pop(len(running) // 2))
        assert len(groups) == len(set(running))
    assert all(len(keys) <= num_candidates and len(set(keys)) == 1 for keys in joined.values())
    for number in running:
        groups.leave(number)
    assert len(groups) == len(groups._open) == 0
