"""Ranks that are killed while groups move between them: the others go on, nothing is lost or said twice, a feed has
every batch, and nobody waits for ever when the last one dies."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.kills.rank_readers import Mover, Reader
from benchmarks.kills.ranks import rank_processes
from tests.engine.conftest import TIMEOUT_S, Server, emulating, serve_command
from vllm_rollout import RolloutClient
from vllm_rollout.parts.feeds.http.answers import FeedBatch

DEVICE = {"step": {"ms": 15.0}, "lengths": {"log_normal": {"mean": 200, "sigma": 0.5}}}
NUM_READERS = 4
NUM_RANKS = 3


@pytest.fixture
def server(tiny_model: str, tmp_path: Path) -> Iterator[Server]:
    flags = ("--max-model-len", "4096", "--data-parallel-size", str(NUM_RANKS), "--api-server-count", "2")
    command = serve_command(tiny_model, *flags, *emulating(tmp_path, DEVICE))
    with Server(command, tmp_path / "server.log") as server:
        yield server


def wait_for_groups(server: Server, readers: list[Reader], num_groups: int) -> None:
    """Wait until this many more groups are complete."""

    def num_complete() -> int:
        return sum(reader.counts["groups_complete"] for reader in readers)

    wanted = num_complete() + num_groups
    server.wait_until(lambda: num_complete() >= wanted)


def dead_ranks(server: Server) -> set[int]:
    return {engine["rank"] for engine in server.engines if engine["state"] == "dead"}


def carries_groups(server: Server, rank: int) -> bool:
    """And another one is held, so that it goes on to: the mover holds one at a time."""
    states = {engine["rank"]: engine for engine in server.engines}
    is_other_held = any(engine["state"] in ("draining", "drained") for at, engine in states.items() if at != rank)
    return is_other_held and states[rank]["state"] == "active" and states[rank]["num_running"] > 0


def test_ranks_that_are_killed_while_groups_move_take_nothing_with_them(server: Server) -> None:
    chance = random.Random(3)
    ranks = rank_processes(server._process.pid)
    assert len(ranks) == NUM_RANKS
    never = threading.Event()
    readers = [Reader(server.url, at, never, 1000) for at in range(NUM_READERS)]
    mover = Mover(server.url, 7, NUM_RANKS, never)
    batches: list[FeedBatch] = []
    with closing(RolloutClient(server.url)) as client, ThreadPoolExecutor(NUM_READERS + 1) as pool:
        feed = client.feed(2, 2, max_staleness=9)
        reading = [pool.submit(reader.read) for reader in readers]
        moving = pool.submit(mover.move)
        dead: set[int] = set()
        for rank in chance.sample(range(NUM_RANKS), NUM_RANKS):
            if len(dead) == NUM_RANKS - 1:  # what is left does all the work
                wait_for_groups(server, readers, 4 * NUM_READERS)
            before = server.counter("vllm_rollout:moves_total")
            if len(dead) < NUM_RANKS - 1:
                server.wait_until(lambda before=before: server.counter("vllm_rollout:moves_total") >= before + 3)
                feed.put([{"prompt_token_ids": [60 + rank, at]} for at in range(60, 70)])
                server.wait_until(lambda: feed.refresh().num_running >= 5)
                server.wait_until(lambda rank=rank: carries_groups(server, rank))
            os.kill(ranks[rank].pid, signal.SIGKILL)
            dead.add(rank)
            if len(dead) < NUM_RANKS:
                server.wait_until(lambda: dead_ranks(server) == dead)
                batches += [feed.batch() for _ in range(3)]
        for work in (moving, *reading):
            work.result(timeout=TIMEOUT_S)
    assert [each for batch in batches for each in batch.failed] == []
    assert len({group.prompt_id for batch in batches for group in batch.groups}) == 2 * len(batches) == 12
    assert [problem for client in (mover, *readers) for problem in client.problems] == []
    assert sum(reader.counts["groups_restarted"] for reader in readers) > 0
    for reader in readers:
        assert "engine has stopped" in reader.said or reader.said.endswith("Error"), reader.said
