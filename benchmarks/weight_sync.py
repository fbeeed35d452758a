"""Seconds for new weights to reach a server by disk, ours against stock vLLM's, paired.

What a trainer does that shares a file system with its server: it saves a checkpoint, pauses generation, lets the
engine load the folder, empties the prefix cache and resumes. Two checkpoints of the same shapes take turns, and a
greedy answer after each says whose weights it was given.

  save      the checkpoint as one safetensors file
  load      /collective_rpc reload_weights alone, nothing running
  sync      pause (keep), load, reset_prefix_cache, resume, nothing running
  running   the same while 16 answers are on their way, which go on with the new weights

Run from the repository root: python -m benchmarks.weight_sync (some 5 minutes).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.common import median, record_of_run, server_process, write_json
from conformance.prime_rl import make_weights
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, counter, exit_on_sigterm, server_flags

NUM_RUNNING = 16
WAYS = ("load", "sync", "running")
KINDS = ("stock", "rollout")
LIMIT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weight_sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["tiny-random", DEFAULT_MODEL])
    parser.add_argument("--repeats", type=int, default=7, help="of each way on each server; default %(default)s")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/weight_sync.json"))
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console()
    results = [measure(model, args.repeats, console) for model in args.models]
    workload = {"running": NUM_RUNNING, "ways": "see the module's docstring"}
    write_json(args.output, {**record_of_run(seed=0, workload=workload), "results": results})
    console.print(f"written to {args.output}")


def measure(model: str, repeats: int, console: Console) -> dict[str, Any]:
    original = Path(resolve(model))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        other = make_weights(original, folder / "other")
        seconds: dict[str, Any] = {"save": [save(other, folder / "saved.safetensors") for _ in range(repeats)]}
        servers = {}
        for kind in KINDS:
            with console.status(f"{model}: starting {kind}"):
                servers[kind] = started(stack, kind, original, folder)
        for way in WAYS:
            seconds[way] = {kind: [] for kind in KINDS}
            for repeat in range(-1, repeats):  # the first warms up
                for kind in KINDS if repeat % 2 else reversed(KINDS):
                    took = renew(servers[kind], way, other) if way != "running" else renew_amid(servers[kind], other)
                    renew(servers[kind], "sync", original)
                    if repeat >= 0:
                        seconds[way][kind].append(took)
    size_mb = sum(file.stat().st_size for file in original.glob("*.safetensors")) / 1e6
    ratios = {way: median([ours / stock for stock, ours in zip(*seconds[way].values(), strict=True)]) for way in WAYS}
    row = {"model": model, "size_mb": size_mb, "ratios": ratios, "seconds": seconds}
    show(row, console)
    return row


def started(stack: ExitStack, kind: str, model: Path, folder: Path) -> ServerProcess:
    flags = [*server_flags(NUM_RUNNING + 1), "--served-model-name", "model", "--dtype", "float32"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = server_process(kind, str(model), flags, folder / f"{kind}.log", **environment)
    stack.enter_context(server)
    server.wait_until_healthy(lambda seconds, line: None)
    return server


def save(weights: Path, place: Path) -> float:
    from safetensors.torch import load_file, save_file

    (file,) = weights.glob("*.safetensors")
    tensors = load_file(file)
    began = time.perf_counter()
    save_file(tensors, place)
    return time.perf_counter() - began


def renew(server: ServerProcess, way: str, folder: Path) -> float:
    """Seconds to the end of it. Raises: RuntimeError when the server does not answer with the folder's weights."""
    with httpx.Client(base_url=server.url, timeout=LIMIT_S, trust_env=False) as http:
        before = greedy(http)
        began = time.perf_counter()
        if way == "sync":
            http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        http.post("/collective_rpc", json=load).raise_for_status()
        if way == "sync":
            http.post("/reset_prefix_cache").raise_for_status()
            http.post("/resume").raise_for_status()
        took = time.perf_counter() - began
        if way == "load":
            http.post("/reset_prefix_cache").raise_for_status()
        if greedy(http) == before:
            raise RuntimeError(f"{server.url} answers as before it was given {folder}")
    return took


def renew_amid(server: ServerProcess, folder: Path) -> float:
    with answers_on_their_way(server):
        return renew(server, "sync", folder)


@contextmanager
def answers_on_their_way(server: ServerProcess) -> Iterator[None]:
    """Dropped when the block ends."""
    body = {"model": "model", "prompt": [[5, 6, 7]], "n": NUM_RUNNING, "max_tokens": 1900, "ignore_eos": True}
    with (
        httpx.Client(base_url=server.url, timeout=LIMIT_S, trust_env=False) as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        next(answer.iter_lines())
        yield
    while counter(httpx.get(f"{server.url}/metrics", trust_env=False).text, "vllm:num_requests_running"):
        time.sleep(0.05)


def greedy(http: httpx.Client) -> list[int]:
    body = {"model": "model", "prompt": [[9, 8, 7, 6]], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return http.post("/v1/completions", json={**body, "ignore_eos": True}).json()["choices"][0]["token_ids"]


def show(row: dict[str, Any], console: Console) -> None:
    seconds = row["seconds"]
    title = f"{row['model']}, {row['size_mb']:.0f} MB: saved in {median(seconds['save']):.2f} s"
    table = Table("way", "stock", "ours", "ours / stock", title=title)
    for way in WAYS:
        stock, ours = (f"{median(seconds[way][kind]):.2f} s" for kind in KINDS)
        table.add_row(way, stock, ours, f"{row['ratios'][way]:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
