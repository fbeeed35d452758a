"""Accuracy of a profile of this machine: predicted against measured seconds of group rollouts.

First `vllm-rollout profile` measures the time of decode steps by batch size and context, and fits its curves. Then a
real server with the same flags runs group rollouts (no early stop, temperature 1, natural lengths).
`parts/shaping/rules/cost.py` predicts the seconds of each rollout from the lengths in its answer. The two are
independent: the profile has random prompts of fixed contexts only, the rollouts have chat prompts, batches that shrink
and contexts that grow. The server also gets the profile, and compares its own steps with it as they run.

For comparison there is the same prediction without contexts and prefill: Eq. 4 of DARTS as printed, on the curve of the
shortest context.

On a CPU the first core runs the model and the others the rest, for both (see benchmarks/overhead.py).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import ROOT, arguments_of, publish, record_of_run, server_process, started
from benchmarks.prompts import cycle
from benchmarks.tables import columns, number, percent, picture
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.on_cpu import this_cpu
from vllm_rollout.parts.shaping.profile_file import Profile
from vllm_rollout.parts.shaping.rules.cost import CostModel, computed_prompt_tokens, rollout_time
from vllm_rollout.process import MAX_BATCHED_TOKENS, ServerProcess, exit_on_sigterm, log_folder, runs_on_cpu
from vllm_rollout.profiling.grid import Wanted
from vllm_rollout.profiling.options import ProfileOptions
from vllm_rollout.profiling.picture import draw_size
from vllm_rollout.profiling.run import run as run_profile

MAX_NUM_SEQS = 64
FLAGS = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", "1024")
FLAGS += ("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS))
CPU_FLAGS = ("--enforce-eager", "--block-size", "32", "--dtype", this_cpu().dtype)
TARGET_ERROR = 0.10
"""Largest median error over workloads that counts as good."""
FILLER = "The harbour was quiet that morning, and the boats lay side by side at the old stone pier."
"""About 20 tokens, repeated in front of long prompts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of one rollout."""

    num_prompts: int
    group_size: int
    max_tokens: int
    filler: int = 0
    """Sentences in front of each prompt. With `mixed`, prompts have from 0 to this many."""
    mixed: bool = False


WORKLOADS = (
    Workload(1, 1, 384),
    Workload(1, 4, 256),
    Workload(1, 8, 512),
    Workload(2, 8, 256),
    Workload(4, 4, 384),
    Workload(4, 8, 256),
    Workload(8, 4, 128),
    Workload(2, 16, 512),
    Workload(8, 8, 192),
    Workload(1, 32, 256),
    Workload(4, 8, 256, filler=20),
    Workload(6, 8, 256, filler=24, mixed=True),
    Workload(2, 4, 512, filler=12),
    Workload(12, 8, 128),
)
"""The last workload has more candidates than run at once."""
QUICK = (Workload(1, 4, 64), Workload(4, 4, 96), Workload(2, 8, 64, filler=8))


def main() -> None:
    parser = arguments_of(__doc__, "ptl", plot=True)
    parser.set_defaults(seed=None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--profile", type=Path, default=ROOT / "benchmarks/results/ptl_profile.json")
    parser.add_argument("--keep-profile", action="store_true", help="use the existing profile")
    parser.add_argument("--quick", action="store_true", help="a quick profile and three small workloads")
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console(stderr=True)
    cores = sorted(os.sched_getaffinity(0))
    record = record_of_run(seed=args.seed, workload=[asdict(workload) for workload in _workloads(args)])
    if runs_on_cpu() and len(cores) > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[0])
        os.sched_setaffinity(0, cores[1:])
    flags = (*FLAGS, *(CPU_FLAGS if runs_on_cpu() else ()))
    if args.keep_profile:
        profile = Profile.read(args.profile)
    else:
        command = f"python -m benchmarks.ptl --model {args.model}"
        options = ProfileOptions(
            args.model, args.profile, Wanted(quick=args.quick), serve_flags=flags, restart=True, command=command
        )
        profile = run_profile(options, console)
    rows, drift = measure(args, flags, profile)
    numbers = {"summary": summarise(rows), "fits": [fit_row(fit) for fit in profile.fits], "live_over_profile": drift}
    told = {"profile": args.profile.name, "targets": {"median_error": TARGET_ERROR}}
    publish(args, {**record, **told, **numbers, "workloads": rows}, table, partial(draw, profile))


def _workloads(args: argparse.Namespace) -> Sequence[Workload]:
    return QUICK if args.quick else WORKLOADS


def measure(
    args: argparse.Namespace, flags: Sequence[str], profile: Profile
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row per workload, and the drift of the server's steps."""
    engine = profile.engine(1)
    assert engine is not None
    cost = replace(profile.cost(), max_num_seqs=MAX_NUM_SEQS)
    flags = [*flags, "--rollout-profile", str(args.profile)]
    rows = []
    with (
        log_folder() as logs,
        started(server_process("rollout", resolve(args.model), flags, logs / "server.log")) as server,
    ):
        roll_out(server, Workload(2, 2, 8), "warm-up", args.seed)
        for number, workload in enumerate(_workloads(args)):
            measured, answer = roll_out(server, workload, str(number), args.seed and args.seed + 1000 * number)
            rows.append(row_of(workload, measured, answer, cost, engine.block_size))
        return rows, drift_of(httpx.get(f"{server.url}/metrics", trust_env=False).text)


def drift_of(metrics: str) -> dict[str, float]:
    """The server's own drift of step times: measured time over the profile's, by range of batch sizes."""
    found = re.findall(r'^vllm_rollout:step_time_drift_ratio\{[^}]*"(\d+-\d+)"[^}]*\} (\S+)', metrics, re.MULTILINE)
    return {sizes: round(float(ratio), 3) for sizes, ratio in found}


def roll_out(server: ServerProcess, workload: Workload, name: str, seed: int | None) -> tuple[float, dict[str, Any]]:
    """Seconds and answer of one rollout. Every prompt is new, so the prefix cache has none of them."""
    prompts = []
    for i, question in enumerate(cycle(workload.num_prompts)):
        filler = workload.filler * i // max(1, workload.num_prompts - 1) if workload.mixed else workload.filler
        content = " ".join([f"({name}.{i})", *[FILLER] * filler, question])
        prompts.append({"id": str(i), "messages": [{"role": "user", "content": content}]})
    body = {
        "prompts": prompts,
        "group_size": workload.group_size,
        "early_stop": False,
        "sampling_params": {"temperature": 1.0, "max_tokens": workload.max_tokens, "seed": seed},
    }
    started = time.perf_counter()
    response = httpx.post(f"{server.url}/v1/rollouts", json=body, timeout=None, trust_env=False)
    seconds = time.perf_counter() - started
    response.raise_for_status()
    return seconds, response.json()


def row_of(
    workload: Workload, measured: float, answer: dict[str, Any], cost: CostModel, block_size: int
) -> dict[str, Any]:
    """A workload's measured seconds, and the seconds predicted from its lengths."""
    lengths, prompts, prefill = [], [], 0
    for group in answer["groups"]:
        candidates = [*group["trajectories"], *group["candidates"]]
        lengths += [candidate["num_tokens"] for candidate in candidates]
        num_prompt = len(group["prompt_token_ids"])
        prompts += [num_prompt] * len(candidates)
        prefill += computed_prompt_tokens(num_prompt, len(candidates), block_size)
    predicted = rollout_time(lengths, cost, prompts, prefill)
    as_printed = rollout_time(lengths, CostModel(cost.curves[:1], max_num_seqs=cost.max_num_seqs))
    return {
        **asdict(workload),
        "lengths": lengths,
        "mean_prompt_tokens": round(statistics.fmean(prompts), 1),
        "measured_s": round(measured, 4),
        "predicted_s": round(predicted, 4),
        "error": round(predicted / measured - 1, 4),
        "eq4_as_printed_s": round(as_printed, 4),
        "eq4_as_printed_error": round(as_printed / measured - 1, 4),
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def of(name: str) -> dict[str, float]:
        errors = [abs(row[name]) for row in rows]
        return {"median": round(statistics.median(errors), 4), "largest": round(max(errors), 4)}

    errors = of("error")
    return {
        "num_workloads": len(rows),
        "error": errors,
        "eq4_as_printed_error": of("eq4_as_printed_error"),
        "target_met": errors["median"] <= TARGET_ERROR,
    }


def fit_row(fit) -> dict[str, Any]:
    return {
        "context_tokens": round(fit.mean_context_tokens),
        "breakpoints": [round(size, 2) for size in fit.batch_sizes[1:-1]],
        "r_squared": round(fit.r_squared, 5),
        "median_left_out_error": fit.median_left_out_error and round(fit.median_left_out_error, 4),
    }


def table(result: dict[str, Any]) -> str:
    summary = result["summary"]
    rows = columns(
        "Seconds of group rollouts, predicted from their lengths",
        result["workloads"],
        {
            "prompts x size": lambda row: f"{row['num_prompts']} x {row['group_size']}",
            "cap": lambda row: str(row["max_tokens"]),
            "prompt": lambda row: number(row["mean_prompt_tokens"], 0),
            "longest": lambda row: str(max(row["lengths"])),
            "measured": lambda row: number(row["measured_s"], 2),
            "predicted": lambda row: number(row["predicted_s"], 2),
            "error": lambda row: percent(row["error"], 1),
            "Eq. 4 as printed": lambda row: percent(row["eq4_as_printed_error"], 1),
        },
    )
    return (
        f"{rows}\n\nMedian error {percent(summary['error']['median'], 1)} (target {percent(TARGET_ERROR)}), largest "
        f"{percent(summary['error']['largest'], 1)}; Eq. 4 as printed "
        f"{percent(summary['eq4_as_printed_error']['median'], 1)}."
    )


def draw(profile: Profile, result: dict[str, Any], path: Path) -> None:
    """Left, middle: the profile. Right: predicted against measured seconds."""
    rows, summary = result["workloads"], result["summary"]
    with picture(path, (17, 5), (1, 1, 1), 2) as (times, speeds, scatter):
        draw_size(times, speeds, profile, 1)
        measured = [row["measured_s"] for row in rows]
        ends = (0.8 * min(measured), 1.25 * max(measured))
        scatter.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], alpha=0.15, lw=0, label="±10%")
        for name, error, label in (
            ("eq4_as_printed_s", "eq4_as_printed_error", "Eq. 4 as printed"),
            ("predicted_s", "error", "with contexts and prefill"),
        ):
            values = [row[name] for row in rows]
            scatter.plot(measured, values, "o", label=f"{label}, median error {percent(summary[error]['median'], 1)}")
        scatter.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        scatter.tick_params(which="minor", labelbottom=False, labelleft=False)
        scatter.set_title("group rollouts on a real server", loc="left", weight="bold")
        scatter.set(xlabel="measured, s", ylabel="predicted from the lengths, s")
        scatter.legend(loc="upper left", frameon=False)


if __name__ == "__main__":
    main()
