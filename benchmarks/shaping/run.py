"""Shaping the distribution of lengths (DARTS) on a real server: cost and result of each way, and the simulator's
prediction.

Every way wants M answers per prompt:

  uniform            n = M, wait for all: the baseline
  early_stop         1.5 M candidates, the first M to finish, the others are stopped
  dual_end           1.5 M candidates, the M - L shortest and the L longest, wait for all
  dual_end_patience  as dual_end, but the longest are awaited with patience
  pool               2 M candidates, dual-end, wait for all. Its lengths are the trace of the simulator
  auto               redundancy "auto", dual-end; prompts with an extreme tail return the shortest and stop early (DARTS
                     with tail pruning)
  auto_dual_end      the numbers of candidates of auto, dual-end for every prompt (without tail pruning): one request
                     per prompt, all at once
  auto_patience      auto with patience

Conditions. One server and one client run on this machine. All ways have the same prompts, temperature 1, and log
probabilities returned. The server first runs two epochs of the prompts (n = M, wait for all, with other seeds), so that
"auto" has a history of each prompt. This state is restored before every way, so that all ways decide from the same
history. Candidates have the same seeds in every way of a repeat, and each repeat has its own seeds. Ways take turns,
and each repeat starts with another way. Prompts are in the prefix cache before a way is timed. Ratios to uniform are
taken within a repeat, then their median. Mean, standard deviation and percentiles of lengths are over all returned
answers of a repeat, all groups together.

Simulator. Every way is replayed on the full lengths of the repeat's pool, "auto" from the server's own history, on a
clock that the profile drives. Its speed-up over uniform is compared with the measured one. The same seeds do not always
give the same answers in another batch. "lengths as in the pool" says how many candidates were as long as in the pool.

A profile must exist (--profile). Without one, this program prints the command that makes it. An interrupted run
continues where it stopped. Runs are logged in the folder beside the output, with every single length.

A first look, a minute on the tiny random model, whose numbers mean nothing:   python -m benchmarks.shaping --quick
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import long_run
from benchmarks.common import write_json
from benchmarks.shaping.measures import Runs, compare_with_simulation, row_of, summarize_ways
from benchmarks.shaping.picture import draw, tables
from benchmarks.shaping.records import Run
from benchmarks.shaping.runs import Bench, measure
from benchmarks.shaping.setup import TINY, WAY_NAMES, WAYS, Sizes, check
from benchmarks.shaping.simulation import history_of, simulate
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.config import CPU_BLOCK_SIZE_TOKENS
from vllm_rollout.parts.shaping.profile_file import Profile
from vllm_rollout.process import ServerProcess, runs_on_cpu, server_flags
from vllm_rollout.simulator.machine import Machine

NOTE = (
    "This is the rollout side only. The paper's speed-ups (DARTS Fig. 8, Tables 3 and 4) come from training with the "
    "shaped groups: the model learns to answer shortly, and its rollouts get faster. Here the model stays as it is; "
    "what is measured is what a group costs and what it is made of."
)
PROFILE = Path("benchmarks/results/ptl_profile.json")
QUICK: dict[str, Any] = {"model": TINY, "prompts": 6, "group_size": 4, "max_tokens": 128, "repeats": 2}


def main() -> None:
    def add(option: Any) -> None:
        option("--profile", type=Path, help=f"file of `vllm-rollout profile` (default {PROFILE}; with --quick none: "
               "the budget is then 1.5 times the wanted answers, and simulated times are in steps)")  # fmt: skip

    long_run.main("shaping", __doc__, Sizes, QUICK, run, tables, draw, add)


def run(arguments: argparse.Namespace, sizes: Sizes, console: Console) -> None:
    """Measure missing runs, and write the output."""
    check(sizes)
    if arguments.profile is None and not arguments.quick:
        arguments.profile = PROFILE
    profile = read_profile(arguments, sizes)
    folder = arguments.output.with_suffix("")
    if arguments.again:
        forget(folder)
    begun = begin(folder, sizes)
    flags = ["--rollout-record", str(folder / "trace.jsonl")]
    flags += [] if profile is None else ["--rollout-profile", str(arguments.profile)]
    log = long_run.RunLog(folder / "runs.jsonl", Run)

    async def measure_all(server: ServerProcess, client: AsyncRolloutClient, progressed: long_run.Progressed) -> None:
        await measure(Bench(sizes, folder, client, server.url, progressed, log))

    long_run.measure_missing(sizes, log, WAY_NAMES, flags, arguments, console, measure_all)
    told = None
    if profile is not None:
        told = {"file": str(arguments.profile), "model_name": profile.model_name, "created": profile.created}
        told["hardware"] = dict(profile.hardware)
    numbers = summarize(sizes, log, profile, (folder / "history.state").read_bytes())
    all_flags = [*server_flags(sizes.max_num_seqs), *flags, *shlex.split(arguments.server_args)]
    write_json(arguments.output, {**begun, "note": NOTE, "server_flags": all_flags, "profile": told, **numbers})
    console.print(f"written to {arguments.output}")


def read_profile(arguments: argparse.Namespace, sizes: Sizes) -> Profile | None:
    """The profile, or None for a quick look without one. Raises: ValueError with the command that makes one."""
    if arguments.profile is None:
        return None
    if not arguments.profile.exists():
        # from short prompts to long answers: mean contexts, in tokens, of what runs together
        contexts = sorted({64, max(128, sizes.max_tokens // 2), max(256, sizes.max_tokens)})
        raise ValueError(
            f"{arguments.profile} does not exist: redundancy auto and the simulator need to know what a step costs. "
            f"Make it with\n  vllm-rollout profile {sizes.model} --output {arguments.profile} --contexts "
            f"{','.join(map(str, contexts))} -- "
            f"{shlex.join([*server_flags(sizes.max_num_seqs), *shlex.split(arguments.server_args)])}"
        )
    return Profile.read(arguments.profile)


def forget(folder: Path) -> None:
    long_run.remove(folder, ("begun.json", "runs.jsonl", "history.state", "trace.jsonl"))


def begin(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The record of the run in this folder, which begins now or continues.

    Raises: ValueError if the run was begun with other sizes.
    """
    workload = {"ways": {name: asdict(way) for name, way in WAYS.items()}, "conditions": __doc__}
    return long_run.begin(folder, asdict(sizes), sizes.seed, workload, ("repeats",))


def summarize(sizes: Sizes, log: long_run.RunLog[Run], profile: Profile | None, state: bytes) -> dict[str, Any]:
    """The numbers of the result that follow from the runs."""
    repeats = list(range(sizes.repeats))
    runs: Runs = {(name, repeat): log[name, repeat] for repeat in repeats for name in WAY_NAMES}
    rows = [row_of(each, runs["pool", each.repeat]) for each in runs.values()]
    cost = None if profile is None else profile.cost()
    block_size = {"block_size": CPU_BLOCK_SIZE_TOKENS} if runs_on_cpu() else {}
    machine = Machine(cost, max_num_seqs=sizes.max_num_seqs, **block_size)
    where = "a step takes one unit of time" if profile is None else f"profile of {profile.model_name}"
    history = history_of(state)
    simulated = {repeat: simulate(sizes, runs["pool", repeat], machine, history) for repeat in repeats}
    simulated_rows, simulated_ways = compare_with_simulation(runs, simulated)
    return {
        "sizes": asdict(sizes),
        "repeats": repeats,
        "num_servers": len({each.server for each in runs.values()}),
        "history": [
            {"wall_s": each.wall_s, "generated_tokens": each.generated_tokens} for each in log if each.way == "history"
        ],
        "budget": runs["auto", 0].budget,
        "allocation": [
            {field: getattr(group, field) for field in ("prompt_id", "num_candidates", "weight", "std_tokens")}
            for group in runs["auto", 0].groups
        ],
        "ways": summarize_ways(rows),
        "simulation": {
            "machine": f"{where}, {sizes.max_num_seqs} candidates at once",
            "ways": simulated_ways,
            "rows": simulated_rows,
        },
        "measurements": rows,
        "returned_lengths": {
            name: sorted(length for repeat in repeats for length in runs[name, repeat].returned) for name in WAY_NAMES
        },
    }
