"""The piece that races by HTTP: ours against stock `vllm serve` on the same card, and against the best client of
stock's.

That client sends 16 requests and aborts the other 8 when 8 are complete.

A model without weights samples every token with about the same probability. A `logit_bias` on a stop token makes the
lengths of its answers geometric, which is the heavy tail of a real policy.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.common import median, quartiles
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.engine import become_child, kill_all
from benchmarks.gpu_check.models import STOP_TOKEN
from benchmarks.gpu_check.pieces import NO_WARM_UP, WITHOUT_INDUCTOR
from vllm_rollout.process import free_port, server_environment

GROUP, NEEDED = 16, 8
START_LIMIT_S = 240.0
FLAGS = (
    *("--load-format", "dummy", "--max-num-seqs", "256", "--max-model-len", "4096"),
    *("--kv-cache-memory-bytes", str(14 << 30), "--gpu-memory-utilization", "0.4"),
    *("--disable-uvicorn-access-log", "--kernel-config", json.dumps(NO_WARM_UP)),
    *("--compilation-config", json.dumps({**WITHOUT_INDUCTOR, "cudagraph_capture_sizes": [1, 8, 32, 64, 128, 256]})),
)
SMALL_FLAGS = (
    *("--load-format", "dummy", "--max-num-seqs", "32", "--max-model-len", "512", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", str(1 << 28), "--enforce-eager", "--block-size", "32"),
    "--disable-uvicorn-access-log",
)


def served_race(bench: Bench) -> None:
    num_prompts, mean, longest = (1, 12, 64) if bench.small else (16, 300, 2048)
    repeats = 2 if bench.small else 6
    flags = SMALL_FLAGS if bench.small else FLAGS
    model = bench.models.path("8b")
    started = time.monotonic()
    with server("stock", model, flags, bench.log) as stock, server("rollout", model, flags, bench.log) as ours:
        for each in (stock, ours):
            each.wait_until_healthy()
        bench.value(servers_started_s=round(time.monotonic() - started, 1))
        sampling = {
            "temperature": 1.0,
            "max_tokens": longest,
            "stop_token_ids": [STOP_TOKEN],
            "logit_bias": {str(STOP_TOKEN): math.log(bench.models.shape["vocab_size"] / mean)},
        }
        asyncio.run(race(bench, Ways(stock.url, ours.url, model, num_prompts, sampling), repeats))


async def race(bench: Bench, ways: Ways, repeats: int) -> None:
    seconds: dict[str, list[float]] = {way: [] for way in ways.runs}
    took = 0.0
    for repeat in range(repeats):
        if repeat > 1 and not bench.time_for_another(took):
            break
        took = 0.0
        for way, run in ways.runs.items():
            begun = time.perf_counter()
            complete = await run(repeat)
            lasted = time.perf_counter() - begun
            took += lasted
            bench.value(repeat=repeat, way=way, seconds=round(lasted, 4), complete=sum(complete))
            wanted = GROUP if way in ("stock waits for all", "ours waits for all") else NEEDED
            bench.check(f"run {repeat}, {way}: complete answers of each prompt", min(complete) >= wanted, complete)
            if repeat:
                seconds[way].append(lasted)
        for way in ways.runs if repeat else ():
            pairs = zip(seconds["stock waits for all"], seconds[way], strict=True)
            bench.result(f"{way}: times as fast as stock waits for all", quartiles([a / b for a, b in pairs]))
    gain = median(seconds["stock, the client aborts"]) / median(seconds["ours, first 8"])
    bench.speed("the race is as fast as a client that aborts", gain > 0.95, round(gain, 3), "> 0.95")


class Ways:
    """Ways to ask for the same prompts. Each returns the number of complete answers by prompt."""

    def __init__(self, stock: str, ours: str, model: Path, num_prompts: int, sampling: dict[str, Any]) -> None:
        self._stock, self._ours, self._model, self._sampling = stock, ours, str(model), sampling
        self._num_prompts = num_prompts
        self.runs: dict[str, Callable[[int], Awaitable[list[int]]]] = {
            "stock waits for all": lambda repeat: self._by_client(repeat, GROUP),
            "stock, the client aborts": lambda repeat: self._by_client(repeat, NEEDED),
            "ours waits for all": lambda repeat: self._rollout(repeat, GROUP),
            "ours, first 8": lambda repeat: self._rollout(repeat, NEEDED),
        }

    def _prompts(self, repeat: int) -> list[list[int]]:
        """Prompts of a repeat, all new, so that no prefix is cached."""
        return [[10 + (31 * repeat + 7 * p + i) % 400 for i in range(64)] for p in range(self._num_prompts)]

    async def _by_client(self, repeat: int, needed: int) -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._stock, timeout=None, trust_env=False, limits=limits) as client:
            return await asyncio.gather(*(self._group(client, prompt, needed) for prompt in self._prompts(repeat)))

    async def _group(self, client: httpx.AsyncClient, prompt: list[int], needed: int) -> int:
        async def one() -> None:
            body = {"model": self._model, "prompt": prompt, **self._sampling}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        waiting = {asyncio.create_task(one()) for _ in range(GROUP)}
        num_complete = 0
        while num_complete < needed:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            num_complete += len(done)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return num_complete

    async def _rollout(self, repeat: int, group_size: int) -> list[int]:
        body = {
            "prompts": [{"prompt_token_ids": prompt} for prompt in self._prompts(repeat)],
            "group_size": group_size,
            "redundancy": GROUP - group_size,
            "sampling_params": self._sampling,
            "include": [],
        }
        async with httpx.AsyncClient(base_url=self._ours, timeout=None, trust_env=False) as client:
            answer = await client.post("/v1/rollouts", json=body)
        if answer.is_error:
            raise RuntimeError(f"/v1/rollouts answered {answer.status_code}: {answer.text[:2000]}")
        return [len(group["trajectories"]) for group in answer.json()["groups"]]


class Server(NamedTuple):
    """A server that may not have started yet."""

    url: str
    process: BaseProcess

    def wait_until_healthy(self) -> None:
        """Raises: RuntimeError if the server ends, or does not answer in time."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if not self.process.is_alive():
                status = self.process.exitcode
                raise RuntimeError(f"the server at {self.url} ended with exit status {status}; see engines.log")
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"the server at {self.url} has not answered within {START_LIMIT_S:.0f} s; see engines.log")


@contextmanager
def server(kind: str, model: Path, flags: tuple[str, ...], log: int) -> Iterator[Server]:
    """A server in a copy of this process."""
    port = free_port()
    arguments = [*flags, "--host", "127.0.0.1", "--port", str(port)]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_serve, args=(kind, str(model), arguments, log, os.getpid()))
    process.start()
    try:
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        kill_all(process.pid)
        process.join()


def _serve(kind: str, model: str, arguments: list[str], log: int, parent: int) -> None:
    become_child(parent, log)
    os.environ |= server_environment(model)
    os.environ.pop("VLLM_PLUGINS", None)
    if kind == "stock":
        sys.argv = ["vllm", "--model", model, *arguments]
        runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["vllm-rollout", "serve", model, *arguments]
        from vllm_rollout.cli import app

        app()
