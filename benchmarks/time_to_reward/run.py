"""Trains every arm with every seed, on one server, arms in turn. A completed run is not repeated.

    python -m examples.grpo.pretrain models --style careful
    python -m benchmarks.time_to_reward.run models/careful runs/careful --arms plain race --seeds 1 2 3
    python -m benchmarks.time_to_reward.report careful=runs/careful

Answers are not seeded: two runs of a seed have the same problems in the same order, but different answers. Before each
run the server's learned state is cleared. An interrupted run continues from its checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import hardware, in_turn, installed_versions, write_json
from benchmarks.time_to_reward.arms import ARMS
from examples.grpo.server import Server
from examples.grpo.train import parse


def whole_lines(record: Path) -> list[dict[str, Any]]:
    """Complete lines of a record. The last line may be incomplete."""
    text = record.read_text() if record.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def is_done(record: Path, steps: int) -> bool:
    """True if the record has the evaluation of the last step."""
    return any(line["kind"] == "evaluation" and line["step"] == steps for line in whole_lines(record))


def say_what_runs(folder: Path, model: str, flags: Sequence[str], *, one_setting: bool = False) -> None:
    """Write `about.json` of a folder of trainings.

    Raises: SystemExit if the folder has trainings of another policy, or, with `one_setting`, with other flags.

    float32 rounds differently on another kind of CPU, so the same pretraining then makes a policy that learns
    differently.
    """
    weights = b"".join(path.read_bytes() for path in sorted(Path(model).glob("*.safetensors")))
    policy, about = hashlib.sha256(weights).hexdigest()[:16], folder / "about.json"
    its = {"policy": policy, "flags": [*flags]}
    before = json.loads(about.read_text()) if about.exists() else its
    for name in ("policy", "flags") if one_setting else ("policy",):
        if before.get(name) != its[name]:
            other = f"{folder} has trainings of {name} {before.get(name)}, {model} is {its[name]}"
            raise SystemExit(f"error: {other}. Name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(about, {"versions": installed_versions(), "hardware": hardware(), **its})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of examples.grpo.pretrain")
    parser.add_argument("runs", type=Path, help="a folder, in which each run gets a folder")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--flags", default="", metavar="'...'", help="more flags of examples.grpo.train, for all arms")
    parser.add_argument("--hours", type=float, default=24.0, help="begin no run after this time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    flags = ["--algorithm=dr_grpo", f"--lr={arguments.lr}", f"--steps={arguments.steps}"]
    flags += shlex.split(arguments.flags)
    serve = ["--serve", "--serve-flags=--rollout-audit-ratio 0"]
    say_what_runs(arguments.runs, arguments.model, [*flags, *serve])
    deadline = time.monotonic() + 3600 * arguments.hours
    with Server(parse([arguments.model, str(arguments.runs), *serve, *flags])) as server:
        nothing = server.client.state()
        for place, seed in enumerate(arguments.seeds):
            for name in in_turn(arguments.arms, place):
                arm, output = ARMS[name], arguments.runs / f"{name}-{seed}"
                if is_done(output / "record.jsonl", arguments.steps):
                    continue
                if time.monotonic() > deadline:
                    return
                print(f"== {name}, seed {seed}", flush=True)
                output.mkdir(exist_ok=True)
                server.client.set_state(nothing)
                args = parse([arguments.model, str(output), *flags, f"--seed={seed}", *arm.flags.split()])
                arm.training(args, server).go()


if __name__ == "__main__":
    main()
