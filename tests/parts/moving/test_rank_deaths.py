"""A rank dies: who sees it, what is told to whom, and what goes on."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder

from tests.support.time_limit import end_within
from tests.support.waiting import eventually, wait_until
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.api import life, server_folder
from vllm_rollout.kernel.api.engine_calls import RankDied
from vllm_rollout.kernel.api.group_routes import GroupRoutes, NoRankLeft
from vllm_rollout.kernel.api.life import life_of
from vllm_rollout.kernel.rules.ranks import Ranks
from vllm_rollout.parts.moving.api.deaths import Death, Deaths, RankProcesses, outlives_a_rank
from vllm_rollout.parts.moving.api.moving import in_motion
from vllm_rollout.parts.moving.api.rank_client import RankClient
from vllm_rollout.parts.moving.api.rank_life import leave_dead

pytestmark = pytest.mark.anyio

RANKS = [b"rank 0", b"rank 1", b"rank 2"]


def rank_client(monkeypatch: pytest.MonkeyPatch, answers: dict[bytes, Any]) -> RankClient:
    """A client of ranks that give these answers. A rank without an answer never answers."""

    async def call(self: RankClient, method: str, *args: Any, engine: bytes) -> Any:
        await asyncio.sleep(0)
        return answers[engine] if engine in answers else await asyncio.Future()

    monkeypatch.setattr(DPLBAsyncMPClient, "_call_utility_async", call)
    monkeypatch.setattr(
        DPLBAsyncMPClient, "get_core_engine_for_request", lambda self, request: self.reqs_in_flight[request.request_id]
    )
    client = RankClient.__new__(RankClient)
    client.core_engines = RANKS
    client._dead, client._deaths = set(), {}
    client.reqs_in_flight = {"a": RANKS[0], "b": RANKS[1], "c": RANKS[1]}
    client.engine_inflight = Counter(client.reqs_in_flight.values())
    return client


async def test_a_call_to_all_is_answered_by_those_that_live(monkeypatch: pytest.MonkeyPatch) -> None:
    end_within(30)
    client = rank_client(monkeypatch, {RANKS[0]: "zero", RANKS[2]: "two"})
    calling = asyncio.create_task(client.call_utility_all_async("look"))
    one = asyncio.create_task(client._call_utility_async("look", engine=RANKS[1]))
    await asyncio.sleep(0.01)
    assert not calling.done()
    client.bury(1)
    assert await calling == ["zero", "two"]
    with pytest.raises(RankDied, match="rank 1 of the engine has died") as died:
        await one
    assert died.value.http_status == 503
    with pytest.raises(RankDied):
        await client._call_utility_async("look", engine=RANKS[1])
    assert await client.call_utility_async("look") == "zero"
    client.bury(0)
    client.bury(2)
    with pytest.raises(EngineDeadError):
        await client.call_utility_all_async("look")


async def test_a_call_that_fails_is_no_dead_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: RankClient, method: str, *args: Any, engine: bytes) -> Any:
        raise ValueError(method)

    end_within(30)
    client = rank_client(monkeypatch, {})
    monkeypatch.setattr(DPLBAsyncMPClient, "_call_utility_async", fail)
    client.bury(1)
    with pytest.raises(ValueError, match="look"):
        await client.call_utility_all_async("look")


def test_nothing_is_sent_to_a_dead_rank_and_what_ran_there_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    client = rank_client(monkeypatch, {})
    client.bury(1)
    assert client.requests_of(1) == ["b", "c"]
    with pytest.raises(RankDied) as died:
        client.get_core_engine_for_request(SimpleNamespace(request_id="b"))
    assert (died.value.rank, died.value.request_id) == (1, "b")
    assert client.get_core_engine_for_request(SimpleNamespace(request_id="a")) == RANKS[0]
    client.forget("c")
    client.forget("never there")
    assert (client.reqs_in_flight, client.engine_inflight[RANKS[1]]) == ({"a": RANKS[0]}, 0)


def test_last_words_are_read_as_nothing_said() -> None:
    frames: list[Any] = [SimpleNamespace(buffer=EngineCoreProc.ENGINE_CORE_DEAD)]
    RankClient._overhear_last_words(frames)
    read = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    assert (read.outputs, read.utility_output, read.scheduler_stats, read.finished_requests) == ([], None, None, None)
    others: list[Any] = [SimpleNamespace(buffer=b"outputs")]
    RankClient._overhear_last_words(others)
    assert others[0].buffer == b"outputs"


def test_deaths_are_read_by_those_that_the_first_process_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(server_folder.VARIABLE, raising=False)
    assert Deaths.of_this_server() is None
    with server_folder.of_a_server():
        written, read = Deaths.of_this_server(), Deaths.of_this_server()
        assert read.read() == []
        written.write(Death(3, -9))
        written.write(Death(0, 1))
        assert read.read() == [(3, -9), (0, 1)]
        folder = server_folder.of_this_server()
    assert not folder.exists()


def test_the_server_ends_with_its_last_rank(tmp_path: Path) -> None:
    ranks = RankProcesses.__new__(RankProcesses)
    ranks._deaths, ranks._first_rank = Deaths(tmp_path / "deaths"), 0
    ranks.manager_stopped, ranks.failed_proc_name = threading.Event(), None
    ranks.processes = [multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)) for _ in range(2)]
    stopped = []
    ranks.shutdown = lambda: stopped.append(True)
    for process in ranks.processes:
        process.start()
    monitor = threading.Thread(target=ranks.monitor_engine_liveness)
    monitor.start()
    try:
        for rank, deaths in ((1, [(1, -9)]), (0, [(1, -9), (0, -9)])):
            assert not stopped
            os.kill(ranks.processes[rank].pid, signal.SIGKILL)
            wait_until(lambda deaths=deaths: ranks._deaths.read() == deaths)
    finally:
        for process in ranks.processes:
            process.kill()
    monitor.join(60)
    assert stopped == [True]


class TwoRanksAndAHealthyOne:
    """As much of an engine client as the watch needs."""

    num_ranks = 3
    errored = False
    logger_manager = None

    def __init__(self) -> None:
        self.routes = GroupRoutes(Ranks(3))
        self.engine_core = self
        self.output_processor = self
        self.buried: dict[int, asyncio.Event] = {rank: asyncio.Event() for rank in range(3)}
        self.lost: dict[int, Exception] = {}
        self.told = False

    def bury(self, rank: int) -> None:
        self.buried[rank].set()

    def requests_of(self, rank: int) -> list[int]:
        return [rank]

    def lose(self, requests: list[int], error: Exception) -> None:
        self.lost |= dict.fromkeys(requests, error)

    def propagate_error(self, error: Exception) -> None:
        self.told = isinstance(error, EngineDeadError)


async def test_two_ranks_die_with_a_group_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "LOOK_S", 0.01)
    end_within(30)
    with server_folder.of_a_server():
        client = TwoRanksAndAHealthyOne()
        watch = life_of(client)
        route = client.routes.open("moving", {0: 0}, 1)

        async def move() -> None:
            async with in_motion(route):
                await client.buried[2].wait()  # the call to the target ends when that is known to be dead

        moving = asyncio.create_task(move())
        await asyncio.sleep(0)
        watch.watch()
        for rank in (1, 2):
            Deaths.of_this_server().write(Death(rank, -9))
            await client.buried[rank].wait()
        await moving
        await eventually(lambda: client.lost.keys() == {1, 2}, every_s=0.01)
        assert [error.rank for _, error in sorted(client.lost.items())] == [1, 2]
        assert watch.living_ranks == [0]
        assert client.routes.held == {1, 2}
        client.errored = True
        await eventually(lambda: client.told, every_s=0.01)


def test_groups_keep_away_from_a_dead_rank_also_when_nothing_else_is_left() -> None:
    routes = GroupRoutes(Ranks(3))
    joined = routes.join("joined", 4, 1)
    routes.bury(1)
    leave_dead(routes, 1)
    assert joined.rank != 1
    routes.hold(frozenset())
    assert routes.held == {1}
    assert {routes.open(f"group {i}", {0: 0}).rank for i in range(8)} == {0, 2}
    routes.hold(frozenset({0, 2}))
    with pytest.raises(NoRankLeft, match="Restore one"):
        routes.open("one more", {0: 0})
    with pytest.raises(NoRankLeft):
        routes.next_rank()
    routes.hold(frozenset({0}))
    assert routes.open("again", {0: 0}).rank == 2


@pytest.mark.parametrize(
    ("changed", "outlives"),
    [
        ({}, True),
        ({"data_parallel_size": 1, "data_parallel_size_local": 1}, False),
        ({"data_parallel_size_local": 1}, False),  # the others are on another host
        ({"data_parallel_backend": "ray"}, False),
        ({"is_moe": True}, False),
        ({"server": False}, False),
        ({"options": ServeOptions(beside_rust=True)}, False),
    ],
)
def test_a_rank_is_outlived_where_somebody_sees_it_die(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, Any], outlives: bool
) -> None:
    monkeypatch.delenv(server_folder.VARIABLE, raising=False)
    if changed.pop("server", True):
        monkeypatch.setenv(server_folder.VARIABLE, str(tmp_path))
    model = SimpleNamespace(is_moe=changed.pop("is_moe", False))
    additional = changed.pop("options", ServeOptions()).into({})
    parallel = {"data_parallel_size": 2, "data_parallel_size_local": 2, "data_parallel_backend": "mp", **changed}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), model_config=model, additional_config=additional
    )
    assert outlives_a_rank(config) is outlives
