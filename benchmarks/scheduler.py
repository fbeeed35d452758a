"""What group bookkeeping costs vLLM's scheduler: no model, made-up tokens, running requests in groups of 16.

Two schedulers step in turn, stock and ours, so that a machine's change of speed hits both. In the steady part nothing
ends: this is the cost per step that a long rollout pays. In the ending part lengths differ and nothing is stopped early
(group_size = 16 of 16), so both do the same work and the difference is what endings cost.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time

from benchmarks.common import arguments_of, publish, record_of_run
from benchmarks.tables import columns, number
from tests.support.dry_run import DryRun
from vllm_rollout.adapter.core.scheduler import RolloutScheduler
from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.model_files import tiny

GROUP_SIZE = 16
TARGET_US = 0.3
"""Extra microseconds per tagged running request and step that we allow ourselves."""


def main() -> None:
    parser = arguments_of(__doc__, "scheduler")
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024, 4096], help="running requests")
    parser.add_argument("--steps", type=int, default=200, help="counted steps per size (default %(default)s)")
    args = parser.parse_args()
    workload = {
        "steady": f"all requests decode, none ends; {args.steps} steps of each in turn; groups of {GROUP_SIZE}",
        "ending": "output lengths uniform in [32, 256], every candidate runs to its own end",
        "target_us_per_request_and_step": TARGET_US,
    }
    record = record_of_run(seed=args.seed, workload=workload)
    with tempfile.TemporaryDirectory() as model:
        tiny(model)
        record["steady"] = [steady_row(model, num_running, args.steps) for num_running in args.running]
        record["ending"] = [ending_row(model, num_running, args.seed) for num_running in args.running]
    publish(args, record, tables)


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


def _dry_run(model: str, name: str, num_running: int) -> DryRun:
    from vllm.v1.core.sched.scheduler import Scheduler

    cls = Scheduler if name == "stock" else RolloutScheduler
    return DryRun(cls, model, max_num_seqs=num_running, num_blocks=num_running * 40 + 1000)


def _tag(i: int) -> dict:
    group = f"group-{i // GROUP_SIZE}"
    return CandidateTag(
        group, i % GROUP_SIZE, GroupTerms(GROUP_SIZE, GROUP_SIZE), OUTPUT_INTERVAL_TOKENS
    ).to_extra_args()


def tables(result: dict) -> str:
    steady = {
        "running": lambda row: number(row["num_running"]),
        "stock, us per step": lambda row: number(row["stock_us_per_step"], 0),
        "idle: extra": lambda row: f"{row['idle_extra_us_per_step']:+,.0f}",
        "tagged: extra": lambda row: f"{row['tagged_extra_us_per_step']:+,.0f}",
        "extra per request, us": lambda row: f"{row['tagged_extra_us_per_request']:+.2f}",
    }
    ending = {
        "requests": lambda row: number(row["num_requests"]),
        "extra per request and step, us": lambda row: f"{row['extra_us_per_request_and_step']:+.2f}",
        "messages, stock": lambda row: number(row["messages_stock"]),
        "messages, ours": lambda row: number(row["messages_tagged"]),
    }
    return columns("Nobody ends", result["steady"], steady) + "\n\n" + columns("With endings", result["ending"], ending)


if __name__ == "__main__":
    main()
