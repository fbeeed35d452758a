"""Shaping the distribution of lengths (DARTS) on a real server: what each way costs, what it returns, and whether the
simulator would have told.

Every way wants M answers per prompt:

  uniform            n = M, wait for all: the baseline
  early_stop         1.5 M candidates, the first M to finish, the others are stopped
  dual_end           1.5 M candidates, the M - L shortest and the L longest, wait for all
  dual_end_patience  the same, but the longest are waited for with patience
  pool               2 M candidates, dual-end, wait for all. Its lengths are the trace of the simulator
  auto               redundancy "auto", dual-end; prompts with an extreme tail return the shortest and stop early (DARTS
                     with tail pruning)
  auto_dual_end      the same numbers of candidates, dual-end for everybody (without tail pruning): one request per
                     prompt, all at once
  auto_patience      auto with patience

Conditions. One server, one client, both on this machine, the same prompts, temperature 1, log probabilities returned.
The server first sees two epochs of the prompts (n = M, wait for all, seeds of their own), so that "auto" knows each
prompt. This state is put back before every way: all decide from the same history. Candidates have the same seeds in
every way of a repeat, and a repeat has seeds of its own. Ways take turns, who begins rotates; prompts are in the prefix
cache before a way is timed. Ratios are taken within a repeat against uniform, then their median. The lengths of all
groups count together: mean, standard deviation and percentiles are over all returned answers of a repeat.

L:K. What the engine does with dual-end does not depend on L, so other ratios are selected again from the recorded
pools: at 1.5 M from candidates 0 to 1.5 M - 1 of the pool, at 2 M from all.

Simulator. Every way is replayed on the full lengths of the repeat's pool, "auto" from the server's own history, on a
clock that the profile drives; its speed-up over uniform stands against the measured one. Same seeds do not always make
the same answers in another batch: "lengths as in the pool" says how many candidates were as long as there.

A profile has to be there first (--profile); this program says how to make one. An interrupted run goes on where it
stopped. Runs are logged in the folder beside the output, single lengths with them.

A first look, a minute on the tiny random model, whose numbers mean nothing:   python -m benchmarks.shaping --quick
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from benchmarks import long_run
from benchmarks.common import write_json
from benchmarks.shaping.measures import (
    Runs,
    compare_with_simulation,
    row_of,
    select_again,
    summarize_ways,
    targets,
)
from benchmarks.shaping.picture import described_machine, draw, tables
from benchmarks.shaping.records import Log
from benchmarks.shaping.runs import Bench, measure
from benchmarks.shaping.setup import TINY, WAY_NAMES, WAYS, Sizes, check
from benchmarks.shaping.simulation import history_of, simulate
from vllm_rollout.config import CPU_BLOCK_SIZE_TOKENS, DEFAULT_TRADEOFF
from vllm_rollout.models import DEFAULT_MODEL
from vllm_rollout.process import ServerProcess, runs_on_cpu, server_flags
from vllm_rollout.profiling.profile_file import Profile
from vllm_rollout.simulator.machine import Machine

NOTE = (
    "This is the rollout side only. The paper's speed-ups (DARTS Fig. 8, Tables 3 and 4) come from training with the "
    "shaped groups: the model learns to answer shortly, and its rollouts get faster. Here the model stays as it is; "
    "what is measured is what a group costs and what it is made of."
)
PROFILE = Path("benchmarks/results/ptl_profile.json")
QUICK: dict[str, Any] = {
    "model": TINY,
    "prompts": 6,
    "group_size": 4,
    "max_tokens": 128,
    "repeats": 2,
}


def main() -> None:
    arguments = parse_arguments()
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in fields(Sizes)})

    def measure_missing(console: Console) -> None:
        check(sizes)
        run(arguments, sizes, console)

    long_run.main("shaping", arguments, measure_missing, tables, draw)


def run(arguments: argparse.Namespace, sizes: Sizes, console: Console) -> None:
    """Measure what is missing, and write the output."""
    profile = read_profile(arguments, sizes)
    folder = arguments.output.with_suffix("")
    if arguments.again:
        forget(folder)
    begun = begin(folder, sizes)
    flags = flags_of(arguments, folder)
    log = Log(folder / "runs.jsonl")
    if any((name, repeat) not in log for repeat in range(sizes.repeats) for name in WAY_NAMES):
        with (
            long_run.running_server(sizes.model, sizes.max_num_seqs, flags, arguments.server_args, console) as server,
            long_run.progress(console) as progressed,
        ):
            uvloop.run(_measure(sizes, folder, log, server, progressed))
    told = None if profile is None else {"file": str(arguments.profile), **_told(profile)}
    numbers = summarize(sizes, log, profile, (folder / "history.state").read_bytes())
    all_flags = [*server_flags(sizes.max_num_seqs), *flags, *shlex.split(arguments.server_args)]
    write_json(arguments.output, {**begun, "note": NOTE, "server_flags": all_flags, "profile": told, **numbers})
    console.print(f"written to {arguments.output}")


async def _measure(
    sizes: Sizes, folder: Path, log: Log, server: ServerProcess, progressed: long_run.Progressed
) -> None:
    async with long_run.client_of(server) as client:
        await measure(Bench(sizes, folder, client, server.url, progressed, log, log.num_servers))


def read_profile(arguments: argparse.Namespace, sizes: Sizes) -> Profile | None:
    """Raises: ValueError that says how to make one. None for a quick look without one."""
    if arguments.profile is None:
        return None
    if not arguments.profile.exists():
        raise ValueError(
            f"{arguments.profile} does not exist: redundancy auto and the simulator need to know what a step costs. "
            f"Make it with\n  vllm-rollout profile {sizes.model} --output {arguments.profile} --contexts "
            f"{','.join(map(str, contexts(sizes)))} -- "
            f"{shlex.join([*server_flags(sizes.max_num_seqs), *shlex.split(arguments.server_args)])}"
        )
    return Profile.read(arguments.profile)


def contexts(sizes: Sizes) -> list[int]:
    """In tokens, from short prompts to long answers: mean contexts of what runs together."""
    return sorted({64, max(128, sizes.max_tokens // 2), max(256, sizes.max_tokens)})


def forget(folder: Path) -> None:
    long_run.remove(folder, ("begun.json", "runs.jsonl", "history.state", "trace.jsonl"))


def begin(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The record of the run in this folder, which now begins or goes on.

    Raises: ValueError when it was begun with other sizes.
    """
    workload = {"ways": {name: asdict(way) for name, way in WAYS.items()}, "conditions": __doc__}
    return long_run.begin(folder, asdict(sizes), sizes.seed, workload, ("repeats",))


def flags_of(arguments: argparse.Namespace, folder: Path) -> list[str]:
    profile = [] if arguments.profile is None else ["--rollout-profile", str(arguments.profile)]
    return ["--rollout-record", str(folder / "trace.jsonl"), *profile]


def summarize(sizes: Sizes, log: Log, profile: Profile | None, state: bytes) -> dict[str, Any]:
    """Everything that follows from the runs."""
    repeats = list(range(sizes.repeats))
    runs: Runs = {(name, repeat): log[name, repeat] for repeat in repeats for name in WAY_NAMES}
    rows = [row_of(each, runs["pool", each.repeat]) for each in runs.values()]
    cost = None if profile is None else profile.cost()
    machine = Machine(cost, max_num_seqs=sizes.max_num_seqs, **_block_size())
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
        "selected_again": select_again(sizes, runs, repeats),
        "simulation": {
            "machine": described_machine(None if profile is None else profile.model_name, sizes.max_num_seqs),
            "ways": simulated_ways,
            "rows": simulated_rows,
        },
        "targets": [] if profile is None else targets(simulated_ways),
        "measurements": rows,
        "returned_lengths": {name: _returned(runs[name, repeat].returned for repeat in repeats) for name in WAY_NAMES},
    }


def _returned(parts: Iterable[list[int]]) -> list[int]:
    return sorted(length for part in parts for length in part)


def _block_size() -> dict[str, int]:
    return {"block_size": CPU_BLOCK_SIZE_TOKENS} if runs_on_cpu() else {}


def _told(profile: Profile) -> Mapping[str, Any]:
    return {"model_name": profile.model_name, "created": profile.created, "hardware": dict(profile.hardware)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shaping", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--profile", type=Path, help=f"what `vllm-rollout profile` wrote (default {PROFILE}; with --quick none: the "
        "budget is then 1.5 times what is wanted, and simulated times are in steps)")  # fmt: skip
    add("--again", action="store_true", help="forget earlier runs of this output")
    long_run.add_arguments(parser, "shaping")
    sizes = parser.add_argument_group("sizes; defaults are those of the recorded run")
    add = sizes.add_argument
    add("--model", default=DEFAULT_MODEL, help="a name of `vllm-rollout models list`, a Hugging Face name or a "
        "directory (default %(default)s)")  # fmt: skip
    add("--prompts", type=int, default=4, help="prompts, all at once (default %(default)s)")
    add("--group-size", type=int, default=8, help="M, answers per prompt (default %(default)s)")
    add("--max-tokens", type=int, default=512, help="length cap of an answer (default %(default)s)")
    add("--temperature", type=float, default=1.0, help="default %(default)s")
    add("--num-longest", type=int, default=1, help="L of every dual-end way (default %(default)s)")
    add("--patience", type=float, default=1.5, help="of the ways that have one (default %(default)s)")
    add("--tradeoff", type=float, default=DEFAULT_TRADEOFF, help="of redundancy auto (default %(default)s)")
    add("--epochs", type=int, default=2, help="of history before anything is measured (default %(default)s)")
    add("--repeats", type=int, default=4, help="repeats of every way (default %(default)s)")
    add("--seed", type=int, default=7, help="repeat r samples with seed + 1000 r (default %(default)s)")
    arguments = long_run.parse(parser, "shaping", QUICK)
    if arguments.profile is None and not arguments.quick:
        arguments.profile = PROFILE
    return arguments
