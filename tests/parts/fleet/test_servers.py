"""Choice of a client's server for the next group."""

import random

import pytest

from vllm_rollout.parts.fleet.rules import NoServerLeft, ServedGroup, Servers
from vllm_rollout.parts.shaping.rules.history import ObservedLength


def ends(group: ServedGroup, servers: Servers, num_tokens: int, count: int = 1) -> None:
    for _ in range(count):
        servers.ended(group, num_tokens)


def test_groups_go_where_the_least_is_to_do_and_ties_in_turn():
    servers = Servers(3, first_turn=1)
    assert [servers.place("p", 8).server for _ in range(6)] == [1, 2, 0, 1, 2, 0]
    assert servers.place("p", 4).server == 1
    assert servers.place("p", 4).server == 2


def test_lengths_of_groups_that_are_over_predict_the_work_of_later_ones():
    servers = Servers(2)
    for key, length in (("long", 4000), ("short", 40)) * 3:
        servers.over(servers.place(key, 4), [ObservedLength(length + n, censored=False) for n in range(4)])
    assert servers.predicted("long", 4, None) > 20 * servers.predicted("short", 4, None) > 0
    assert servers.predicted("long", 4, 100) <= 400
    placed = servers.place("long", 4).server
    assert {servers.place("short", 4).server for _ in range(20)} == {1 - placed}


def test_a_group_weighs_less_with_each_candidate_that_ends():
    servers = Servers(2)
    group, other = servers.place("p", 8), servers.place("p", 4)
    ends(group, servers, 10, 6)
    assert servers.place("p", 1).server == group.server
    ends(group, servers, 10, 9)
    servers.over(group)
    servers.over(group)
    assert min(servers.loads) >= 0
    assert other.server != group.server


def test_more_engines_take_more_and_requests_of_others_count():
    servers = Servers(2)
    servers.saw([0, 0], [3, 1], 0.0)
    placed = [servers.place("p", 8).server for _ in range(8)]
    assert placed.count(0) == 6
    servers = Servers(2)
    servers.saw([100, 0], [1, 1], 0.0)
    assert {servers.place("p", 8).server for _ in range(8)} == {1}
    servers.saw([None, None], [1, 1], 10.0)
    assert servers.place("p", 8).server == 1, "what is not known stays as it was"


def test_a_server_that_is_out_gets_nothing_and_its_groups_do_not_count():
    servers = Servers(2)
    lost = servers.place("p", 8)
    servers.leaves(lost.server)
    servers.leaves(lost.server)
    assert {servers.place("p", 8).server for _ in range(4)} == {1 - lost.server}
    servers.leaves(1 - lost.server)
    with pytest.raises(NoServerLeft):
        servers.place("p", 8)
    servers.comes(lost.server)
    servers.over(lost)
    assert servers.loads[lost.server] == 0


@pytest.mark.parametrize("seed", range(30))
def test_loads_are_those_of_groups_on_their_way_whatever_happens(seed):
    chance, servers, running = random.Random(seed), Servers(3), []
    for _ in range(200):
        what = chance.random()
        if what < 0.45 and len(servers.out) < 3:
            loads, out = servers.loads, servers.out
            group = servers.place(str(chance.randrange(5)), chance.randrange(1, 9), chance.choice([None, 300]))
            assert group.server not in out
            assert loads[group.server] == min(load for number, load in enumerate(loads) if number not in out)
            running.append(group)
        elif what < 0.7 and running:
            servers.ended(chance.choice(running), chance.randrange(1, 500))
        elif what < 0.9 and running:
            group = running.pop(chance.randrange(len(running)))
            lengths = [ObservedLength(chance.randrange(1, 500), chance.random() < 0.3) for _ in range(3)]
            servers.over(group, chance.choice([[], lengths]))
        elif what < 0.95:
            servers.leaves(number := chance.randrange(3))
            running = [group for group in running if group.server != number]
        else:
            servers.comes(chance.randrange(3))
        assert min(servers.loads) >= 0
    for group in running:
        servers.over(group)
    assert servers.loads == [0, 0, 0]
