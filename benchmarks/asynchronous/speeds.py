"""Seconds per update of every arm in every world, from a replay of the pilot's lengths. Nothing is trained.

    python -m benchmarks.asynchronous.speeds runs/asynchronous

FOLDER gets `speeds.json`, which the report shows. Lengths are the pilot's in all arms, so this leaves out what an arm
does to lengths and to learning. `whole_gpus_s` is of the best split into whole GPUs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.asynchronous.arms import ARMS
from benchmarks.asynchronous.clock import WORLDS
from benchmarks.asynchronous.pilot import SHARES, WHOLE, clock_of, plan_of, replays
from benchmarks.common import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of benchmarks.asynchronous.run, with its pilot")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    arguments = parser.parse_args()
    path = arguments.folder / "speeds.json"
    lengths = json.loads((arguments.folder / "pilot.json").read_text())["lengths"]
    found = json.loads(path.read_text()) if path.exists() else {}
    for world in arguments.worlds:
        plan = plan_of(WORLDS[world], lengths)
        for name in arguments.arms:
            if name in found.setdefault(world, {}):
                continue
            row = dict[str, float]()
            for key, shares in (("whole_gpus_s", WHOLE), ("update_s", SHARES)):
                clock = clock_of(ARMS[name], plan, lengths, shares)
                last = [steps[-1] for steps in replays(ARMS[name], clock, plan.limit_s, lengths)]
                num_updates = sum(each["step"] for each in last)
                row |= {"rollout_share": clock.rollout_share, key: sum(each["seconds"] for each in last) / num_updates}
            if name == "wait":
                row["bound_s"] = sum(each["work_s"] + each["training_s"] for each in last) / num_updates
            found[world][name] = row
            write_json(path, found)
            print(f"{world}, {name}: {row['update_s']:.1f} s per update", flush=True)


if __name__ == "__main__":
    main()
