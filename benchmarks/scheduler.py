"""What group bookkeeping costs vLLM's scheduler: no model, made-up tokens, running requests in groups of 16.

Two schedulers step in turn, stock and ours, so that a machine's change of speed hits both. In the steady part nothing
ends: this is the cost per step that a long rollout pays. In the ending part lengths differ and nothing is stopped early
(group_size = 16 of 16), so both do the same work and the difference is what endings cost. Pauses (benchmarks/pauses.py)
are what API processes ask of the engine core between two steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import record_of_run, write_json
from benchmarks.pauses import pauses
from tests.support.dry_run import DryRun
from vllm_rollout.adapter.core.scheduler import RolloutScheduler
from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.group.lifecycle import GroupTerms
from vllm_rollout.model_files import tiny

GROUP_SIZE = 16
TARGET_US = 0.3
"""Extra microseconds per tagged running request and step that we allow ourselves."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024, 4096], help="running requests")
    parser.add_argument("--steps", type=int, default=200, help="counted steps per size (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="runs of the pauses, of which the median counts")
    parser.add_argument(
        "--pauses-only", action="store_true", help="measure the pauses, and keep the rest of the output as it is"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/scheduler.json"))
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as model:
        tiny(model)
        paused = median_run([pauses(model, seed=args.seed) for _ in track(range(args.repeats), "pauses")])
        if args.pauses_only:
            record = json.loads(args.output.read_text())
            record["pauses"] = {**record.get("pauses", {}), "now": paused}
            write_json(args.output, record)
            show_pauses(record["pauses"])
            return
        steady = [steady_row(model, n, args.steps) for n in track(args.running, "steady, by size")]
        ending = [ending_row(model, n, args.seed) for n in track(args.running, "endings, by size")]

    record = record_of_run(
        seed=args.seed,
        workload={
            "steady": f"all requests decode, none ends; {args.steps} steps of each in turn; groups of {GROUP_SIZE}",
            "ending": "output lengths uniform in [32, 256], every candidate runs to its own end",
            "target_us_per_request_and_step": TARGET_US,
        },
    )
    record["steady"], record["ending"] = steady, ending
    before = json.loads(args.output.read_text()).get("pauses", {}) if args.output.exists() else {}
    record["pauses"] = {**before, "now": paused}
    write_json(args.output, record)
    show(steady, ending)
    show_pauses(record["pauses"])
    Console().print(f"written to {args.output}")


def steady_row(model: str, num_running: int, num_steps: int) -> dict:
    """Median time of one step with `num_running` requests, stock and ours, microseconds."""
    runs = {}
    for name in ("stock", "idle", "tagged"):
        runs[name] = _dry_run(model, name, num_running)
        for i in range(num_running):
            runs[name].add(f"r{i}", 10**6, max_tokens=4000, extra_args=_tag(i) if name == "tagged" else None)
        for _ in range(8):  # prefill, first outputs
            runs[name].step()
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    names = list(runs)
    for _ in range(num_steps):
        names.append(names.pop(0))  # who comes first finds a colder cache
        for name in names:
            run = runs[name]
            started = time.perf_counter()
            scheduled = run.scheduler.schedule()
            half = time.perf_counter()
            output = run.sample(scheduled)
            resumed = time.perf_counter()
            run.scheduler.update_from_output(scheduled, output)
            times[name].append((half - started + time.perf_counter() - resumed) * 1e6)
    gc.enable()
    row = {"num_running": num_running, "num_steps": num_steps}
    for name, values in times.items():
        row[f"{name}_us_per_step"] = statistics.median(values)
    for name in ("idle", "tagged"):
        extra = statistics.median(ours - stock for ours, stock in zip(times[name], times["stock"], strict=True))
        row[f"{name}_extra_us_per_step"] = extra
        row[f"{name}_extra_us_per_request"] = extra / num_running
    return row


def ending_row(model: str, num_running: int, seed: int) -> dict:
    """Time from the first step to the last with requests of different lengths, per request and step."""
    rng = random.Random(seed)
    lengths = [rng.randint(32, 256) for _ in range(num_running)]
    times: dict[str, list[float]] = {"stock": [], "tagged": []}
    messages, num_request_steps = {}, sum(lengths)
    for _ in range(3):
        for name in times:
            run = _dry_run(model, name, num_running)
            for i, length in enumerate(lengths):
                run.add(f"r{i}", length, extra_args=_tag(i) if name == "tagged" else None)
            gc.collect()
            gc.disable()
            started = time.perf_counter()
            run.run()
            times[name].append(time.perf_counter() - started)
            gc.enable()
            messages[name] = run.num_messages
    stock, tagged = (statistics.median(times[name]) for name in ("stock", "tagged"))
    return {
        "num_requests": num_running,
        "stock_s": stock,
        "tagged_s": tagged,
        "extra_us_per_request_and_step": (tagged - stock) / num_request_steps * 1e6,
        "messages_stock": messages["stock"],
        "messages_tagged": messages["tagged"],
    }


def median_run(runs: list[dict]) -> dict:
    """The run whose longest pause is the median one, and how long that was in the others."""
    ordered = sorted(runs, key=lambda run: run["pauses"]["longest_cpu_ms"])
    longest = [run["pauses"]["longest_cpu_ms"] for run in ordered]
    return {**ordered[len(ordered) // 2], "longest_pauses_cpu_ms": longest}


def _dry_run(model: str, name: str, num_running: int) -> DryRun:
    from vllm.v1.core.sched.scheduler import Scheduler

    cls = Scheduler if name == "stock" else RolloutScheduler
    return DryRun(cls, model, max_num_seqs=num_running, num_blocks=num_running * 40 + 1000)


def _tag(i: int) -> dict:
    group = f"group-{i // GROUP_SIZE}"
    return CandidateTag(
        group, i % GROUP_SIZE, GroupTerms(GROUP_SIZE, GROUP_SIZE), OUTPUT_INTERVAL_TOKENS
    ).to_extra_args()


def show(steady: list[dict], ending: list[dict]) -> None:
    table = Table("running", "stock us/step", "idle: extra", "tagged us/step", "tagged: extra", "extra per request, us")
    for row in steady:
        table.add_row(
            str(row["num_running"]),
            f"{row['stock_us_per_step']:.0f}",
            f"{row['idle_extra_us_per_step']:+.1f}",
            f"{row['tagged_us_per_step']:.0f}",
            f"{row['tagged_extra_us_per_step']:+.0f}",
            f"{row['tagged_extra_us_per_request']:+.3f}",
        )
    Console().print(table)
    table = Table("requests that end", "stock s", "tagged s", "extra per request and step, us", "messages", "ours")
    for row in ending:
        table.add_row(
            str(row["num_requests"]),
            f"{row['stock_s']:.2f}",
            f"{row['tagged_s']:.2f}",
            f"{row['extra_us_per_request_and_step']:+.3f}",
            str(row["messages_stock"]),
            str(row["messages_tagged"]),
        )
    Console().print(table)


def show_pauses(runs: dict) -> None:
    """`runs`: what is measured now, and what another commit took."""
    table = Table("between two steps", "calls", "longest, ms", "longest, CPU ms", "median, CPU ms", "all, CPU ms")
    for name, run in runs.items():
        for what, row in {"all calls": run["pauses"], **run["calls"]}.items():
            columns = ("longest_ms", "longest_cpu_ms", "median_cpu_ms", "total_cpu_ms")
            table.add_row(f"{name}: {what}", str(row["num"]), *(f"{row[column]:.1f}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
