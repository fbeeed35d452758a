"""Trains every arm with every seed on the virtual clock, arms in turn. A completed run is not repeated.

    python -m examples.grpo.pretrain models --style careful
    python -m benchmarks.asynchronous.run models/careful runs/asynchronous
    python -m benchmarks.asynchronous.report runs/asynchronous

FOLDER gets `pilot.json`, and a record `WORLD/ARM-SEED.jsonl` per completed run. Two runs of a seed have the same
problems in the same order. The same command continues after a kill, and repeats the run that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.asynchronous.arms import ARMS, MAIN_ARMS, Arm
from benchmarks.asynchronous.clock import WORLDS, Clock
from benchmarks.asynchronous.pilot import clock_of, pilot, plan_of
from benchmarks.asynchronous.policy import LEARNING_RATE, Policy
from benchmarks.asynchronous.train import Training
from benchmarks.common import in_turn
from benchmarks.time_to_reward.run import say_what_runs, whole_lines
from vllm_rollout.whole_file import PUBLIC, write_whole


def is_done(record: Path) -> bool:
    return any(line["kind"] == "end" for line in whole_lines(record))


def train(
    arm: Arm, clock: Clock, limit_s: float, model: str, seed: int, record: Path, rate: float = LEARNING_RATE
) -> dict[str, Any]:
    """One run. Returns its last evaluation."""
    policy, began = Policy(model, seed, rate), time.monotonic()
    start = {"kind": "start", "title": arm.title, "rollout_share": clock.rollout_share, "limit_s": limit_s}
    lines = [start, *Training(arm, clock, policy.sampler(seed), policy).go(limit_s)]
    end = {"kind": "end", "real_seconds": time.monotonic() - began}
    # Written at once: another process may train the same run.
    write_whole(record, "".join(f"{json.dumps(line)}\n" for line in [*lines, end]).encode(), PUBLIC)
    return lines[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of examples.grpo.pretrain")
    parser.add_argument("folder", type=Path, help="a folder for the records")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=MAIN_ARMS, help="default: the main arms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=["quarter"])
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="the pilot has the default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rate = arguments.learning_rate
    flags = [] if rate == LEARNING_RATE else ["--learning-rate", str(rate)]
    say_what_runs(arguments.folder, arguments.model, flags, one_setting=True)
    lengths = pilot(arguments.model, arguments.folder / "pilot.json")
    for world in arguments.worlds:
        train_all(arguments, world, lengths)


def train_all(arguments: argparse.Namespace, world: str, lengths: Sequence[Any]) -> None:
    plan, folder, clocks = plan_of(WORLDS[world], lengths), arguments.folder / world, dict[str, Clock]()
    folder.mkdir(exist_ok=True)
    turns = [(name, seed) for place, seed in enumerate(arguments.seeds) for name in in_turn(arguments.arms, place)]
    began, num_trained = time.monotonic(), 0
    for place, (name, seed) in enumerate(turns):
        record = folder / f"{name}-{seed}.jsonl"
        if is_done(record):  # also by another process, meanwhile
            continue
        clock = clocks[name] = clocks.get(name) or clock_of(ARMS[name], plan, lengths)
        last = train(ARMS[name], clock, plan.limit_s, arguments.model, seed, record, arguments.learning_rate)
        num_trained += 1
        num_left = sum(not is_done(folder / f"{name}-{seed}.jsonl") for name, seed in turns[place + 1 :])
        minutes = (time.monotonic() - began) / 60 / num_trained * num_left
        shown = f"success {last['success']:.3f} after {last['step']} steps and {last['seconds']:.0f} s"
        print(f"{world}: {name}-{seed}: {shown}. {num_left} left, {minutes:.0f} minutes", flush=True)


if __name__ == "__main__":
    main()
