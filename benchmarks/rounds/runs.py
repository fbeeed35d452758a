"""The part of `benchmarks.rounds` that talks to a server. Invariant: a run that is in the log is not made again."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import httpx

from benchmarks.common import settled_tokens
from benchmarks.long_run import Progressed
from benchmarks.rounds.client_side import client_rounds
from benchmarks.rounds.records import Log, Run
from benchmarks.rounds.setup import WAY_NAMES, Sizes, WayName, order
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.demo.phases import warm_up
from vllm_rollout.demo.rounds.rounds import Period, Round, plain_rounds, tail_rounds


@dataclass(slots=True)
class Bench:
    sizes: Sizes
    rollouts: AsyncRolloutClient
    stock: httpx.AsyncClient
    progress: Progressed
    log: Log


async def measure(bench: Bench) -> None:
    """Everything that is not in the log yet."""
    sizes, log = bench.sizes, bench.log
    total = sizes.repeats * len(WAY_NAMES)
    for repeat in range(sizes.repeats):
        for name in order(repeat):
            if (name, repeat) in log:
                continue
            done = sum(key in log for key in _keys(sizes))
            bench.progress(done, total, f"repeat {repeat + 1}, {name}")
            await warm_up(bench.stock, sizes.questions(repeat))
            run = await _period(bench, name, repeat)
            log.add(run)
            bench.progress(done + 1, total, f"repeat {repeat + 1}, {name}: {run.period.seconds:.1f} s")


def _keys(sizes: Sizes) -> list[tuple[str, int]]:
    return [(name, repeat) for repeat in range(sizes.repeats) for name in WAY_NAMES]


def _rounds(bench: Bench, name: WayName, repeat: int) -> AsyncIterator[Round]:
    questions, sampling, terms = bench.sizes.questions(repeat), bench.sizes.sampling(repeat), bench.sizes.terms
    if name == "plain":
        return plain_rounds(bench.stock, questions, terms, sampling)
    if name == "client":
        return client_rounds(bench.stock, questions, terms, sampling)
    return tail_rounds(bench.rollouts, questions, terms, sampling)


async def _period(bench: Bench, name: WayName, repeat: int) -> Run:
    """Between two rounds, where a trainer trains, the engine comes to rest and its tokens are counted."""
    load, started_s = os.getloadavg()[0], time.time()
    before = await settled_tokens(bench.stock)
    rounds: list[Round] = []
    async for each in _rounds(bench, name, repeat):
        after = await settled_tokens(bench.stock)
        rounds.append(replace(each, generated_tokens=round(after - before)))
        before = after
    return Run((name, repeat), started_s, load, Period(tuple(rounds)))
