"""Cost of the front end on a fast device: `python -m benchmarks.front_end`.

The emulated device takes 8 ms per step and 0.02 ms per candidate. Groups have 16 candidates with log-normal lengths
(mean about 400 tokens). A trainer wants the first 8 of each, and all groups run at once. Clients (`clients.py`), each
in its own process, ask the same server for the same candidates in turn. They go over vLLM's Python front end and over
its Rust front end, which runs beside it on the same engine core (docs/guides/deploy.md). If the Rust binary cannot be
fetched, the program says so and leaves its ways out. `ideal` is the device's time if nothing else took time: lengths
are replayed step by step, and every group stops in the step in which its 8th candidate ends.

CPU seconds are those of the processes, from the first request until the engine is idle again.

On few cores the host is the limit, not the code. --speed 0.25 makes every step last four times as long. Times are then
given as measured, beside an ideal that is stretched as much.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.common import (
    ROOT,
    arguments_of,
    emulated_process,
    in_turn,
    median,
    publish,
    raise_file_limit,
    record_of_run,
)
from benchmarks.front_end import binary
from benchmarks.front_end.clients import TIMEOUT_S, WAYS
from benchmarks.front_end.results import draw, table
from benchmarks.front_end.workload import DEVICE, NUM_CANDIDATES, ideal, lengths_of, prompts_of
from vllm_rollout.parts.emulation.step_log import LoggedStep, Summary, read_steps
from vllm_rollout.process import ServerProcess, exit_on_sigterm, free_port

MODEL = "smollm2-135m-instruct"
RUST = "rust-"
RUST_WAYS = tuple(f"{RUST}{way}" for way in ("stream", "close", "join"))
"""Ways over the Rust front end, which refuses n above 1 and has no rollouts."""
WARM_UP_GROUPS = 4
IDLE_S = 1.0
"""The engine counts as idle when its step log has not grown for this long."""


def main() -> None:
    parser = arguments_of(__doc__, "front_end", seed=100, repeats=3)
    add = parser.add_argument
    add("--candidates", type=int, nargs="+", default=[256, 1024, 2048], help="candidates at once, in groups of 16")
    add("--ways", nargs="+", choices=(*WAYS, *RUST_WAYS), default=[*WAYS, *RUST_WAYS], help="clients to run")
    add("--speed", type=float, default=1.0, help="--rollout-emulate-speed of the server")
    add("--ranks", type=int, default=1, help="data-parallel ranks")
    add("--api-servers", type=int, default=1)
    add("--output-picture", dest="plot", type=Path, help="file for the picture (default: beside the output)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    rust, missing = rust_front_end(arguments)
    sizes = {name: getattr(arguments, name) for name in ("speed", "ranks", "api_servers", "repeats")}
    workload = {"device": DEVICE, "candidates_per_group": NUM_CANDIDATES, "model": MODEL, **sizes}
    workload["rust_front_end"] = "beside ours" if rust else missing
    result = record_of_run(seed=arguments.seed, workload=workload)
    with tempfile.TemporaryDirectory() as folder:
        result |= measure(arguments, Path(folder), rust)
    arguments.plot = arguments.plot or arguments.output.with_suffix(".png")
    publish(arguments, result, table, draw if len(result["sizes"]) > 1 else None)


def rust_front_end(arguments: argparse.Namespace) -> tuple[Path | None, str]:
    """Path of the binary, or the reason for its absence. Then the ways that need it are removed."""
    why = "not asked for"
    if arguments.api_servers > 1:
        why = "there is one process in Python beside it, and --api-servers asks for more"
    elif any(way in RUST_WAYS for way in arguments.ways):
        try:
            return binary.fetch(), ""
        except RuntimeError as error:
            why = f"cannot be had: {error}"
            Console(stderr=True).print(f"[yellow]Without vLLM's Rust front end: {why}")
    arguments.ways = [way for way in arguments.ways if way not in RUST_WAYS]
    return None, why


def measure(arguments: argparse.Namespace, folder: Path, rust: Path | None) -> dict[str, Any]:
    raise_file_limit(max(arguments.candidates) * 2 + 512)
    flags = [
        "--max-model-len", "4096", "--max-num-batched-tokens", "16384",
        "--max-num-seqs", str(max(arguments.candidates)),
        "--rollout-emulate-log", str(folder / "steps"), "--rollout-emulate-speed", str(arguments.speed),
        "--data-parallel-size", str(arguments.ranks),
        "--served-model-name", MODEL,
    ]  # fmt: skip
    environment: dict[str, str] = {}
    our_port = free_port()
    if rust is None:
        flags += ["--api-server-count", str(arguments.api_servers)]
    else:
        flags += ["--rollout-port", str(our_port)]
        environment = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust)}
    console = Console(stderr=True)
    sizes = []
    with emulated_process(DEVICE, flags, folder, MODEL, **environment) as server:
        start_s = server.wait_until_healthy(lambda seconds, line: None)
        rust_port = _port(server)
        if rust is not None:
            server.url = f"http://127.0.0.1:{our_port}"
            start_s += server.wait_until_healthy(lambda seconds, line: None)
        rounds = Rounds(server, rust_port, folder / "steps")
        for way in arguments.ways:
            rounds.run(way, WARM_UP_GROUPS, 1)
        for size in arguments.candidates:
            num_groups = size // NUM_CANDIDATES
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in arguments.ways}
            ideals = []
            for repeat in range(arguments.repeats):
                seed = arguments.seed + repeat
                best = ideal(lengths_of(prompts_of(num_groups, seed)), arguments.ranks)
                ideals.append(best._replace(seconds=best.seconds / arguments.speed)._asdict())
                for way in in_turn(arguments.ways, repeat):
                    runs[way].append(rounds.run(way, num_groups, seed))
                    console.print(f"{size} candidates, seed {seed}, {way}: {runs[way][-1]['wall_s']:.2f} s")
            sizes.append({"candidates": size, "ideal": ideals, "runs": runs})
            sizes[-1]["medians"] = medians(sizes[-1])
    return {"server_start_s": start_s, "sizes": sizes}


def medians(size: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Medians by way. `of_ideal` is a ratio within each repeat."""
    found = {}
    for way, runs in size["runs"].items():
        ratios = [best["seconds"] / run["wall_s"] for best, run in zip(size["ideal"], runs, strict=True)]
        found[way] = {name: median(run[name] for run in runs) for name in runs[0]} | {"of_ideal": median(ratios)}
    return found


class Rounds:
    """Clients against one server, one after the other."""

    def __init__(self, server: ServerProcess, rust_port: int, steps: Path) -> None:
        self._server = server
        self._rust_port = rust_port
        self._steps = steps
        children = psutil.Process(server.pid).children()
        self._engines = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
        self._front = [psutil.Process(server.pid), *(child for child in children if child not in self._engines)]

    def run(self, way: str, num_groups: int, seed: int) -> dict[str, Any]:
        self._wait_until_idle()
        before, front, engines = self._read(), _cpu_s(self._front), _cpu_s(self._engines)
        port = self._rust_port if way.startswith(RUST) else _port(self._server)
        arguments = [way.removeprefix(RUST), str(port), str(num_groups), str(seed)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.front_end.clients", *arguments],
            capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the client {way} failed: {done.stderr[-2000:]}")
        self._wait_until_idle()
        summaries = [Summary.of(after[len(old) :]) for old, after in zip(before, self._read(), strict=True)]
        return {
            **json.loads(done.stdout),
            "api_cpu_s": _cpu_s(self._front) - front,
            "engine_cpu_s": _cpu_s(self._engines) - engines,
            "generated_tokens": sum(summary.num_sampled for summary in summaries),
            "num_steps": max(summary.num_steps for summary in summaries),
            "device_busy_s": max(summary.busy_s for summary in summaries),
            "device_idle_s": max(summary.idle_s for summary in summaries),
            "host_ms_per_step": max(summary.host_ms for summary in summaries),
        }

    def _read(self) -> list[list[LoggedStep]]:
        return [log.steps for log in read_steps(self._steps)]

    def _wait_until_idle(self) -> None:
        sizes: list[int] = []
        while sizes != (sizes := [path.stat().st_size for path in sorted(self._steps.glob("*.jsonl"))]):
            time.sleep(IDLE_S)


def _port(server: ServerProcess) -> int:
    return int(server.url.rpartition(":")[2])


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
