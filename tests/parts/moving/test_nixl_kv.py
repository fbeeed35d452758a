"""KV blocks by NIXL: between two processes by the real package, and over a stand-in that fails wherever it can."""

import ctypes
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernel.core.scheduler_runs import add_group
from tests.parts.moving.moving_runs import assert_each_once
from tests.parts.moving.nixl_source import decoded, new_layers
from tests.support.waiting import WAIT_S
from vllm_rollout.parts.moving.core.moving import GroupMoves
from vllm_rollout.parts.moving.options import MovingOptions
from vllm_rollout.parts.moving.wire import KVSegment
from vllm_rollout.parts.moving.worker import kv_calls, nixl_kv
from vllm_rollout.parts.moving.worker.kv_layers import KV_FAILURES, KVLayers, TransferError
from vllm_rollout.parts.moving.worker.nixl_kv import NUM_KEPT, TRANSFER_LIMIT_S, Agent, NixlKV

PROGRAM = Path(__file__).with_name("nixl_source.py")


class Source:
    """Another process, with blocks of seed 0."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, command: str) -> str:
        print(command, file=self.process.stdin, flush=True)
        return next(line.split()[1] for line in self.process.stdout if line.startswith("ANSWER "))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)


TRANSPORTS = {"any": {}, "tcp": {"UCX_TLS": "tcp"}}
"""UCX settings by name. tcp: as between hosts without RDMA."""


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[str, Source]]:
    """One source for each transport. The sources start together."""
    sources = {name: Source(**environment) for name, environment in TRANSPORTS.items()}
    yield sources
    for source in sources.values():
        source.end()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_blocks_arrive_from_another_process_until_they_are_dropped_or_it_ends(monkeypatch, sources, transports):
    for name, value in TRANSPORTS[transports].items():
        monkeypatch.setenv(name, value)
    source = sources[transports]
    layers, there = new_layers(1), new_layers(0)
    before = [layer.clone() for layer in layers]
    target = NixlKV(KVLayers(layers), 0, Agent.load())
    segment = decoded(source.ask("share 5 0 3 6"))
    assert segment.way == "nixl"
    target.fetch(segment, [0, 2, 3], [1, 6, 2])
    for layer, content, expected in zip(layers, there, before, strict=True):
        expected[[1, 6, 2]] = content[[5, 3, 6]]
        assert torch.equal(layer, expected)
    assert source.ask(f"drop {segment.name}") == "0"
    with pytest.raises(KV_FAILURES):
        target.fetch(segment, [0], [1])
    other = decoded(source.ask("share 1"))
    source.end()
    with pytest.raises(TransferError):
        target.fetch(other, [0], [1])
    assert all(torch.equal(*pair) for pair in zip(layers, before, strict=True))


class NixlError(Exception): ...


class Network:
    """Registered memory of all agents."""

    def __init__(self) -> None:
        self.registered: dict[str, set[tuple[int, int]]] = {}


class FakeNixl:
    """An agent whose transfers take `num_polls`, and whose calls fail from the n-th one on."""

    def __init__(self, network: Network, name: str) -> None:
        self._network, self._name = network, name
        self._mine = network.registered.setdefault(name, set())
        self.connected: Counter[str] = Counter()
        self.handles: dict[int, Any] = {}
        self.num_polls = 2
        self.releases = True
        self.fails: dict[str, int] = {}
        self.calls: Counter[str] = Counter()

    def _count(self, function: str) -> None:
        self.calls[function] += 1
        if 0 < self.fails.get(function, 0) <= self.calls[function]:
            raise NixlError(function)

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> tuple[int, int]:
        self._count("register_memory")
        ((start, num_bytes, _, _),) = regions
        self._mine.add((start, num_bytes))
        return start, num_bytes

    def deregister_memory(self, token: tuple[int, int]) -> None:
        self._mine.discard(token)
        self._count("deregister_memory")

    def get_partial_agent_metadata(self, token: tuple[int, int], with_address: bool, backends: list[str]) -> bytes:
        self._count("get_partial_agent_metadata")
        assert token in self._mine
        assert with_address
        return self._name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self._count("add_remote_agent")
        self.connected[metadata.decode()] += 1
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        del self.connected[name]
        self._count("remove_remote_agent")

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> tuple[int, int]:
        self._count("get_xfer_descs")
        ((start, num_bytes, _),) = regions
        return start, num_bytes

    def initialize_xfer(self, operation: str, local: tuple[int, int], remote: tuple[int, int], there: str) -> int:
        self._count("initialize_xfer")
        assert operation == "READ"
        for name, (start, num_bytes) in ((self._name, local), (there, remote)):
            regions = self._network.registered[name]
            if not any(first <= start and start + num_bytes <= first + size for first, size in regions):
                raise NixlError("NIXL_ERR_NOT_FOUND")
        handle = len(self.calls) * 1000 + self.calls["initialize_xfer"]
        self.handles[handle] = [local, remote, self.num_polls]
        return handle

    def transfer(self, handle: int) -> str:
        self._count("transfer")
        return self._state(handle)

    def check_xfer_state(self, handle: int) -> str:
        self._count("check_xfer_state")
        return self._state(handle)

    def _state(self, handle: int) -> str:
        local, remote, num_polls = self.handles[handle]
        if num_polls > 0:
            self.handles[handle][2] -= 1
            return "PROC"
        ctypes.memmove(local[0], remote[0], local[1])
        return "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        self._count("release_xfer_handle")
        if not self.releases and self.handles[handle][2] > 0:
            raise NixlError("NIXL_ERR_REPOST_ACTIVE")
        del self.handles[handle]


class End:
    """A worker, and its time, which passes while it waits."""

    def __init__(self, network: Network, name: str, seed: int) -> None:
        self.now = 0.0
        self.nixl = FakeNixl(network, name)
        self.layers = new_layers(seed)
        self.kv = NixlKV(KVLayers(self.layers), 0, Agent(self.nixl, (NixlError,), lambda: self.now, self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def assert_clean(self) -> None:
        assert self.kv._lent == {}
        assert self.nixl._mine == set()
        assert not self.nixl.connected
        assert self.nixl.handles == {}


@pytest.fixture
def ends() -> list[End]:
    network = Network()
    return [End(network, "source", 0), End(network, "target", 1)]


FUNCTIONS = [name for name, value in vars(FakeNixl).items() if callable(value) and not name.startswith("_")]


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("end", [0, 1], ids=["source", "target"])
def test_whatever_fails_nothing_is_left_behind(ends, end, function, nth):
    source, target = ends
    ends[end].nixl.fails = {function: nth}
    has_failed = False
    try:
        segment = source.kv.share([1, 2])
        target.kv.fetch(segment, [1], [0])
    except TransferError:
        has_failed = True
    for name in list(source.kv._lent):
        source.kv.drop(name)
    asked = ends[end].nixl.calls[function]
    of_the_drop = function == "deregister_memory" and end == 0
    assert has_failed == (asked >= nth and not of_the_drop and function != "release_xfer_handle")
    ends[end].nixl.fails = {}
    segment = source.kv.share([3])
    target.kv.fetch(segment, [0], [4])
    assert torch.equal(target.layers[1][4], source.layers[1][3])
    source.kv.drop(segment.name)
    assert target.kv._agent._late == []
    assert target.nixl.handles == {}
    if function != "release_xfer_handle":
        for each in ends:
            each.assert_clean()


def test_a_late_transfer_is_given_up_and_what_it_writes_to_is_kept(ends):
    source, target = ends
    target.nixl.num_polls, target.nixl.releases = 10**6, False
    segment = source.kv.share([1])
    with pytest.raises(TransferError, match="takes longer than"):
        target.kv.fetch(segment, [0], [0])
    assert TRANSFER_LIMIT_S <= target.now < TRANSFER_LIMIT_S + 1
    source.kv.drop(segment.name)
    (late,) = target.kv._agent._late
    assert late.into.token in target.nixl._mine
    target.nixl.handles[late.handle][2] = 0  # it ends after all
    target.nixl.num_polls = 0
    segment = source.kv.share([2])
    target.kv.fetch(segment, [0], [0])
    assert torch.equal(target.layers[0][0], source.layers[0][2])
    assert target.kv._agent._late == []
    source.kv.drop(segment.name)
    source.assert_clean()


def test_a_late_transfer_that_can_be_cancelled_leaves_nothing(ends):
    source, target = ends
    target.nixl.num_polls = 10**6
    segment = source.kv.share([1])
    with pytest.raises(TransferError, match="takes longer than"):
        target.kv.fetch(segment, [0], [0])
    source.kv.drop(segment.name)
    for end in ends:
        end.assert_clean()


def test_dropped_memory_is_given_back_but_can_still_be_read(ends):
    source, _ = ends
    segment = source.kv.share([1])
    memory = source.kv._lent[segment.name]
    assert memory.bytes.any()
    source.kv.drop(segment.name)
    assert not memory.bytes.any()
    for _ in range(NUM_KEPT + 3):
        source.kv.drop(source.kv.share([1]).name)
    assert len(source.kv._dropped) == NUM_KEPT


def test_memory_that_is_another_segment_now_is_not_taken(ends):
    source, target = ends
    segment = source.kv.share([1])
    other = source.kv.share([2])
    before = target.layers[0].clone()
    mistaken = KVSegment(0, segment.name, "nixl", segment.host, other.address, segment.layout, 1)
    with pytest.raises(ValueError, match="is another segment now"):
        target.kv.fetch(mistaken, [0], [0])
    assert torch.equal(target.layers[0], before)


def test_a_segment_that_is_too_large_is_not_made(ends, monkeypatch):
    source, target = ends
    segment = source.kv.share([1])
    monkeypatch.setattr(nixl_kv, "free_bytes", lambda: 1000)
    with pytest.raises(MemoryError):
        source.kv.share([1])
    with pytest.raises(MemoryError):
        target.kv.fetch(segment, [0], [0])
    source.kv.drop(segment.name)
    for end in ends:
        end.assert_clean()


def test_groups_take_their_blocks_along(new_ranks):
    ranks = new_ranks()
    network = Network()
    for name, core in zip("ab", ranks.cores, strict=True):
        agent = Agent(FakeNixl(network, name), (NixlError,))
        core.kv.kv_transfers = {"nixl": NixlKV(KVLayers(list(core.kv.kv_blocks)), 0, agent)}
    (id,) = add_group(ranks.runs[0], "g", [100], group_size=1, prompt_token_ids=[5] * 100)
    ranks.until(id, 60)
    assert ranks.move("g") == "released"
    ranks.run()
    assert ranks.runs[1].scheduler.part(GroupMoves).kv.num_blocks_in >= 9
    assert_each_once(ranks, {id: 100})


def test_without_the_package_the_target_computes(new_ranks, monkeypatch):
    monkeypatch.setattr(nixl_kv, "nixl_utils", SimpleNamespace(NixlWrapper=None))
    ranks = new_ranks(options=MovingOptions(moves_kv_by_nixl=True))
    for core in ranks.cores:
        core.kv.vllm_config = SimpleNamespace(additional_config=MovingOptions(moves_kv_by_nixl=True).into({}))
        with pytest.raises(TransferError, match="NIXL cannot be loaded"):
            kv_calls.kv_transfers(core.kv.vllm_config, KVLayers(list(core.kv.kv_blocks)), 0)
    (id,) = add_group(ranks.runs[0], "g", [100], group_size=1, prompt_token_ids=[5] * 100)
    ranks.until(id, 60)
    assert ranks.move("g") == "released"
    ranks.run()
    assert ranks.runs[0].scheduler.part(GroupMoves).kv.num_fallbacks == 1
    assert ranks.runs[0].last(id) is not None
