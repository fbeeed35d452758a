"""What vLLM's synchronous loop, which drafts need, takes longer than its asynchronous one. No drafts are made.

Two servers on the emulated device of examples/emulate_7b.json, one with --async-scheduling and one with
--no-async-scheduling, get the same rollouts in turns: one group that is waited for, lengths log-normal with a mean of
400 and sigma 0.5, cap 1,000. The device knows no model runner: what shows is the host's time between two steps, which
the asynchronous loop hides behind the device. Seconds are those of steps, without HTTP before the first one.

Seconds: median over repeats of the paired ratio, synchronous by asynchronous, and its range; other work on this host is
in them. Typical step: the same ratio of a step and the median wait before it, in which other work is hardly seen.

Run from the repository root: python -m benchmarks.synchronous
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, arguments_of, emulated_process, in_turn, median, publish, record_of_run, started
from benchmarks.tables import Row, columns, number
from vllm_rollout import RolloutClient
from vllm_rollout.emulation.fate import LENGTHS_FIELD
from vllm_rollout.emulation.step_log import Summary, read_steps

LOOPS = {"asynchronous": "--async-scheduling", "synchronous": "--no-async-scheduling"}
MEAN_TOKENS, SIGMA, MAX_TOKENS = 400, 0.5, 1000


def main() -> None:
    parser = arguments_of(__doc__, "synchronous", repeats=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256], help="candidates (default %(default)s)")
    parser.add_argument("--speed", type=float, default=1.0, help="--emulate-speed; default %(default)s")
    arguments = parser.parse_args()
    device = json.loads((ROOT / "examples/emulate_7b.json").read_text())
    workload = {"conditions": __doc__, "device": device, "repeats": arguments.repeats, "speed": arguments.speed}
    result = record_of_run(seed=arguments.seed, workload=workload) | {"runs": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        clients = {}
        for loop, flag in LOOPS.items():
            folder = Path(name) / loop
            folder.mkdir()
            flags = [flag, "--emulate-log", str(folder), "--emulate-speed", str(arguments.speed)]
            flags += ["--max-model-len", str(2 * MAX_TOKENS), "--max-num-seqs", str(max(arguments.sizes))]
            server = stack.enter_context(started(emulated_process(device, flags, folder)))
            clients[loop] = stack.enter_context(RolloutClient(server.url))
        for repeat in range(-1, arguments.repeats):  # the first one warms up
            for size in arguments.sizes:
                run: dict[str, Any] = {"candidates": size, "repeat": repeat}
                for loop in in_turn(list(LOOPS), repeat % 2):
                    seed = arguments.seed + repeat
                    run[loop] = measured(clients[loop], Path(name) / loop, size, seed)
                result["runs"] += [run] if repeat >= 0 else []
    publish(arguments, result, tables)


def measured(client: RolloutClient, folder: Path, size: int, seed: int) -> dict[str, Any]:
    chance = random.Random(f"synchronous/{seed}/{size}")
    drawn = [MEAN_TOKENS * chance.lognormvariate(-(SIGMA**2) / 2, SIGMA) for _ in range(size)]
    lengths = [max(1, min(MAX_TOKENS, round(length))) for length in drawn]
    prompt = [chance.randrange(100, 40_000) for _ in range(100)]
    sampling = {"max_tokens": MAX_TOKENS, "extra_args": {LENGTHS_FIELD: lengths}}
    began = time.perf_counter()
    client.rollout([{"id": "prompt", "prompt_token_ids": prompt}], size, sampling=sampling)
    steps = [step for step in read_steps(folder)[0].steps if step.launched >= began]
    waits = [max(0.0, step.start - before.end) for before, step in pairwise(steps) if step.goes_on]
    summary = Summary.of(steps)
    return {
        "seconds": summary.wall_s,
        "client_s": time.perf_counter() - began,
        "steps": summary.num_steps,
        "tokens": summary.num_sampled,
        "device_ms": summary.device_ms,
        "waits_ms": 1e3 * median(waits),
        "host_cpu_ms": summary.host_ms,
    }


def tables(result: dict[str, Any]) -> str:
    sizes = sorted({run["candidates"] for run in result["runs"]})
    rows = [{"size": size, "runs": [run for run in result["runs"] if run["candidates"] == size]} for size in sizes]

    def ratio(row: Row, *fields: str) -> str:
        its = [
            sum(run["synchronous"][field] for field in fields) / sum(run["asynchronous"][field] for field in fields)
            for run in row["runs"]
        ]
        return f"{median(its):.3f} ({min(its):.3f} to {max(its):.3f})"

    def middle(row: Row, loop: str, field: str) -> str:
        return number(median(run[loop][field] for run in row["runs"]), 2)

    return columns("The synchronous loop by the asynchronous one", rows, {
        "candidates": lambda row: number(row["size"]),
        "seconds": lambda row: ratio(row, "seconds"),
        "typical step": lambda row: ratio(row, "device_ms", "waits_ms"),
        "device, ms a step": lambda row: middle(row, "synchronous", "device_ms"),
        "it waits for the host, ms": lambda row: middle(row, "synchronous", "waits_ms"),
        "asynchronous": lambda row: middle(row, "asynchronous", "waits_ms"),
        "CPU of the host, ms a step": lambda row: middle(row, "synchronous", "host_cpu_ms"),
    })  # fmt: skip


if __name__ == "__main__":
    main()
