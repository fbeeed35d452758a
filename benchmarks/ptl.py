"""A profile made on this machine, and how well it predicts: predicted against measured seconds of group rollouts.

First `vllm-rollout profile` measures the time of decode steps by batch size and context, and fits its curves. Then a
real server with the same flags runs group rollouts (no early stop, temperature 1, lengths as they come), and
`group/cost.py` predicts the seconds of each from the lengths in its answer. Neither sees the other: the profile knows
random prompts of fixed contexts only, the rollouts have chat prompts, batches that shrink and contexts that grow. The
server is given the profile, too, and compares its own steps with it as they run.

The same prediction without contexts and prefill is there for comparison: Eq. 4 of DARTS as printed, on the curve of the
shortest context.

On a CPU the first core is the model's, the others run the rest, for both (see benchmarks/overhead.py).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.common import record_of_run, server_process, write_json
from benchmarks.prompts import cycle
from vllm_rollout.group.cost import CostModel, computed_prompt_tokens, rollout_time
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import MAX_BATCHED_TOKENS, ServerProcess, exit_on_sigterm, runs_on_cpu
from vllm_rollout.profiling.grid import Wanted
from vllm_rollout.profiling.options import Options
from vllm_rollout.profiling.picture import CONTEXT_COLORS, FAINT, INK, STYLE, draw_size
from vllm_rollout.profiling.profile_file import Profile
from vllm_rollout.profiling.run import run as run_profile

MAX_NUM_SEQS = 64
FLAGS = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", "1024")
FLAGS += ("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS))
CPU_FLAGS = ("--enforce-eager", "--block-size", "32")
TARGET_ERROR = 0.10
"""Median over workloads."""
FILLER = "The harbour was quiet that morning, and the boats lay side by side at the old stone pier."
"""About 20 tokens, repeated in front of long prompts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One rollout."""

    num_prompts: int
    group_size: int
    max_tokens: int
    filler: int = 0
    """Sentences in front of each prompt; a list of prompts of mixed length gets 0 to this many."""
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
"""The last one has more candidates than run at once."""
QUICK = (Workload(1, 4, 64), Workload(4, 4, 96), Workload(2, 8, 64, filler=8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--profile", type=Path, default=Path("benchmarks/results/ptl_profile.json"))
    parser.add_argument("--keep-profile", action="store_true", help="use the profile that is there")
    parser.add_argument("--seed", type=int, help="of the sampling; default: none")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/ptl.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/ptl.png"))
    parser.add_argument("--quick", action="store_true", help="a quick profile and three small workloads")
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console()
    cores = sorted(os.sched_getaffinity(0))
    record = record_of_run(seed=args.seed, workload=[asdict(workload) for workload in _workloads(args)])
    if runs_on_cpu() and len(cores) > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[0])
        os.sched_setaffinity(0, cores[1:])
    flags = (*FLAGS, *(CPU_FLAGS if runs_on_cpu() else ()))
    if args.keep_profile:
        profile = Profile.read(args.profile)
    else:
        options = Options(
            model=args.model,
            output=args.profile,
            wanted=Wanted(quick=args.quick),
            serve_flags=flags,
            restart=True,
            command=f"python -m benchmarks.ptl --model {args.model}",
        )
        profile = run_profile(options, console)
    rows, drift = measure(args, flags, profile, console)
    summary = summarise(rows)
    show(rows, summary, console)
    write_json(
        args.output,
        {**record, "profile": args.profile.name, "targets": {"median_error": TARGET_ERROR}, "summary": summary,
         "fits": [fit_row(fit) for fit in profile.fits], "live_over_profile": drift, "workloads": rows},
    )  # fmt: skip
    draw(profile, rows, summary, args.picture)
    console.print(f"written to {args.output} and {args.picture}")


def _workloads(args: argparse.Namespace) -> Sequence[Workload]:
    return QUICK if args.quick else WORKLOADS


def measure(
    args: argparse.Namespace, flags: Sequence[str], profile: Profile, console: Console
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row per workload, and the drift of the server's steps."""
    workloads, seed = _workloads(args), args.seed
    engine = profile.engine(1)
    assert engine is not None
    cost = replace(profile.cost(), max_num_seqs=MAX_NUM_SEQS)
    rows = []
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        flags = [*flags, "--rollout-profile", str(args.profile)]
        server = stack.enter_context(server_process("rollout", resolve(args.model), flags, log))
        with console.status("the server starts"):
            server.wait_until_healthy(lambda seconds, line: None)
        roll_out(server, Workload(2, 2, 8), "warm-up", seed)
        progress = stack.enter_context(Progress(console=console))
        task = progress.add_task("rollouts", total=len(workloads))
        for number, workload in enumerate(workloads):
            measured, answer = roll_out(server, workload, str(number), seed and seed + 1000 * number)
            rows.append(row_of(workload, measured, answer, cost, engine.block_size))
            progress.advance(task)
        return rows, drift_of(httpx.get(f"{server.url}/metrics", trust_env=False).text)


def drift_of(metrics: str) -> dict[str, float]:
    """What the server itself says of its steps: live time over the profile's, by range of batch sizes."""
    found = re.findall(r'^vllm_rollout:step_time_drift\{[^}]*"(\d+-\d+)"[^}]*\} (\S+)', metrics, re.MULTILINE)
    return {sizes: round(float(ratio), 3) for sizes, ratio in found}


def roll_out(server: ServerProcess, workload: Workload, name: str, seed: int | None) -> tuple[float, dict[str, Any]]:
    """Seconds and answer of one rollout. Every prompt is new, so that none is in the prefix cache."""
    prompts = []
    for i, question in enumerate(cycle(workload.num_prompts)):
        filler = workload.filler * i // max(1, workload.num_prompts - 1) if workload.mixed else workload.filler
        content = " ".join([f"({name}.{i})", *[FILLER] * filler, question])
        prompts.append({"id": str(i), "messages": [{"role": "user", "content": content}]})
    body = {
        "prompts": prompts,
        "group_size": workload.group_size,
        "early_stop": False,
        "sampling": {"temperature": 1.0, "max_tokens": workload.max_tokens, "seed": seed},
    }
    started = time.perf_counter()
    response = httpx.post(f"{server.url}/v1/rollouts", json=body, timeout=None, trust_env=False)
    seconds = time.perf_counter() - started
    response.raise_for_status()
    return seconds, response.json()


def row_of(
    workload: Workload, measured: float, answer: dict[str, Any], cost: CostModel, block_size: int
) -> dict[str, Any]:
    """What was measured and what is predicted from the lengths."""
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


def show(rows: Sequence[dict[str, Any]], summary: dict[str, Any], console: Console) -> None:
    table = Table(title="Seconds of group rollouts, predicted from their lengths")
    names = ("prompts x size", "cap", "prompt", "longest", "measured", "predicted", "error", "Eq. 4 as printed")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['num_prompts']} x {row['group_size']}", str(row["max_tokens"]), f"{row['mean_prompt_tokens']:.0f}",
            str(max(row["lengths"])), f"{row['measured_s']:.2f}", f"{row['predicted_s']:.2f}", f"{row['error']:+.1%}",
            f"{row['eq4_as_printed_error']:+.1%}",
        )  # fmt: skip
    table.caption = (
        f"median error {summary['error']['median']:.1%} (target {TARGET_ERROR:.0%}), largest "
        f"{summary['error']['largest']:.1%}; Eq. 4 as printed {summary['eq4_as_printed_error']['median']:.1%}"
    )
    console.print(table)


def draw(profile: Profile, rows: Sequence[dict[str, Any]], summary: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, (times, speeds, scatter) = plt.subplots(1, 3, figsize=(17, 5.6), dpi=110, facecolor="white")
        figure.subplots_adjust(left=0.045, right=0.985, top=0.8, bottom=0.11, wspace=0.2)
        figure.text(
            0.015, 0.93, f"From the profile, {summary['num_workloads']} real rollouts are predicted with a median "
            f"error of {summary['error']['median']:.1%}", size=18, weight="bold",
        )  # fmt: skip
        figure.text(
            0.015, 0.878, f"{Path(profile.model_name).name}, {profile.hardware['device']}, "
            f"{profile.hardware['num_cpus']} CPUs, vLLM {profile.versions['vllm']}, {' '.join(profile.serve_flags)}",
            size=10,
        )  # fmt: skip
        draw_size(times, speeds, profile, 1)
        measured = [row["measured_s"] for row in rows]
        low, high = 0.8 * min(measured), 1.25 * max(measured)
        scatter.fill_between(
            [low, high], [low * 0.9, high * 0.9], [low * 1.1, high * 1.1], color=FAINT, alpha=0.5, lw=0, label="±10%"
        )
        scatter.plot([low, high], [low, high], color=INK, lw=1, ls=(0, (3, 2)))
        plain = [row["eq4_as_printed_s"] for row in rows]
        scatter.plot(
            measured, plain, "o", ms=6, mfc="white", mec="#94a3b8",
            label=f"Eq. 4 as printed, median error {summary['eq4_as_printed_error']['median']:.0%}",
        )  # fmt: skip
        scatter.plot(
            measured, [row["predicted_s"] for row in rows], "o", ms=7, color=CONTEXT_COLORS[0],
            label=f"with contexts and prefill, {summary['error']['median']:.1%}",
        )  # fmt: skip
        scatter.set_xscale("log")
        scatter.set_yscale("log")
        scatter.set_xlim(low, high)
        scatter.set_ylim(low, high)
        for axis in (scatter.xaxis, scatter.yaxis):
            axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
            axis.set_minor_locator(matplotlib.ticker.NullLocator())
        scatter.set_title("group rollouts on a real server", loc="left", weight="bold", fontsize=11)
        scatter.set_xlabel("measured, s")
        scatter.set_ylabel("predicted from the lengths, s")
        scatter.legend(loc="upper left", frameon=False)
        for side in ("top", "right"):
            scatter.spines[side].set_visible(False)
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    main()
