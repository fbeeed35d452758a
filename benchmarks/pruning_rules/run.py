"""What pruning is worth with success probabilities that it learns itself: no model, no engine.

learned      the main table (learned.py): a GRPO whose true gradient is known (benchmarks/toy_grpo.py), scores with an
             AUC, and everything else the code of the engine: calibration learns from survivors' rewards, step by step.
             Ways: none pruned; fewer, none pruned of as many candidates as the others keep; random, paper, balance,
             gradient (the default); and gradient with audit groups, and behind a head's swap.
             Is the default at least as good as random, fewer and none, in signal to noise per generated token? Does
             the report advise the better of pruning and fewer?
arrival, calibration, labels
             what choices within the rules are measured by, with the truth known exactly (known.py)

Run from the repository root: python -m benchmarks.pruning_rules (some 10 minutes on one core; --quick, half a minute:
two cells, and errors to match).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.common import record_of_run, write_json
from benchmarks.pruning_rules import known, learned, tables

PARTS = ("learned", "arrival", "calibration", "labels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=learned.NUM_GROUPS, help="measured, of each seed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=8, help="from 2 on (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two cells, 2 seeds of 32 groups")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="these again; others stay as they are")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/pruning_rules.json"))
    args = parser.parse_args()
    num_groups, num_seeds = (32, 2) if args.quick else (args.groups, args.seeds)
    if num_seeds < 2 or num_groups < 2:
        parser.error("--seeds and --groups must be at least 2: there is no error of one")

    worlds, min_learning = (learned.QUICK_WORLDS, 16) if args.quick else (learned.WORLDS, learned.MIN_LEARNING)
    known_seeds = min(4, num_seeds)
    workload = {
        "groups": f"{num_seeds} seeds of {num_groups} groups of {learned.GROUP_SIZE} per cell, after those that teach",
        "groups_per_step": learned.GROUPS_PER_STEP,
        "detection_share": learned.DETECTION_SHARE,
        "share": learned.SHARE,
        "ways": {name: asdict(way) for name, way in learned.WAYS.items()},
        "known": f"{known_seeds} seeds; arrival and labels: {num_groups} groups",
    }
    record = record_of_run(seed=1, workload=workload)
    if set(args.parts) < set(PARTS):
        again = {part: {key: record[key] for key in ("command", "date", "git_commit")} for part in args.parts}
        record = json.loads(args.output.read_text())
        record["again"] = record.get("again", {}) | again
    if "learned" in args.parts:
        record["learned"] = list(learned.rows(worlds, num_groups, min_learning, num_seeds))
        record["target"] = [
            learned.target(record["learned"], way, field)
            for way in ("gradient", "audits", "swap", "balance", "paper")
            for field in ("per_token", "per_token_free")
        ]
    if "arrival" in args.parts:
        record["arrival"] = known.arrival_rows(num_groups, known_seeds)
    if "calibration" in args.parts:
        record["calibration"] = known.calibration_rows(known_seeds)
    if "labels" in args.parts:
        record["labels"] = known.labels_rows(num_groups, known_seeds)
    record = learned.rounded(record)
    write_json(args.output, record)
    print(tables.report(record))
    Console().print(f"written to {args.output}")
