"""Kill a server of an emulated device at random points over many rounds, whole or only its engine core, and count what
its trainers have lost: every prompt that was handed in is returned or filtered once, or still waits.

Three runs at once: one trainer that takes whole answers, two that share a run and stream, and one whose rounds filter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.common import ROOT, arguments_of, record_of_run, write_json
from benchmarks.kills.trainers import Book, Trainer
from vllm_rollout.process import free_port

MODEL = "tiny-random"
EMULATED = {
    "step": {"ms": 1.0, "ms_per_request": 0.0},
    "kv_tokens": 100_000,
    "lengths": {"log_normal": {"mean": 40, "sigma": 0.8}},
    "seed": 0,
}
START_TIMEOUT_S = 60.0
LOG_CHARS = 3000
"""Of a server that did not start, told."""
SEED_STRIDE = 1000
WITHOUT_CORE_S = 1.5
"""What a server gets to tell its clients that its engine core is gone, before it is killed as well, at most."""


def main() -> None:
    parser = arguments_of(__doc__, "kills")
    parser.add_argument("--lives", type=int, default=1000, help="servers that are killed")
    parser.add_argument("--at-once", type=int, default=1, help="servers that live side by side, each with its trainers")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no life after so long")
    parser.add_argument("--longest-life", type=float, default=1.0, help="seconds from healthy to the kill, at most")
    args = parser.parse_args()
    result = asyncio.run(_measure(args))
    write_json(args.output, result)
    print(json.dumps(result["counts"], indent=1))
    sys.exit(1 if result["problems"] else 0)


class NotStarted(Exception):
    """A server that was to be there did not come."""


class Server:
    """The servers of one nursery, one after the other, all on one port and one folder."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        emulated = folder / "emulated.json"
        emulated.write_text(json.dumps(EMULATED))
        self._flags = [MODEL, "--emulate", str(emulated), "--rollout-state", str(folder / "state")]
        self._flags += ["--max-num-seqs", "64", "--max-model-len", "2048", "--disable-uvicorn-access-log"]
        self._flags += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.pid = 0

    async def __aenter__(self) -> Server:
        environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._nursery = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.kills.nursery", *self._flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
            cwd=ROOT,
        )
        while (line := await self._nursery.stdout.readline()) != b"warm\n":
            assert line, "the nursery has ended"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._nursery.stdin.close()
        await self._nursery.wait()

    async def start(self) -> float:
        """Seconds until it is healthy. Raises: NotStarted; then it is gone."""
        started = time.monotonic()
        self.pid = int(await self._ask(f"start {self.log}"))
        async with httpx.AsyncClient(base_url=self.url, timeout=5, trust_env=False) as http:
            while time.monotonic() - started < START_TIMEOUT_S and _is_running(self.pid):
                with suppress(httpx.TransportError):
                    if (await http.get("/health")).status_code == 200:
                        return time.monotonic() - started
                await asyncio.sleep(0.05)
        state = "hangs" if _is_running(self.pid) else "has ended"
        said = self.log.read_text(errors="replace")[-LOG_CHARS:]
        await self.kill()
        raise NotStarted(f"a server {state} after {time.monotonic() - started:.0f} s and is not healthy: ...{said}")

    async def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        await self._ask(f"reap {self.pid}")

    async def kill_core(self) -> bool:
        """The engine core first; whatever is left of the server goes after it. Whether nothing was."""
        os.kill(_engine_core(self.pid), signal.SIGKILL)
        deadline = time.monotonic() + WITHOUT_CORE_S
        while _is_running(self.pid) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        has_ended = not _is_running(self.pid)
        await self.kill()
        return has_ended

    async def _ask(self, line: str) -> str:
        self._nursery.stdin.write(f"{line}\n".encode())
        answer = await self._nursery.stdout.readline()
        assert answer, "the nursery has ended"
        return answer.decode().strip()


def _engine_core(pid: int) -> int:
    children = psutil.Process(pid).children()
    cores = [child for child in children if "EngineCor" in child.name()]
    assert len(cores or children) == 1, f"children of the server: {children}"
    return (cores or children)[0].pid


def _is_running(pid: int) -> bool:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Nursery(NamedTuple):
    """What became of one nursery's servers."""

    counts: Counter[str]
    starts_s: list[float]
    problems: list[str]


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    record = record_of_run(seed=args.seed, workload={"model": MODEL, "emulated": EMULATED, "runs": 3, "trainers": 4})
    lives = [len(range(at, args.lives, args.at_once)) for at in range(args.at_once)]
    nurseries = await asyncio.gather(
        *(_kill(args, num_lives, args.seed + SEED_STRIDE * at) for at, num_lives in enumerate(lives))
    )
    starts = sorted(start_s for its in nurseries for start_s in its.starts_s)
    return {
        **record,
        "nurseries": args.at_once,
        "counts": {name: sum(its.counts[name] for its in nurseries) for name in nurseries[0].counts},
        "start_s": {"median": starts[len(starts) // 2], "max": starts[-1]},
        "problems": [problem for its in nurseries for problem in its.problems][:20],
    }


async def _kill(args: argparse.Namespace, num_lives: int, seed: int) -> Nursery:
    """Servers on one port and one folder, one life after the other."""
    chance = random.Random(seed)
    books = [Book("whole"), Book("shared"), Book("filtering", filters=True)]
    counts: Counter[str] = Counter()
    starts: list[float] = []
    over = asyncio.Event()
    with tempfile.TemporaryDirectory() as folder:
        async with Server(Path(folder)) as server:
            names = [(books[0], "w"), (books[1], "s1"), (books[1], "s2"), (books[2], "f")]
            trainers = [
                asyncio.create_task(
                    Trainer(server.url, book, name, seed + at, streams=book.name != "whole").train(over)
                )
                for at, (book, name) in enumerate(names)
            ]
            began = time.monotonic()
            while counts["lives"] < num_lives and time.monotonic() - began < args.minutes * 60:
                try:
                    starts.append(await server.start())
                except NotStarted as error:
                    books[0].problems.append(str(error))
                    continue
                await asyncio.sleep(chance.uniform(0, args.longest_life))
                counts["lives"] += 1
                if chance.random() < 0.5:
                    counts["kills_of_the_server"] += 1
                    await server.kill()
                else:
                    counts["kills_of_the_engine_core"] += 1
                    counts["servers_that_ended_by_themselves"] += await server.kill_core()
                for trainer in trainers:
                    if trainer.done():
                        trainer.result()
                if counts["lives"] % 10 == 0:
                    answers = sum(len(book.digests) for book in books)
                    problems = sum(len(book.problems) for book in books)
                    print(f"{counts['lives']} lives, {answers} answers, {problems} problems", flush=True)
            starts.append(await server.start())
            over.set()
            await asyncio.gather(*trainers)
            async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as http:
                for book in books:
                    book.check((await http.get(f"/v1/runs/{book.name}")).json())
            await server.kill()
    for book in books:
        counts["prompts_handed_in"] += len(book.handed_in)
        counts["prompts_returned_or_filtered"] += book.returned.total()
        counts["answers"] += len(book.digests)
        counts["keys_repeated"] += book.num_repeats
        counts["answers_asked_for_again"] += book.num_replayed
        counts["invariants_broken"] += len(book.problems)
    return Nursery(counts, starts, [problem for book in books for problem in book.problems])
