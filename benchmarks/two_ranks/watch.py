"""One step of rollouts as a client sees it: token by token, with a look at the ranks every 50 ms."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.two_ranks.records import LOOK_S, Candidate, Look, MovedGroup, Step
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.group.transfer import TransferCost
from vllm_rollout.server.answers import GroupEvent, TokensEvent, TrajectoryEvent

MOVED = re.compile(r"group (\S+) moved from rank \d+ to (\d+) in ([\d.]+) s")


async def watched(client: AsyncRolloutClient, log: Path, block_size: int, **request: Any) -> Step:
    """log: of the server, which says which groups moved."""
    arrivals: dict[Candidate, list[float]] = defaultdict(list)
    token_ids: dict[Candidate, Sequence[int]] = {}
    prompt_tokens: dict[str, int] = {}
    group_ids: dict[str, str] = {}
    read_from = log.stat().st_size
    looks = [await _look(client, block_size)]
    looking = asyncio.create_task(_look_on(client, block_size, looks))
    started = time.perf_counter()
    try:
        async with aclosing(client.stream(stream_tokens=1, **request)) as events:
            async for event in events:
                now = time.perf_counter()
                if isinstance(event, TokensEvent):
                    arrivals[event.prompt_id, event.index] += [now] * len(event.token_ids)
                elif isinstance(event, TrajectoryEvent):
                    token_ids[event.prompt_id, event.trajectory.index] = event.trajectory.token_ids
                elif isinstance(event, GroupEvent):
                    assert event.status == "complete", event.reason
                    prompt_tokens[event.prompt_id] = len(event.prompt_token_ids)
                    group_ids[event.prompt_id] = event.group_id
        ended = time.perf_counter()
    finally:
        looking.cancel()
        await asyncio.wait([looking])
    looks.append(await _look(client, block_size))
    looks = [look for look in looks if look.at_s < ended] + looks[-1:]
    moved = [MovedGroup(group, int(target), float(s)) for group, target, s in MOVED.findall(_since(log, read_from))]
    assert len(moved) == looks[-1].num_moved - looks[0].num_moved, "the log and the ranks count other moves"
    return Step(started, ended, dict(arrivals), token_ids, prompt_tokens, group_ids, looks, moved)


async def _look_on(client: AsyncRolloutClient, block_size: int, looks: list[Look]) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        looks.append(await _look(client, block_size))


async def _look(client: AsyncRolloutClient, block_size: int) -> Look:
    engines = await client.engines()
    prices = [engine.kv_seconds_per_token for engine in engines]
    return Look(
        time.perf_counter(),
        [engine.num_running + engine.num_waiting > 0 for engine in engines],
        sum(engine.num_moved_in for engine in engines),
        sum(engine.moving_s for engine in engines),
        [None if price is None else TransferCost(price, block_size) for price in prices],
    )


def _since(log: Path, position: int) -> str:
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")
