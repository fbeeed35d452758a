"""What a history of lengths makes of groups that were stopped early: rho and standard deviation against the true ones.

    python -m benchmarks.lengths                      # benchmarks/results/lengths.json, and a table

Lengths of eight families, groups of 16 candidates that stop when the 8th has finished, with and without 5 % of groups
that run to their ends, with and without a cut at the 90 % quantile (`max_tokens`), of prompts whose scales spread by
0.5. `fit` is a log-normal distribution per group and nothing else, `shape` what the history does.

Invariant: pure Python, and the same numbers for the same seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from vllm_rollout.group.history import LengthHistory, ObservedLength

Row = dict[str, Any]

FAMILIES: dict[str, Callable[[Random], float]] = {
    "log-normal": lambda chance: math.exp(0.8 * chance.gauss(0, 1)),
    "log-normal, 0.5": lambda chance: math.exp(0.5 * chance.gauss(0, 1)),
    "log-normal, 1.1": lambda chance: math.exp(1.1 * chance.gauss(0, 1)),
    "log-normal, 1.4": lambda chance: math.exp(1.4 * chance.gauss(0, 1)),
    "a tenth is 10 times as long": lambda chance: (
        math.exp(0.4 * chance.gauss(0, 1)) * (10 if chance.random() < 0.1 else 1)
    ),
    "gamma(3)": lambda chance: chance.gammavariate(3, 1 / 3),
    "gamma(1.5)": lambda chance: chance.gammavariate(1.5, 1 / 1.5),
    "bimodal": lambda chance: math.exp(0.25 * chance.gauss(0, 1)) * (1 if chance.random() < 0.7 else 5),
}
"""Lengths of one prompt, over its scale."""
SCALE = 400
NUM_CANDIDATES, GROUP_SIZE = 16, 8
MAX_TOKENS_QUANTILE = 0.9
NUM_TRUE = 200_000
OUTPUT = Path(__file__).parent / "results" / "lengths.json"
TARGET = 0.10
"""Largest error of rho with groups that run to their ends."""


class NoShape:
    """In place of `LengthShape`: a group is its own log-normal fit."""

    num_groups = -1

    def observe(self, finished: Sequence[int], stops: Sequence[int], log_std: float) -> None:
        return None

    def shares(self) -> tuple[tuple[float, float], ...]:
        return ()


class Case(NamedTuple):
    family: str
    audited_share: float
    """Groups that run to their ends."""
    is_cut: bool
    scale_log_std: float
    """Of prompts."""


def cases() -> list[Case]:
    return [Case(*fields, 0.5) for fields in product(FAMILIES, (0.0, 0.05), (True, False))]


def measure(case: Case, num_groups: int, seed: int) -> Row:
    """Errors of one run, of both estimates."""
    chance = Random(f"{case}/{seed}")
    draw = FAMILIES[case.family]

    def scale() -> float:
        return SCALE * math.exp(case.scale_log_std * chance.gauss(0, 1))

    lengths = sorted(max(1, round(scale() * draw(chance))) for _ in range(NUM_TRUE))
    max_tokens = lengths[round(MAX_TOKENS_QUANTILE * NUM_TRUE)] if case.is_cut else None
    run = [min(length, max_tokens) for length in lengths] if max_tokens else lengths
    mean = fmean(run)
    std = math.sqrt(fmean((length - mean) ** 2 for length in run))
    histories = {"fit": LengthHistory(), "shape": LengthHistory()}
    histories["fit"]._shape = NoShape()
    for group in range(num_groups):
        whole = chance.random() < case.audited_share
        prompt = scale()
        drawn = [max(1, round(prompt * draw(chance))) for _ in range(NUM_CANDIDATES)]
        observed = observe(drawn, None if whole else GROUP_SIZE, max_tokens)
        for history in histories.values():
            history.observe(str(group), observed)
    row: Row = {"seed": seed, "rho": std / mean, "std": std, "max_tokens": max_tokens}
    for name, history in histories.items():
        seen = history.dataset().cut(max_tokens)
        row[name] = {"rho": seen.std / seen.mean, "std": seen.std}
        row[name] |= {"rho_error": row[name]["rho"] / row["rho"] - 1, "std_error": seen.std / std - 1}
    return row


def observe(drawn: Sequence[int], group_size: int | None, max_tokens: int | None) -> list[ObservedLength]:
    """One group, stopped when `group_size` candidates have finished; None: nobody is."""
    ordered = sorted(drawn)
    num_finished = len(ordered) if group_size is None else group_size
    if max_tokens is not None:
        num_finished = min(num_finished, sum(length < max_tokens for length in ordered))
    stop = max_tokens if num_finished < (group_size or len(ordered)) else ordered[num_finished - 1]
    finished = [ObservedLength(length, False) for length in ordered[:num_finished]]
    return finished + [ObservedLength(stop or 0, True)] * (len(ordered) - num_finished)


def summary(case: Case, rows: Sequence[Row]) -> Row:
    """Medians over seeds, least and most."""
    found: Row = {**case._asdict(), "rho": median(row["rho"] for row in rows)}
    for name, field in product(("fit", "shape"), ("rho_error", "std_error")):
        errors = [row[name][field] for row in rows]
        found[f"{name}_{field}"] = {"median": median(errors), "least": min(errors), "most": max(errors)}
    return found


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| lengths | run to their ends | cut | scales | true rho | rho: fit | rho: shape | std: fit | std: shape |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["family"], f"{row['audited_share']:.0%}", "90 %" if row["is_cut"] else "no"]
        cells += [f"{row['scale_log_std']:g}", f"{row['rho']:.2f}"]
        for field, name in product(("rho_error", "std_error"), ("fit", "shape")):
            error = row[f"{name}_{field}"]
            cells.append(f"{error['median']:+.0%} ({error['least']:+.0%} to {error['most']:+.0%})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=700, help="groups per run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs per case (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    summaries = []
    with ProcessPoolExecutor() as pool:
        for case in cases():
            runs = pool.map(measure, [case] * options.seeds, [options.groups] * options.seeds, range(options.seeds))
            summaries.append(summary(case, list(runs)))
            print(table(summaries[-1:]).splitlines()[-1], flush=True)
    worst = max(abs(row["shape_rho_error"]["median"]) for row in summaries if row["audited_share"])
    result = {
        "command": f"python -m benchmarks.lengths --groups {options.groups} --seeds {options.seeds}",
        "python": platform.python_version(),
        "cases": summaries,
        "target": {"name": "rho, 5 % of groups run to their ends", "value": worst, "reached": worst <= TARGET},
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.output}: largest median error of rho with groups that run to their ends {worst:.1%}")


if __name__ == "__main__":
    main()
