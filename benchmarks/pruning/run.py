"""Pruning on a real model: the quality head learns through the HTTP rewards endpoint alone, and then prunes.

Phases run in this order. Each appends its results to the output JSON when it is done, and is then skipped. Single runs
are logged beside the output, so that an interrupted phase continues where it stopped:

  learn     groups in shadow mode (no candidate is stopped); every answer is checked and its reward posted. The learning
            curve uses prequential scores: a head that had not learned from the prompt gave each score
  evaluate  prompts without posted rewards, the head unchanged: AUC overall and within groups, Brier score,
            against three aggregates of trace confidence on the same candidates
  compare   groups of 16, half kept (allow_fewer): none pruned / at random / the paper's rule / the balance rule /
            the gradient rule, over the same prompts and seeds, in turns. rho_hat is the positive ratio of a group's
            survivors
  sweep     keep_ratio 0.25 to 1: tokens and seconds
  fewer     the baseline for pruning: groups of half as many candidates, none pruned, against whole groups, with
            prompts and seeds of compare; nothing learned is needed

Conditions. One server and one client run on this machine. Ways take turns over blocks of prompts, and each block starts
with another way. Ratios are medians over blocks of the ratio within a block. Prompts are in the prefix cache before a
way is timed. Candidates of a group have the same seeds in every way. benchmarks/tasks.py has problems and checker. No
question of the phases evaluate to fewer is a question of learn. Intervals are 90 %, bootstrapped over prompts.

A first look, two minutes on the tiny random model, whose numbers mean nothing:   python -m benchmarks.pruning --quick
Phase by phase:                              python -m benchmarks.pruning --phases learn
                                             python -m benchmarks.pruning --phases evaluate,compare
One phase again, with other sizes:           python -m benchmarks.pruning --phases compare --again --blocks 8
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from benchmarks import long_run
from benchmarks.common import record_of_run, write_json
from benchmarks.pruning.phases import RUN_PHASE, Bench, log_of
from benchmarks.pruning.picture import draw, tables
from benchmarks.pruning.results import summarize
from benchmarks.pruning.setup import LEARNING_SIZES, PHASES, TINY, Phase, Sizes
from vllm_rollout.process import ServerProcess

QUICK: dict[str, Any] = {"model": TINY, "max_tokens": 64, "detection_length": 8, "at_once": 32, "labels": 400}
QUICK |= {"evaluate_prompts": 16, "vote_prompts": 4, "vote_candidates": 16, "blocks": 2, "block_prompts": 2}
QUICK |= {"sweep_blocks": 2, "sweep_block_prompts": 2}


def main() -> None:
    def add(option: Any) -> None:
        option("--phases", default=PHASES, type=_phases, help="comma-separated, in the order above (default all). With "
               "--again they run even if the output has them, and learn then drops all others")  # fmt: skip

    long_run.main("pruning", __doc__, Sizes, QUICK, run, tables, draw, add)


def run(arguments: argparse.Namespace, sizes: Sizes, console: Console) -> None:
    for name in ("group_size", "learn_group_size", "vote_candidates"):
        if getattr(sizes, name) > sizes.at_once:
            raise ValueError(f"--{name.replace('_', '-')} must be at most --at-once ({sizes.at_once})")
    anew = arguments.again and "learn" in arguments.phases  # all others build on what was learned
    run_phases(arguments, sizes, load(arguments.output, sizes, anew), console)


def load(output: Path, sizes: Sizes, anew: bool = False) -> dict[str, Any]:
    """The existing record, or a new one. With a new record, logs beside it belong to another run and are removed.

    Raises: ValueError if the record was made with other sizes that matter.
    """
    work = output.with_suffix("")
    mine = json.loads(json.dumps(asdict(sizes)))
    if anew or not output.exists():
        forget(work, PHASES)
        return {**record_of_run(seed=sizes.seed, workload=__doc__), "sizes": mine, "phases": {}}
    result = json.loads(output.read_text())
    started = [phase for phase in PHASES if phase not in result["phases"] and (work / f"{phase}.jsonl").exists()]
    made_what = f"{output} was made with{f' and phase {started[0]} was begun with' if started else ''}"
    fields_that_matter = mine if started else LEARNING_SIZES
    long_run.check_same_sizes(result["sizes"], mine, fields_that_matter, made_what, "remove that one")
    return result | {"sizes": mine}


def run_phases(arguments: argparse.Namespace, sizes: Sizes, result: dict[str, Any], console: Console) -> None:
    """Run all phases that are asked for and missing, on one server, which continues with the learned state."""
    work = arguments.output.with_suffix("")
    if arguments.again:
        forget(work, arguments.phases)
        for phase in arguments.phases:
            result["phases"].pop(phase, None)
    todo = [phase for phase in arguments.phases if phase not in result["phases"]]
    for phase in arguments.phases:
        if phase not in todo:
            console.print(f"{phase}: in {arguments.output} already (--again makes it anew)")
    write_json(arguments.output, result)  # from here on it says which sizes the logs are of
    if not todo:
        return
    work.mkdir(parents=True, exist_ok=True)
    flags = ["--rollout-state", str(work / "server.state")]
    with long_run.running_server(arguments.model, arguments.at_once, flags, arguments.server_args, console) as server:
        for phase in todo:
            with long_run.progress(console) as progressed:
                what_server_says = uvloop.run(run_phase(phase, sizes, work, server, progressed))
            runs = {name: log_of(work, name).runs for name in PHASES}
            record = record_of_run(seed=sizes.seed, workload=None)
            made = {field: record[field] for field in ("command", "date", "git_commit", "hardware")}
            numbers = summarize(phase, sizes, runs)
            result["phases"][phase] = {"made": made, "sizes": asdict(sizes), **numbers, **what_server_says}
            write_json(arguments.output, result)
            console.print(f"{phase}: written to {arguments.output}")


async def run_phase(
    phase: Phase, sizes: Sizes, work: Path, server: ServerProcess, progressed: long_run.Progressed
) -> dict[str, Any]:
    async with long_run.client_of(server) as client:
        return await RUN_PHASE[phase](Bench(sizes, work, client, progressed))


def forget(work: Path, phases: Sequence[Phase]) -> None:
    """Remove the logs of these phases, and the state learned in them."""
    for phase in phases:
        learned = ("learned.state", "server.state") if phase == "learn" else ()
        long_run.remove(work, (f"{phase}.jsonl", *learned))


def _phases(text: str) -> list[Phase]:
    wanted = text.split(",")
    if unknown := set(wanted) - set(PHASES):
        raise argparse.ArgumentTypeError(f"must be some of {','.join(PHASES)}, got {','.join(sorted(unknown))}")
    return [phase for phase in PHASES if phase in wanted]
