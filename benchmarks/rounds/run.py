"""Tail batching (RollPacker) on a real server: a full period of rounds, three ways.

Every way returns the same prompts, P0 per round, with R0 trajectories each:

  plain   R0 candidates of P0 prompts per round, stock chat requests, a round waits for all: the baseline
  client  tail batching as a trainer writes it around the stock endpoint: one stream per prompt with ceil(1.25 R0)
          candidates, 1.25 P0 prompts; a stream is closed when R0 of it have finished, all when P0 prompts are complete,
          and the other prompts wait in the trainer's queue for the long round
  run     POST /v1/runs and its rounds: the same rules in the engine's step loop

A period is the short rounds that fill a long one, and the long one. Every way returns the same number of prompts and
trajectories per period.

Conditions. One server (ours, which answers stock requests as vLLM does) and one client run on this machine. No log
probabilities. Candidate i samples with its prompt's seed + i in every way. Each repeat has its own order of prompts and
its own seeds. One prompt in ten asks for a long answer. At temperature 0.6 most other answers are short, and some reach
the cap. Ways take turns, and each repeat starts with another way. Prompts are in the prefix cache before a way is
timed. Between two rounds the engine becomes idle, as while a trainer trains. So tokens that an aborted HTTP request
still decodes after its round cost `client` no time. Tokens are those of the engine's own counter. P75 and the longest
are over returned trajectories. Ratios to plain are taken within a repeat. The result is their median.

Sizes. On a CPU a step takes longer with every candidate (from about 8 on), so speculative candidates cost time that a
GPU below its compute limit would not take. R0 = 2 and P0 = 8 are what two cores carry. With R0 = 4 and temperature 1 a
period was slower than plain rounds.

An interrupted run continues where it stopped. Runs are logged in the folder beside the output.

A first look, under a minute on the tiny random model, whose numbers mean nothing:   python -m benchmarks.rounds --quick
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks import long_run
from benchmarks.common import in_turn, settled_tokens, write_json
from benchmarks.rounds.client_side import client_rounds
from benchmarks.rounds.measures import Run, run_row, summarize
from benchmarks.rounds.picture import draw, tables
from benchmarks.rounds.setup import TINY, TITLES, WAY_NAMES, Sizes, WayName, check
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.demo.phases import warm_up
from vllm_rollout.parts.rounds.demo.rounds import Period, Round, plain_rounds, tail_rounds
from vllm_rollout.process import ServerProcess, server_flags

NOTE = (
    "Two CPU cores: a step with twice the candidates takes nearly twice as long, so that speculation costs more here "
    "than on a GPU that waits for memory."
)
QUICK: dict[str, Any] = {"model": TINY, "prompts_per_round": 4, "group_size": 2, "max_tokens": 128, "repeats": 1}


def main() -> None:
    long_run.main("rounds", __doc__, Sizes, QUICK, run, tables, draw)


def run(arguments: argparse.Namespace, sizes: Sizes, console: Console) -> None:
    """Measure missing runs, and write the output."""
    check(sizes)
    folder: Path = arguments.output.with_suffix("")
    if arguments.again:
        long_run.remove(folder, ("begun.json", "runs.jsonl"))
    workload = {"ways": TITLES, "conditions": __doc__}
    begun = long_run.begin(folder, asdict(sizes), sizes.seed, workload, ("repeats",))
    log = long_run.RunLog(folder / "runs.jsonl", Run)

    async def measure(server: ServerProcess, client: AsyncRolloutClient, progressed: long_run.Progressed) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=None, trust_env=False) as stock:
            await _measure(Bench(sizes, client, stock), log, progressed)

    long_run.measure_missing(sizes, log, WAY_NAMES, [], arguments, console, measure)
    rows = [run_row(log[name, repeat]) for repeat in range(sizes.repeats) for name in WAY_NAMES]
    flags = [*server_flags(sizes.max_num_seqs), *shlex.split(arguments.server_args)]
    numbers = {"sizes": asdict(sizes), "ways": summarize(rows), "measurements": rows}
    seeds = [sizes.repeat_seed(repeat) for repeat in range(sizes.repeats)]
    write_json(arguments.output, {**begun, "note": NOTE, "seeds": seeds, "server_flags": flags, **numbers})
    console.print(f"written to {arguments.output}")


async def _measure(bench: Bench, log: long_run.RunLog[Run], progressed: long_run.Progressed) -> None:
    """Measure all runs that are not in the log."""
    sizes = bench.sizes
    todo = [(name, repeat) for repeat in range(sizes.repeats) for name in in_turn(WAY_NAMES, repeat)]
    for done, (name, repeat) in enumerate(todo):
        if (name, repeat) in log:
            continue
        progressed(done, len(todo), f"repeat {repeat + 1}, {name}")
        await warm_up(bench.stock, sizes.questions(repeat))
        log.add(await bench.period(name, repeat))


@dataclass(slots=True)
class Bench:
    sizes: Sizes
    rollouts: AsyncRolloutClient
    stock: httpx.AsyncClient

    async def period(self, name: WayName, repeat: int) -> Run:
        """Run a period. Between two rounds, where a trainer trains, the engine gets idle and its tokens are counted."""
        load, started_s = os.getloadavg()[0], time.time()
        before = await settled_tokens(self.stock)
        rounds: list[Round] = []
        async for each in self._rounds(name, repeat):
            after = await settled_tokens(self.stock)
            rounds.append(replace(each, generated_tokens=round(after - before)))
            before = after
        return Run((name, repeat), started_s, load, Period(tuple(rounds)))

    def _rounds(self, name: WayName, repeat: int) -> AsyncIterator[Round]:
        asked = self.sizes.questions(repeat), self.sizes.terms, self.sizes.sampling(repeat)
        if name == "run":
            return tail_rounds(self.rollouts, *asked)
        return (plain_rounds if name == "plain" else client_rounds)(self.stock, *asked)
