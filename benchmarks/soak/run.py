"""A server under all kinds of clients at once: no request or disconnect of one client may hurt another, or the engine.

One `vllm-rollout serve tiny-random` (64 candidates at once, dev endpoints, --rollout-state, --rollout-record) and 24
clients run. A client takes one act after the other, without a pause, of a kind drawn by weight. The draws are seeded
(their interleaving is not). Acts that generate are broken off within a second with probability 0.15. In brackets the
share of acts in %:

  rollout, messages (11)        POST /v1/rollouts: 1 to 4 prompts x 1 to 8 candidates, tokens, text, chat messages
  streamed, stream_tokens (17)  the same as events, with chunks of 1 to 100 tokens
  slow_reader, never_reads (6)  stream_tokens 1, read slowly; or not read at all, and closed within 3 s
  pruned, many_lengths (13)     rewards, some of them again, then contradicted; active and shadow; more detection
                                lengths than a server keeps
  large (1)                     60 prompts x 6 candidates, six times what the engine runs at once
  foreign_rewards (2)           for rollouts of others, for candidates and rollouts that do not exist, and bad numbers
  auto, dual_end (9)            redundancy "auto" with prompts that come back; patience
  choices (9)                   /v1/completions with n, rollout fields or none, streamed or not
  joined, colliding (8)         single requests that make up a group: siblings that never come; the same ids from two
                                clients, also with other sizes
  rounds (3)                    a run of four rounds, whose keys are sent again; states that are put remove runs
  named, long_names (3)         POST /v1/rewards; ids of up to a million characters, also wide ones
  votes, evil_votes (4)         also patterns that search for ever
  heads, states (5)             GET; PUT of an earlier answer: 30 % unchanged, the rest with bytes or numbers changed
  bad_bodies, open_path (6)     wrong fields, ranges and types, no JSON, nested too deeply; our fields on /invocations
  reports, pauses, resets (4)   report, metrics, health; /pause?mode=keep and /resume; /reset_prefix_cache

So 13 % of acts send something bad.

Invariants, of which each violation is counted and reported:

  answers      no status of 500 or above (503 neither), only statuses allowed for the request
  groups       complete, with exactly group_size trajectories (fewer only if allow_fewer says so), in order
  accounts     generated = returned + wasted, and both are the sums over the candidates; every candidate ends once
  identity     a client's own prompt ids and tokens come back, n choices for n
  streams      end with done, chunks join, and are the trajectories
  afterwards   the server answers a rollout, nothing runs or waits (vllm:num_requests_*), the engine holds no running
               group, and stops within a minute
  memory       RSS of all server processes grows by at most --max-growth-mib from after the warm-up to the end
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.common import arguments_of, publish, record_of_run, server_process
from benchmarks.soak.clients import DISCONNECT_SHARE, KINDS, Shared, SoakClient
from benchmarks.soak.memory import MemorySamples, growth_mib
from benchmarks.soak.tally import Tally
from benchmarks.tables import columns, number
from vllm_rollout.config import REPORT_INTERVAL_S
from vllm_rollout.models import resolve
from vllm_rollout.process import ServerError, counter, exit_on_sigterm, log_folder

MODEL = "tiny-random"
FLAGS = (
    "--enforce-eager",
    *("--max-model-len", "2048", "--max-num-seqs", "64", "--max-num-batched-tokens", "1024", "--dtype", "float32"),
    "--disable-uvicorn-access-log",
)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
NUM_CLIENTS = 24
MAX_GROWTH_MIB = 256.0
"""Limit for 10 minutes, in MiB. Rings and histories grow: they are bounded, but far above what a soak fills."""
IDLE_TIMEOUT_S = 60.0
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", 'vllm_rollout:groups_held{state="running"}')
"""Gauges that are 0 when nothing runs. Groups that wait for siblings which never come are kept on purpose."""
SHORTEST_FOR_MEMORY_S = 300.0
"""In a shorter soak growth is reported and not judged, because all of it is warm-up."""


def main() -> None:
    parser = arguments_of(__doc__, "soak", seed=1)
    add = parser.add_argument
    add("--seconds", type=float, default=600.0, help="time for which clients act (default: %(default)s)")
    add("--clients", type=int, default=NUM_CLIENTS, help="number of clients (default: %(default)s)")
    add("--max-growth-mib", type=float, default=MAX_GROWTH_MIB, help="limit of the server's growth in soaks from "
        f"{SHORTEST_FOR_MEMORY_S:g} s on (default: %(default)s)")  # fmt: skip
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of clients to run (default: all)")
    arguments = parser.parse_args()
    if arguments.seconds <= 0 or arguments.clients < 1:
        parser.error(f"--seconds and --clients must be positive, got {arguments.seconds:g} and {arguments.clients}")
    exit_on_sigterm()
    console = Console()
    with log_folder() as folder:
        try:
            result = soak(arguments, folder, console)
        except ServerError as error:
            sys.exit(str(error))
        if result["num_violations"]:
            kept = Path("soak-server.log")
            kept.write_bytes((folder / "server.log").read_bytes())
            console.print(f"[red]the server's log is in {kept}[/]")
    publish(arguments, result, table)
    sys.exit(1 if result["num_violations"] else 0)


def soak(arguments: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Run the soak. Returns its result as JSON. Raises: ServerError if the server does not start."""
    flags = [*FLAGS, "--rollout-state", str(folder / "state"), "--rollout-record", str(folder / "record.jsonl")]
    server = server_process("rollout", resolve(MODEL), flags, folder / "server.log", **ENVIRONMENT)
    weights = sum(KINDS[name].weight for name in arguments.kinds)
    workload = {
        "model": MODEL,
        "flags": list(FLAGS),
        "num_clients": arguments.clients,
        "seconds": arguments.seconds,
        "share_of_disconnects": DISCONNECT_SHARE,
        "share_of_bad_input": round(
            sum(KINDS[name].weight * KINDS[name].bad_share for name in arguments.kinds) / weights, 4
        ),
        "share_of_kinds": {name: round(KINDS[name].weight / weights, 4) for name in arguments.kinds},
    }
    record = record_of_run(seed=arguments.seed, workload=workload)
    tally, samples = Tally(), MemorySamples()
    with server:
        console.print(f"{MODEL}: ready after {server.wait_until_healthy(lambda *_: None):.0f} s")
        with suppress(ServerError):  # a dead server has been counted by every client
            asyncio.run(_soak(server.url, server.pid, arguments, tally, samples, console))
            server.check_alive()
        started = time.monotonic()
    stop_s = time.monotonic() - started
    log = (folder / "server.log").read_text(errors="replace")
    found = re.finditer(r"ERROR \S+ \S+ \[.*?\] (?!Traceback)(\w.*)", log)  # without the lines of tracebacks
    errors = Counter(re.sub(r"[0-9a-f]{16,}", "…", match[1][:200]) for match in found)
    growth = growth_mib(samples.total) if samples.total else 0.0
    if arguments.seconds >= SHORTEST_FOR_MEMORY_S and growth > arguments.max_growth_mib:
        tally.broken("memory", f"grew by {growth:.0f} MiB, at most {arguments.max_growth_mib:g} are allowed")
    memory = {
        "growth_mib": round(growth, 1),
        "max_growth_mib": arguments.max_growth_mib,
        "growth_by_process_mib": samples.growth_by_process,
        "total_mib": [round(mib) for mib in samples.total[:: max(1, len(samples.total) // 60)]],
    }
    ended = {"stop_s": round(stop_s, 1), "errors_in_log": dict(errors.most_common(10))}
    return {**record, **tally.as_json(), "memory": memory, "end": ended}


async def _soak(
    url: str, pid: int, arguments: argparse.Namespace, tally: Tally, samples: MemorySamples, console: Console
) -> None:
    shared = Shared(deque(maxlen=64))
    deadline = time.monotonic() + arguments.seconds
    clients = [
        SoakClient(f"c{i}", url, arguments.seed, tally, shared, arguments.kinds) for i in range(arguments.clients)
    ]

    def is_over() -> bool:
        return time.monotonic() >= deadline

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        shown = progress.add_task("soak", total=arguments.seconds, said="")

        async def show() -> None:
            while not is_over():
                said = f"{tally.totals['acts']} acts, {tally.num_violations} broken"
                progress.update(shown, completed=arguments.seconds - (deadline - time.monotonic()), said=said)
                await asyncio.sleep(0.5)

        await asyncio.gather(show(), samples.take(pid, is_over), *(client.run(is_over) for client in clients))
    await _check_end(url, tally)


async def _check_end(url: str, tally: Tally) -> None:
    """Check that nothing is left, and that the server still answers."""
    async with httpx.AsyncClient(base_url=url, timeout=IDLE_TIMEOUT_S, trust_env=False) as http:
        try:
            await http.post("/resume")
            await asyncio.sleep(REPORT_INTERVAL_S)  # gauges of ours may be as old as this
            deadline = time.monotonic() + IDLE_TIMEOUT_S
            while (left := await _left(http, tally)) and time.monotonic() < deadline:
                await asyncio.sleep(1.0)
            if left:
                tally.broken("end", f"{left} after {IDLE_TIMEOUT_S:.0f} s")
        except httpx.HTTPError as error:
            tally.broken("end", repr(error))


async def _left(http: httpx.AsyncClient, tally: Tally) -> dict[str, float]:
    """Gauges of HELD that are not 0, by name."""
    body = {"prompts": [{"prompt": "hello"}], "group_size": 1, "sampling_params": {"max_tokens": 4}}
    answer = await http.post("/v1/rollouts", json=body)
    if answer.status_code != 200:
        tally.broken("end", f"a rollout was answered {answer.status_code}: {answer.text[:400]}")
    metrics = (await http.get("/metrics")).text
    return {name: value for name in HELD if (value := counter(metrics, name))}


def table(result: dict[str, Any]) -> str:
    cells = {
        "kind": lambda row: row["kind"],
        "acts": lambda row: number(row.get("acts")),
        "broken off": lambda row: number(row.get("disconnected")),
        "answers": lambda row: ", ".join(f"{status} x {n}" for status, n in row.items() if status.isdecimal()),
    }
    rows = [{**counts, "kind": kind} for kind, counts in result["by_kind"].items()]
    memory = result["memory"]
    said = [
        columns(f"{result['workload']['seconds']:g} s", rows, cells),
        f"Memory: {memory['growth_mib']:+.0f} MiB {memory['growth_by_process_mib']}.",
        *result["violations"],
        f"{result['num_acts']} acts, {result['num_violations']} invariants broken.",
    ]
    return "\n\n".join(said)
