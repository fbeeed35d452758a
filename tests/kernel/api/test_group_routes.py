"""The rank for a group: by the groups of this process, and by groups that other processes have sent."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.support.work import faster_than_linear
from vllm_rollout.kernel.api import group_routes
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine_calls import RankDied
from vllm_rollout.kernel.api.group_routes import GroupRoutes, new_ranks
from vllm_rollout.kernel.http.engine import Outlook
from vllm_rollout.kernel.rules.ranks import Ranks


def fresh(num_candidates: int) -> dict[int, int]:
    return dict.fromkeys(range(num_candidates), 0)


def test_a_rank_that_takes_nothing_is_not_to_be_named() -> None:
    """Also when it was put on hold after the request had come."""
    routes = GroupRoutes(Ranks(3))
    routes.hold(frozenset({0}))
    routes.bury(1)
    for enter in (lambda rank: routes.open("g", fresh(2), rank), lambda rank: routes.join("j", 2, rank)):
        with pytest.raises(VLLMValidationError, match="rank 0 is drained"):
            enter(0)
        with pytest.raises(RankDied, match="rank 1"):
            enter(1)
        assert enter(2).rank == 2


def test_a_group_follows_another_one_to_a_rank_that_was_drained_meanwhile_but_not_to_a_dead_one() -> None:
    """No client has named that rank: a scored turn of a session joins two groups."""
    routes = GroupRoutes(Ranks(2))
    first = routes.join("session", 2, None)
    routes.hold(frozenset({first.rank}))
    assert routes.join("session", 2, None) is first
    assert routes.join("scored", 2, None, followed=first).rank == first.rank
    routes.bury(first.rank)
    with pytest.raises(RankDied, match=f"rank {first.rank}"):
        routes.join("scored", 2, None, followed=first)


def test_groups_count_their_candidates_until_they_end() -> None:
    ranks = Ranks(2)
    routes = GroupRoutes(ranks)
    route = routes.open("q", fresh(4))
    assert ranks.loads == [4, 0]
    routes.ended(route, 0, 30)
    assert ranks.loads == [3, 0]


def test_requests_of_others_are_what_is_counted_beyond_our_own() -> None:
    now_s, counts = 0.0, [40, 0]
    ranks = Ranks(2)
    routes = GroupRoutes(ranks, lambda: counts, lambda: now_s)
    groups = [routes.open(f"q{i}", fresh(8)) for i in range(4)]
    assert [group.rank for group in groups] == [1] * 4
    assert ranks.loads == [40, 32]
    counts, now_s = [40, 32], 5.0  # now they have been counted, and are not taken for others'
    assert routes.next_rank() == 1
    assert ranks.loads == [40, 32]
    for group in groups:
        routes.close(group)
    assert routes.next_rank() == 1
    assert ranks.loads == [40, 0]  # those that ended a moment ago are counted still
    counts, now_s = [0, 50], 10.0
    assert routes.next_rank() == 0


def test_ordinary_requests_of_this_process_count_at_once() -> None:
    ranks = [b"0", b"1", b"2"]
    core = SimpleNamespace(core_engines=ranks, lb_engines=[[2, 8, 0.5], [0, 0, 0.0], [0, 3, 0.1]])
    core.engine_inflight = Counter({b"0": 4, b"1": 6})
    assert RolloutAsyncLLM.request_counts(SimpleNamespace(engine_core=core)) == [10, 6, 3]


def test_a_group_that_moves_counts_at_its_new_rank() -> None:
    routes = GroupRoutes(ranks := Ranks(2))
    route = routes.open("q", fresh(4))
    routes.ended(route, 0, 30)
    routes.begins(route, 4)
    routes.ended(route, 1, 30)
    routes.arrived(route, 1)
    assert (route.rank, route.placed.num_left, ranks.loads) == (1, 3, [0, 3])
    routes.close(route)
    routes.arrived(route, 0)  # it was over before it arrived
    assert ranks.loads == [0, 0]


class LastRank(Ranks):
    """The rule of a made-up part: the last rank gets all groups. Keeps what it hears."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heard: list[Any] = []

    @property
    def loads(self) -> list[float]:
        return [-rank for rank in range(self.num_ranks)]

    def open(self, num_tokens: Any, rank: int | None = None, outlook: Any = None) -> Any:
        self.heard.append((dict(num_tokens), outlook))
        return super().open(num_tokens, rank, outlook)

    def begins(self, group: Any, index: int) -> None:
        self.heard.append(("begins", index))
        super().begins(group, index)

    def ended(self, group: Any, index: int, num_tokens: int) -> None:
        self.heard.append(("ended", index, num_tokens))
        super().ended(group, index, num_tokens)

    def close(self, group: Any) -> None:
        self.heard.append(("close", group.num_left))
        super().close(group)


def test_a_part_chooses_ranks_and_hears_of_groups_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_routes, "faces", lambda face: iter([("a part", LastRank)] if face == "rank" else []))
    routes = GroupRoutes(ranks := new_ranks(3))
    route = routes.open("q", {0: 0, 1: 9}, outlook=(outlook := Outlook(None, 10, None)))
    routes.begins(route, 2)
    routes.ended(route, 0, 30)
    routes.close(route)
    assert route.rank == 2
    assert ranks.heard == [({0: 0, 1: 9}, outlook), ("begins", 2), ("ended", 0, 30), ("close", 2)]
    assert routes.join("joined", 2, None).rank == 2


def test_without_a_part_the_rank_with_the_fewest_requests_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_routes, "faces", lambda face: iter(()))
    routes = GroupRoutes(new_ranks(2, 1))
    outlooks = [Outlook(None, 10, None), None, None]
    groups = [routes.open(f"q{i}", fresh(4 - i), outlook=outlook) for i, outlook in enumerate(outlooks)]
    assert [group.rank for group in groups] == [1, 0, 0]


def test_the_ends_of_thousands_of_candidates_take_work_by_their_number() -> None:
    def play(num: int) -> None:
        routes = GroupRoutes(Ranks(2))
        route = routes.open("g", fresh(num))
        for index in range(num):
            routes.ended(route, index, 10)
        routes.close(route)

    assert faster_than_linear(play, 128, 2048) == {}
