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
from vllm_rollout.group.load import TransferCost
from vllm_rollout.server.answers import GroupEvent, TokensEvent, TrajectoryEvent

MOVED = re.compile(r"group (\S+) moved from rank \d+ to (\d+) in ([\d.]+) s")
BETWEEN_S = 0.01
"""Between two requests, so that they arrive, and are placed, in their order."""


class Watch:
    """What is seen of one step."""

    def __init__(self, client: AsyncRolloutClient, block_size: int) -> None:
        self._client = client
        self._block_size = block_size
        self.arrivals: dict[Candidate, list[float]] = defaultdict(list)
        self.token_ids: dict[Candidate, Sequence[int]] = {}
        self.prompt_tokens: dict[str, int] = {}
        self.group_ids: dict[str, str] = {}
        self.looks: list[Look] = []

    async def step(self, log: Path, requests: Sequence[dict[str, Any]], drain_at: int | None = None) -> Step:
        """Run all requests at once.

        Args:
            log: of the server, which says which groups moved.
            drain_at: when so many candidates are left, the rank with fewer of them is drained until the end.
        """
        read_from = log.stat().st_size
        await self._look()
        looking = asyncio.create_task(self._look_on(drain_at))
        started = time.perf_counter()
        try:
            await asyncio.gather(*(self._read(BETWEEN_S * n, request) for n, request in enumerate(requests)))
            ended = time.perf_counter()
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        await self._look()
        for rank in (0, 1):
            await self._client.restore(rank)
        with log.open("rb") as file:
            file.seek(read_from)
            lines = file.read().decode(errors="replace")
        moved = [MovedGroup(group, int(target), float(seconds)) for group, target, seconds in MOVED.findall(lines)]
        assert len(moved) == self.looks[-1].num_moved - self.looks[0].num_moved, "the ranks count other moves"
        return Step(
            started, ended, dict(self.arrivals), self.token_ids, self.prompt_tokens, self.group_ids, self.looks, moved
        )

    async def _read(self, delay_s: float, request: dict[str, Any]) -> None:
        await asyncio.sleep(delay_s)
        async with aclosing(self._client.stream(stream_tokens=1, **request)) as events:
            async for event in events:
                if isinstance(event, TokensEvent):
                    self.arrivals[event.prompt_id, event.index] += [time.perf_counter()] * len(event.token_ids)
                elif isinstance(event, TrajectoryEvent):
                    self.token_ids[event.prompt_id, event.trajectory.index] = event.trajectory.token_ids
                elif isinstance(event, GroupEvent):
                    assert event.status == "complete", event.reason
                    self.prompt_tokens[event.prompt_id] = len(event.prompt_token_ids)
                    self.group_ids[event.prompt_id] = event.group_id

    async def _look_on(self, drain_at: int | None) -> None:
        was_full = False
        while True:
            await asyncio.sleep(LOOK_S)
            running = await self._look()
            was_full = was_full or (drain_at is not None and sum(running) > drain_at)
            if was_full and sum(running) <= drain_at and min(running) > 0:
                drain_at, was_full = None, False
                await self._client.drain(running.index(min(running)))

    async def _look(self) -> list[int]:
        """Requests on each rank."""
        engines = await self._client.engines()
        prices = [engine.kv_seconds_per_token for engine in engines]
        running = [engine.num_running + engine.num_waiting for engine in engines]
        self.looks.append(
            Look(
                time.perf_counter(),
                [num > 0 for num in running],
                sum(engine.num_moved_in for engine in engines),
                sum(engine.moving_s for engine in engines),
                [None if price is None else TransferCost(price, self._block_size) for price in prices],
            )
        )
        return running
