"""Moves in which something fails: the group goes on where it was, and each candidate ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.kernel.core.scheduler_runs import assert_nothing_left
from tests.parts.moving.moving_runs import assert_both_end
from tests.parts.moving.ranked_llm import Cluster
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.call_table import CANCEL_GROUPS, RECOMPUTE
from vllm_rollout.kernel.core.held_outputs import HeldOutputs
from vllm_rollout.parts.moving.core.moving import GroupMoves
from vllm_rollout.parts.moving.wire import Parcel

pytestmark = pytest.mark.anyio

LENGTHS = [120, 140]
SAID = [("g", 0), ("g", 1)]


class Failing:
    """Fails once, when it is asked the `number`th time."""

    def __init__(self, number: int = 0) -> None:
        self.num_left = number

    def __call__(self, *args: Any) -> bool:
        self.num_left -= 1
        return self.num_left == -1


async def moved(cluster: Cluster, prepare: Callable[[int], None]) -> Any:
    """Outcome of moving a running group. `prepare` gets the rank of the group."""
    cluster.start("g", LENGTHS, 2)
    await cluster.until(lambda: cluster.said.get(("g", 1), []))
    (source,) = cluster.cores_of("g")
    prepare(source)
    (move,) = await cluster.done(asyncio.create_task(cluster.engine.moves.move_group("g", 1 - source)))
    return move


async def said_all(cluster: Cluster) -> None:
    """Both candidates end, and have said all that they had to say, once."""
    await cluster.done(*cluster.readers.values())
    run = cluster.cores[0].run
    assert cluster.ends == {candidate: ["finished"] for candidate in SAID}
    for (_, index), length in zip(SAID, LENGTHS, strict=True):
        own = run.own_tokens(f"g-c{index}-internal", length - 1)
        assert cluster.said["g", index][:-1] == own
        assert len(cluster.said["g", index]) == length
    assert_nothing_held(cluster)


def assert_nothing_held(cluster: Cluster) -> None:
    for core in cluster.cores:
        assert_nothing_left(core.run)
        moves = core.scheduler.part(GroupMoves)
        assert moves._stopped == moves._adopted == moves._released == moves.kv._shared == {}
    assert not cluster.llm.reqs_in_flight


def failing(what: str, number: int) -> Callable[[str], bool]:
    fails = Failing(number)
    return lambda asked: asked == what and fails()


@pytest.mark.parametrize("what", ["rollout_share_kv", "rollout_detach"])
async def test_a_source_that_cannot_pack_goes_on(new_cluster, what):
    cluster = new_cluster()
    move = await moved(cluster, lambda source: setattr(cluster.cores[source], "fails", failing(what, 0)))
    assert (move.outcome, move.reason) == ("failed", f"{what} failed")
    await said_all(cluster)


@pytest.mark.parametrize(("cls", "name"), [(HeldOutputs, "copy"), (Parcel, "encode")])
async def test_packing_that_breaks_off_in_the_middle_takes_nothing_along(new_cluster, monkeypatch, cls, name):
    """In the second candidate of two, or when everything is in the parcel."""
    cluster = new_cluster()
    fails, packed = Failing(1 if cls is HeldOutputs else 0), getattr(cls, name)

    def breaks(self: Any, *args: Any) -> Any:
        if fails():
            raise RuntimeError("it breaks off")
        return packed(self, *args)

    monkeypatch.setattr(cls, name, breaks)
    assert (await moved(cluster, lambda source: None)).outcome == "failed"
    await said_all(cluster)


def test_a_release_that_fails_leaves_nobody_out_of_every_queue(two):
    """The group goes on, also without a call of `keep`."""
    collective_rpc = two.cores[0].collective_rpc
    two.cores[0].collective_rpc = lambda method, args: collective_rpc(method, args[1])
    with pytest.raises(IndexError):
        two.release("g", 0)
    two.cores[0].collective_rpc = collective_rpc
    assert_both_end(two)


def test_a_group_that_cannot_go_on_after_a_release_that_fails_goes_on_when_it_is_kept(two, monkeypatch):
    scheduler, fails = two.cores[0].scheduler, Failing()
    preempted = scheduler.weights.preempted

    def breaks(request: Any) -> None:
        if fails():
            raise MemoryError("it breaks off")
        preempted(request)

    def cannot_pack(*args: Any) -> None:
        raise RuntimeError("it cannot pack")

    monkeypatch.setattr(scheduler.weights, "preempted", breaks)
    monkeypatch.setattr(scheduler.part(GroupMoves), "_pack", cannot_pack)
    with pytest.raises(MemoryError):
        two.release("g", 0)
    two.cores[0].keep("g")
    assert_both_end(two)


async def test_a_group_that_has_stopped_goes_on_when_the_second_call_for_it_fails(new_cluster, loop):
    """The first one found a token on its way."""
    cluster = new_cluster()
    move = await moved(cluster, lambda source: setattr(cluster.cores[source], "fails", failing("release_group", 1)))
    assert move.outcome == ("moved" if loop.depth == 1 else "failed")
    await said_all(cluster)


ADOPTING = [
    ("rollout_attach", 0), ("preprocess_add_request", 0), ("preprocess_add_request", 1), ("rollout_fetch_kv", 0),
    ("add_request", 0), ("add_request", 1),
]  # fmt: skip
"""Failure points of an adoption: (call, number of successes before the failure)."""


@pytest.mark.parametrize(("what", "number"), ADOPTING)
async def test_a_target_that_fails_half_way_has_nothing(new_cluster, what, number):
    cluster = new_cluster()
    targets: list[int] = []

    def prepare(source: int) -> None:
        targets.append(1 - source)
        cluster.cores[1 - source].fails = failing(what, number)

    move = await moved(cluster, prepare)
    assert (move.outcome, move.reason) == ("failed", f"{what} failed")
    assert cluster.cores[targets[0]].scheduler.requests == {}
    assert len(cluster.cores[targets[0]].scheduler.group_steps) == 0
    again = asyncio.create_task(cluster.engine.moves.move_group("g", targets[0]))
    assert [move.outcome for move in await cluster.done(again)] == ["moved"]
    await said_all(cluster)


@pytest.mark.parametrize(("what", "number"), [each for each in ADOPTING if each[0] != "rollout_fetch_kv"])
async def test_a_group_that_nobody_can_take_fails_once(new_cluster, what, number):
    """Neither its parcel nor its KV stays in the source, where a later group may have its name."""
    cluster = new_cluster()

    def prepare(source: int) -> None:
        for core in cluster.cores:
            core.fails = failing(what, number)

    move = await moved(cluster, prepare)
    assert move.outcome == "lost"
    await cluster.done(*cluster.readers.values())
    assert cluster.ends == {candidate: ["failed"] for candidate in SAID}
    for _ in range(5):
        await cluster.turn()
    assert_nothing_held(cluster)


@pytest.mark.parametrize("what", ["rollout_drop_kv"])
async def test_a_group_that_has_arrived_stays_there_whatever_its_source_says(new_cluster, what):
    cluster = new_cluster()
    sources: list[int] = []

    def prepare(source: int) -> None:
        sources.append(source)
        cluster.cores[source].fails = failing(what, 0)

    assert (await moved(cluster, prepare)).outcome == "moved"
    assert cluster.cores_of("g") == [1 - sources[0]]
    back = asyncio.create_task(cluster.engine.moves.move_group("g", sources[0]))
    assert [move.outcome for move in await cluster.done(back)] == ["moved"]
    await said_all(cluster)


async def test_a_target_that_dies_with_the_group_has_not_taken_it(new_cluster):
    """Its death is known before it is known to have the group, whose requests are those of the source still."""
    cluster = new_cluster()
    cluster.start("g", LENGTHS, 2)
    await cluster.until(lambda: cluster.said.get(("g", 1), []))
    (source,) = cluster.cores_of("g")
    moving = asyncio.create_task(cluster.engine.moves.move_group("g", 1 - source))
    async with cluster.at("adopt_group", 1 - source):
        cluster.llm.die(1 - source)
    (move,) = await cluster.done(moving)
    assert move.outcome == "failed"
    dead = cluster.cores[1 - source]
    dead.turn = dead.deliver = lambda: None
    assert cluster.cores[source].scheduler.candidates_of("g")
    await cluster.done(*cluster.readers.values())
    assert cluster.ends == {candidate: ["finished"] for candidate in SAID}


def test_only_the_move_of_the_same_epoch_is_confirmed(two):
    """A confirmation of an earlier move that comes late must not forget the parcel of the next one."""
    assert two.release("g", 0, epoch=2).outcome == "released"
    two.cores[0].confirm("g", epoch=1)
    assert two.runs[0].scheduler.part(GroupMoves).num_out == 0
    two.cores[0].keep("g", epoch=2)
    assert_both_end(two)


def test_who_comes_back_in_the_step_in_which_it_left_is_known_to_the_worker(two):
    released = two.release("g", 0)
    assert two.runs[0].scheduler.finished_req_ids >= {"g-0", "g-1"}
    two.cores[0].keep("g")
    assert_both_end(two)
    assert released.outcome == "released"


async def in_a_parcel(cluster: Cluster, **kwargs: Any) -> asyncio.Future[Any]:
    """A group that is in no engine core; its move goes on when the ranks do."""
    cluster.start("g", LENGTHS, 2, **kwargs)
    await cluster.until(lambda: cluster.said.get(("g", 1), []))
    return await set_off(cluster)


async def set_off(cluster: Cluster, group_id: str = "g") -> asyncio.Future[Any]:
    (source,) = cluster.cores_of(group_id)
    moving = asyncio.create_task(cluster.engine.moves.move_group(group_id, 1 - source))
    async with cluster.at("release_group", source):
        pass
    while cluster.cores[source].scheduler.candidates_of(group_id):  # a token of it was on its way
        await cluster.turn()
    return moving


async def test_a_candidate_that_is_aborted_on_its_way_ends_where_it_arrives(new_cluster):
    cluster = new_cluster()
    moving = await in_a_parcel(cluster)
    cluster.readers["g"].cancel()
    (move, _) = await cluster.done(moving, cluster.readers["g"])
    assert move.outcome == "moved"
    for _ in range(5):
        await cluster.turn()
    assert_nothing_held(cluster)
    assert all(cluster.cores[0].run.num_sampled[f"g-c{index}-internal"] < LENGTHS[0] // 2 for index in (0, 1))


async def test_a_group_on_its_way_is_computed_again_where_it_arrives(new_cluster, monkeypatch):
    monkeypatch.setattr(Changes, "num", 0)
    cluster = new_cluster()
    cluster.start("g", LENGTHS, 2)
    await cluster.until(lambda: cluster.said.get(("g", 1), []))
    Changes.num += 1
    await cluster.turn()
    moving = await set_off(cluster)
    recomputing = asyncio.create_task(cluster.engine.calls.tell_groups(RECOMPUTE, None))
    (move, nums) = await cluster.done(moving, recomputing)
    assert (move.outcome, sum(nums)) == ("moved", 2)
    await cluster.done(*cluster.readers.values())
    assert cluster.ends == {candidate: ["finished"] for candidate in SAID}
    assert_nothing_held(cluster)


async def test_a_group_that_is_aborted_by_name_on_its_way_ends_where_it_arrives(new_cluster):
    cluster, group_id, ids = new_cluster(), "chat-1-0123abcd", ["chat-1"]
    cluster.start(group_id, LENGTHS, 2)
    await cluster.until(lambda: cluster.said.get((group_id, 1), []))
    moving = await set_off(cluster, group_id)
    (move, _) = await cluster.done(moving, asyncio.create_task(cluster.llm.abort(ids)))
    assert move.outcome == "moved"
    assert sorted(ids) == [f"{group_id}-c{index}-internal" for index in (0, 1)]
    await cluster.done(*cluster.readers.values())
    assert set(map(tuple, cluster.ends.values())) == {("failed",)}
    assert_nothing_held(cluster)


async def test_an_abort_by_name_is_repeated_once_when_a_group_has_moved_meanwhile(new_cluster, monkeypatch):
    """Its source had packed it before the abort came, and its target got it later."""
    cluster, asked = new_cluster(), []
    cluster.start("g", LENGTHS, 2)
    await cluster.turn()
    route = cluster.llm.routes.find("g")

    def abort_named(names: frozenset[str]) -> list[str]:
        asked.append(names)
        route.rank = 1 - route.rank
        return ["g-c0-internal"]

    monkeypatch.setattr(cluster.cores[0].scheduler, "abort_named", abort_named)
    (found,) = await cluster.done(asyncio.create_task(cluster.llm.abort_groups({"chat-1"})))
    assert (found, asked) == (["g-c0-internal"], [{"chat-1"}] * 2)
    await cluster.done(*cluster.readers.values())


async def test_a_group_that_is_cancelled_on_its_way_is_deferred_where_it_arrives(new_cluster):
    cluster = new_cluster()
    moving = await in_a_parcel(cluster)
    cancelling = asyncio.create_task(cluster.engine.calls.tell_groups(CANCEL_GROUPS, ["g"]))
    (move, _, _) = await cluster.done(moving, cancelling, cluster.readers["g"])
    assert move.outcome == "moved"
    assert cluster.ends == {candidate: ["deferred"] for candidate in SAID}
    assert_nothing_held(cluster)
