"""Ranks that are drained and restored, by several at once, over several API processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm import SamplingParams

from tests.parts.moving.ranked_llm import Cluster
from vllm_rollout.kernel.http.engine import EngineStopped, GroupOrder, NoRankTakes, PreparedPrompt, RequestError
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.moving.api import moving
from vllm_rollout.parts.moving.http.engine import Drained
from vllm_rollout.parts.moving.rules.load import RankState

pytestmark = pytest.mark.anyio


def drain(cluster: Cluster, rank: int, process: int = 0, **kwargs: Any) -> asyncio.Task[Drained]:
    return asyncio.create_task(cluster.engines[process].moves.drain(rank, 3600.0, **kwargs))


def restore(cluster: Cluster, rank: int, **kwargs: Any) -> asyncio.Task[None]:
    return asyncio.create_task(cluster.engine.moves.restore(rank, **kwargs))


def is_conflict(answer: object) -> bool:
    return isinstance(answer, RequestError) and answer.status == 409


async def test_two_ranks_that_are_drained_at_once_both_take_nothing(new_cluster):
    cluster = new_cluster(num_ranks=3)
    for number in range(6):
        cluster.start(f"g{number}", [60, 60], 2)
    await cluster.turn()
    answers = await cluster.done(drain(cluster, 0), drain(cluster, 1))
    assert [(answer.is_held, answer.num_left) for answer in answers] == [(True, 0)] * 2
    assert cluster.held == sorted(cluster.llm.routes.held) == [0, 1]
    for number in range(6, 10):
        cluster.start(f"g{number}", [60, 60], 2)
    await cluster.turn()
    assert [cluster.cores_of(f"g{number}") for number in range(10)] == [[2]] * 10
    await cluster.done(*cluster.readers.values())
    assert set(map(tuple, cluster.ends.values())) == {("finished",)}


@pytest.mark.parametrize("num_api_processes", [1, 2])
async def test_of_the_last_two_ranks_one_stays(new_cluster, num_api_processes):
    cluster = new_cluster(num_api_processes=num_api_processes)
    draining = [drain(cluster, 0), drain(cluster, 1, num_api_processes - 1)]
    while not all(task.done() for task in draining):
        await cluster.turn()
        assert all(llm.routes.has_open for llm in cluster.llms)  # nobody is sent away meanwhile
    answers = await cluster.done(*draining)
    assert any(map(is_conflict, answers))
    assert num_api_processes > 1 or not all(map(is_conflict, answers))
    assert len(cluster.held) == [is_conflict(answer) for answer in answers].count(False) < 2
    for rank in cluster.held:
        await cluster.done(restore(cluster, rank))
    (answer,) = await cluster.done(drain(cluster, 1, num_api_processes - 1))
    assert answer.is_held


async def test_who_cannot_be_drained_since_others_died_is_told_so(new_cluster):
    cluster = new_cluster(num_ranks=3)
    await cluster.done(drain(cluster, 0))
    cluster.llm.die(2)
    (answer,) = await cluster.done(drain(cluster, 1))
    assert is_conflict(answer)
    assert "not drained. Restore another one first ([2] have died)" in str(answer)
    cluster.llm.die(0)
    (answer,) = await cluster.done(drain(cluster, 1))
    assert is_conflict(answer)
    assert "last one that lives: the others ([0, 2]) have died. Restart the server." in str(answer)


async def test_a_retry_finds_no_rank_where_the_others_are_drained(new_cluster):
    cluster = new_cluster()
    await cluster.done(drain(cluster, 0))
    cluster.llm.die(1)
    prompt = PreparedPrompt("q", [5] * 20, ([9, 9], SamplingParams(max_tokens=9), None))
    order = GroupOrder("g", GroupPlan(2), prompt, "q")
    reports = cluster.engine.run_group(order)
    ends = [await anext(reports) for _ in range(2)]
    assert [(end.ending.index, end.ending.state, end.finish_reason) for end in ends] == [
        (0, "failed", "error"), (1, "failed", "error")
    ]  # fmt: skip
    with pytest.raises(NoRankTakes, match="drained, or has died"):
        await anext(reports)
    cluster.llm.die(0)  # the whole engine: no group is to be told of as lost
    with pytest.raises(RequestError, match="has died") as raised:
        async for _ in cluster.engine.run_group(order):
            pass
    assert not isinstance(raised.value, NoRankTakes)


async def test_drains_and_restores_that_meet_leave_one_truth(new_cluster):
    cluster = new_cluster(num_ranks=4)
    await cluster.done(drain(cluster, 0))
    await cluster.done(restore(cluster, 0), drain(cluster, 1), drain(cluster, 2), restore(cluster, 1))
    assert cluster.held == sorted(cluster.llm.routes.held) == [2]


@pytest.mark.parametrize("num_turns", range(6))
async def test_who_leaves_while_a_rank_is_drained_leaves_no_doubt(new_cluster, num_turns):
    cluster = new_cluster()
    cluster.start("g", [90, 90], 2)
    leaving = drain(cluster, 0)
    for _ in range(num_turns):
        await cluster.turn()
    leaving.cancel()
    for _ in range(5):
        await cluster.turn()
    assert cluster.held == sorted(cluster.llm.routes.held)
    await cluster.done(*cluster.readers.values())


async def test_what_the_trainer_drained_stays_so_when_a_rollout_gives_it_back(new_cluster):
    cluster = new_cluster()
    await cluster.done(drain(cluster, 0, owner="rollout"))
    await cluster.done(drain(cluster, 0))
    await cluster.done(restore(cluster, 0, owner="rollout"))
    assert cluster.held == sorted(cluster.llm.routes.held) == [0]
    await cluster.done(drain(cluster, 0, owner="rollout"))
    await cluster.done(restore(cluster, 0))
    assert cluster.held == sorted(cluster.llm.routes.held) == []
    await cluster.done(restore(cluster, 0, owner="rollout"))
    assert cluster.held == []


async def test_a_group_that_is_on_its_way_to_a_rank_leaves_it_again(new_cluster):
    cluster = new_cluster(num_ranks=3)
    cluster.start("g", [200, 200], 2)
    await cluster.turn()
    (source,) = cluster.cores_of("g")
    target, other = {0, 1, 2} - {source}
    moving = asyncio.create_task(cluster.engine.moves.move_group("g", target))
    async with cluster.at("adopt_group", target):
        draining = drain(cluster, target)
    await cluster.done(moving, draining)
    assert draining.result().num_left == 0
    assert cluster.cores_of("g") in ([source], [other])
    (move,) = await cluster.done(asyncio.create_task(cluster.engine.moves.move_group("g", target)))
    assert move.outcome == "stays"
    await cluster.done(*cluster.readers.values())


async def test_processes_follow_holds_of_others(new_cluster):
    cluster = new_cluster(num_api_processes=2)
    first, second = cluster.llms
    cluster.start("g", [300, 300], 2, process=1)
    await cluster.turn()
    (rank,) = cluster.cores_of("g")
    for engine in cluster.engines:
        engine.moves.follow_holds()
    await cluster.done(drain(cluster, rank))
    await cluster.until(lambda: first.routes.held == second.routes.held == {rank})
    await cluster.until(lambda: cluster.cores_of("g") == [1 - rank])
    await cluster.done(restore(cluster, rank))
    await cluster.until(lambda: first.routes.held == second.routes.held == frozenset())
    first.errored = second.errored = True
    await cluster.done(*cluster.readers.values())


@pytest.mark.parametrize("error", [EngineStopped("a rank has died"), ZeroDivisionError()])
async def test_a_process_follows_holds_on_after_a_look_that_failed(new_cluster, monkeypatch, error):
    monkeypatch.setattr(moving, "FOLLOW_S", 0.02)
    cluster = new_cluster(num_api_processes=2)
    moves, second = cluster.engines[1].moves, cluster.llms[1]
    states, num_looks = moves.rank_states, 0

    async def fails_at_first() -> list[RankState]:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            raise error
        return await states()

    monkeypatch.setattr(moves, "rank_states", fails_at_first)
    moves.follow_holds()
    await cluster.until(lambda: num_looks >= 1)
    await cluster.done(drain(cluster, 0))
    await cluster.until(lambda: second.routes.held == {0})
    second.errored = True


async def test_a_drain_is_answered_when_the_other_processes_send_nothing_there_any_more(new_cluster, monkeypatch):
    monkeypatch.setattr(moving, "FOLLOW_S", 0.02)
    cluster = new_cluster(num_api_processes=2)
    for engine in cluster.engines:
        engine.moves.follow_holds()
    (answer,) = await cluster.done(drain(cluster, 0))
    assert answer.seconds >= 2 * moving.FOLLOW_S, "the other process has looked twice by then, unless it stalls"
    await cluster.until(lambda: all(set(llm.routes.held) == {0} for llm in cluster.llms))
    for llm in cluster.llms:
        llm.errored = True


async def test_a_plain_request_that_comes_in_when_its_rank_is_drained_goes_elsewhere(new_cluster):
    """It waited at the door, and nothing was held when it came to it."""
    cluster = new_cluster()
    llm = cluster.llm
    llm.door.shut()
    params = SamplingParams(max_tokens=40, detokenize=False)
    waiting = asyncio.create_task(anext(llm.generate(5, params, "plain")))
    await cluster.turn()
    await cluster.done(drain(cluster, 0))
    llm.door.open()
    await cluster.until(lambda: llm.reqs_in_flight)
    assert llm.reqs_in_flight["plain-internal"] is cluster.cores[1]
    await cluster.done(waiting)
