"""The part of `benchmarks.shaping` that talks to a server.

Invariant: a run in the log is not measured again, and every way starts from the same history of lengths.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.long_run import Progressed, RunLog, keep_state
from benchmarks.shaping.records import GroupRecord, Run, traced_prompts
from benchmarks.shaping.setup import WAY_NAMES, WAYS, Sizes, Way, order, prompts
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.kernel.http.answers import RolloutAnswer
from vllm_rollout.process import counter

PREEMPTIONS = "vllm:num_preemptions_total"
WARM_UP_TOKENS = 16
HISTORY = Way("history", 0, "first", early_stop=False)

Redundancy = int | dict[str, Any] | list[int]
"""Spare candidates: one number for all prompts, "auto", or a list with a number for each prompt."""


@dataclass(slots=True)
class Bench:
    sizes: Sizes
    folder: Path
    client: AsyncRolloutClient
    url: str
    progress: Progressed
    log: RunLog[Run]
    server: int = field(init=False)
    """Number of the server's start."""

    def __post_init__(self) -> None:
        self.server = 1 + max((run.server for run in self.log), default=-1)

    @property
    def history(self) -> Path:
        """File with the server's state after the history, restored before every way."""
        return self.folder / "history.state"

    @property
    def trace(self) -> Path:
        """File that the server writes by --rollout-record."""
        return self.folder / "trace.jsonl"


async def measure(bench: Bench) -> None:
    """Measure all runs that are not in the log."""
    sizes, log = bench.sizes, bench.log
    todo = [(repeat, [way for way in order(repeat) if (way, repeat) not in log]) for repeat in range(sizes.repeats)]
    total = sizes.repeats * len(WAY_NAMES)
    done = total - sum(len(names) for _, names in todo)
    if done == total and bench.history.exists():
        return
    bench.progress(done, total, "warm-up")
    empty = await bench.client.state()
    await _ask(bench, HISTORY, sizes.group_size, 0, max_tokens=WARM_UP_TOKENS)
    if not bench.history.exists():
        await bench.client.set_state(empty)
        await _make_history(bench)
    state = bench.history.read_bytes()
    for repeat, names in todo:
        for name in names:
            bench.progress(done, total, f"repeat {repeat + 1}, {name}")
            await _ask(bench, HISTORY, 0, 0, max_tokens=1)  # prompts into the prefix cache
            await bench.client.set_state(state)
            run = await _roll(bench, (name, repeat), WAYS[name], sizes.repeat_seed(repeat))
            log.add(run)
            done += 1
            bench.progress(done, total, f"repeat {repeat + 1}, {name}: {run.wall_s:.1f} s")


async def _make_history(bench: Bench) -> None:
    for epoch in range(bench.sizes.epochs):
        bench.progress(epoch, bench.sizes.epochs, "history")
        bench.log.add(await _roll(bench, ("history", epoch), HISTORY, bench.sizes.epoch_seed(epoch)))
    await keep_state(bench.client, bench.history)


async def _roll(bench: Bench, key: tuple[str, int], way: Way, seed: int) -> Run:
    """Run one way. The clock stops when every answer has arrived."""
    redundancy: Redundancy
    if way.redundancy == "auto":
        redundancy = {"auto": {"tradeoff": bench.sizes.tradeoff}}
    elif way.redundancy == "shares":
        redundancy = [group.num_candidates - bench.sizes.group_size for group in bench.log["auto", key[1]].groups]
    else:
        redundancy = bench.sizes.spare(way)
    load = os.getloadavg()[0]
    preemptions = await _preemptions(bench)
    started_s, started = time.time(), time.perf_counter()
    answers = await _ask(bench, way, redundancy, seed)
    wall_s = time.perf_counter() - started
    traced = traced_prompts(bench.trace, [answer.id for answer in answers])
    budgets = [answer.budget for answer in answers if answer.budget is not None]
    return Run(
        key=key,
        started_s=started_s,
        server=bench.server,
        load=load,
        wall_s=wall_s,
        num_preemptions=await _preemptions(bench) - preemptions,
        warnings=tuple(sorted({warning for answer in answers for warning in answer.warnings})),
        groups=tuple(GroupRecord.of(group, traced[group.prompt_id]) for answer in answers for group in answer.groups),
        budget=budgets[0].model_dump() if budgets else None,
    )


async def _ask(
    bench: Bench, way: Way, redundancy: Redundancy, seed: int, *, max_tokens: int | None = None
) -> list[RolloutAnswer]:
    """Make one request, or one per prompt at once if each prompt has its own number of spare candidates."""
    sizes = bench.sizes
    everything = prompts(sizes)
    sampling = sizes.sampling(seed) | ({} if max_tokens is None else {"max_tokens": max_tokens})
    if isinstance(redundancy, list):
        requests = [([prompt], spare) for prompt, spare in zip(everything, redundancy, strict=True)]
    else:
        requests = [(everything, redundancy)]
    return await asyncio.gather(
        *(
            bench.client.rollout(
                some,
                sizes.group_size,
                spare,
                selection=sizes.selection(way),
                early_stop=way.early_stop,
                sampling_params=sampling,
            )
            for some, spare in requests
        )
    )


async def _preemptions(bench: Bench) -> int:
    async with httpx.AsyncClient(base_url=bench.url, trust_env=False) as client:
        return int(counter((await client.get("/metrics")).text, PREEMPTIONS))
