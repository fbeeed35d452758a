"""Success against steps, tokens and seconds of trainings made by `benchmarks.time_to_reward.run` and `.trl`.

    python -m benchmarks.time_to_reward.report careful=runs/careful long_is_right=runs/thorough
    python -m benchmarks.time_to_reward.report careful=runs/more --with benchmarks/results/time_to_reward.json

Seconds are given for this machine and for a GPU. The GPU's seconds assume the sampled lengths, ten times as long, on a
device whose step takes 5.2 ms plus 0.012 ms per running candidate. It trains 7,000 tokens per second, and sends weights
in 1 s.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

from benchmarks.common import ROOT, arguments_of, publish, record_of_run
from benchmarks.tables import Row, columns, number, percent, picture
from benchmarks.time_to_reward.arms import ARMS, RETIRED, RIVALS
from benchmarks.time_to_reward.run import whole_lines

GOALS = (0.6, 0.7, 0.8)
LONGER = 10
STEP_S, CANDIDATE_S, TRAINED_TOKENS_S, SYNC_S = 0.0052, 0.000012, 7000, 1.0
HALF, RANDOMLY_PRUNED, PRUNED_AT = "half16", "random", 24
"""RANDOMLY_PRUNED is HALF as if its unused half had been stopped after PRUNED_AT tokens, where pruning judges."""
NOT_MEASURED = {(RANDOMLY_PRUNED, "seconds"), ("until", "gpu_seconds")}
"""Candidates of the second began one wave after another. No record says when."""
PICTURED = ("plain", HALF, "race", "dual", "prune", "stopped", "trl", "trl_race")
TITLES = {
    **{name: arm.title for name, arm in ARMS.items()},
    RANDOMLY_PRUNED: "16, a random half stopped early",
    **RETIRED,
    **RIVALS,
}
ENDS = ("length", "p99", "easy", "hard")
"""Values that a summary takes from each evaluation."""
PARTS = ("rollout", "rewards", "training", "sync")
"""The parts of a step, in seconds. Rewards overlap with the rollout, and their seconds are summed over all graders."""
AVERAGES = ("teaching", "tokens_per_step", "gradient_norm", "gradient_spread")
UNITS = {
    "steps": "steps",
    "tokens": "thousand tokens",
    "seconds": "seconds here",
    "gpu_seconds": "seconds at a GPU's ratios",
}


class Point(NamedTuple):
    """The cost of a training up to an evaluation, and the success in that evaluation."""

    steps: float
    tokens: float
    seconds: float
    gpu_seconds: float
    success: float


class Finished(NamedTuple):
    arm: str
    seed: int
    points: list[Point]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def gpu_seconds(step: Mapping[str, Any]) -> float:
    """Seconds of one training step on the GPU.

    All candidates start at once, from the tokens that they resume. Candidates of a deferred group count as the longest.
    """
    deferred = [step["longest"]] * step["usage"].get("num_deferred", 0)
    resumed = step.get("resumed") or [0] * len(step["lengths"])
    decoded = [num - before for num, before in zip(step["lengths"], resumed, strict=True)]
    lengths = sorted([*decoded, *step["other_lengths"], *deferred])
    seconds, before = 0.0, 0
    for place, length in enumerate(lengths):
        seconds += LONGER * (length - before) * (STEP_S + CANDIDATE_S * (len(lengths) - place))
        before = length
    return seconds + LONGER * step["learned_from"] / TRAINED_TOKENS_S + SYNC_S


def read(folder: Path) -> list[Finished]:
    """The trainings of a folder that ran to the last step, which is the same for all of them."""
    runs = list(_whole(folder))
    last = max((len(run.steps) for run in runs), default=0)
    return [run for run in runs if len(run.steps) == last]


def _whole(folder: Path) -> Iterator[Finished]:
    """Trainings whose last step was evaluated."""
    for path in sorted(folder.glob("*/record.jsonl")):
        arm, _, seed = path.parent.name.rpartition("-")
        lines = whole_lines(path)
        steps = [line for line in lines if line["kind"] == "step"]
        evaluations = [line for line in lines if line["kind"] == "evaluation"]
        if len(evaluations) < 2 or evaluations[-1]["step"] != len(steps):
            continue
        tokens = [0.0, *(step["usage"]["generated_tokens"] for step in steps)]
        on_gpu = [0.0, *map(gpu_seconds, steps)]
        points = [
            Point(at, sum(tokens[: at + 1]), each["seconds_of_steps"], sum(on_gpu[: at + 1]), each["success"])
            for each in evaluations
            for at in (each["step"],)
        ]
        yield Finished(arm, int(seed), points, steps, evaluations)


def reached(points: Sequence[Point], goal: float) -> Point | None:
    """The point at which success first reached the goal, interpolated between evaluations. None if it never did."""
    for before, after in pairwise(points):
        if after.success >= goal:
            share = (goal - before.success) / (after.success - before.success) if before.success < goal else 0.0
            return Point(*(b + share * (a - b) for b, a in zip(before, after, strict=True)))
    return None


def interval(
    values: Sequence[float], seed: int, of: Callable[[Iterable[float]], float] = median
) -> list[float | None] | None:
    """A 90 % bootstrap interval over seeds, None for an end that is infinite; None for fewer than three seeds."""
    if len(values) < 3:
        return None
    chance = random.Random(seed)
    drawn = sorted(of(chance.choices(values, k=len(values))) for _ in range(2000))
    return [finite(drawn[100]), finite(drawn[-101])]


def finite(value: float) -> float | None:
    return value if isfinite(value) else None


def randomly_pruned(run: Finished) -> Finished:
    """A training with a random half of each group, as if the other half had been stopped early. It learns the same."""
    steps, points, cheaper = [], [], [0]
    for step in run.steps:
        others = [min(length, PRUNED_AT) for length in step["other_lengths"]]
        saved = sum(step["other_lengths"]) - sum(others)
        cheaper.append(cheaper[-1] + saved)
        usage = {**step["usage"], "generated_tokens": step["usage"]["generated_tokens"] - saved}
        steps.append({**step, "other_lengths": others, "usage": usage})
    on_gpu = [0.0, *accumulate(map(gpu_seconds, steps))]
    for point in run.points:
        at = int(point.steps)
        points.append(point._replace(tokens=point.tokens - cheaper[at], gpu_seconds=on_gpu[at]))
    return run._replace(arm=RANDOMLY_PRUNED, steps=steps, points=points)


def summary(run: Finished) -> dict[str, Any]:
    """Values of a training kept in the record, so that a later report can add seeds to it."""
    norms = [step["gradient_norm"] for step in run.steps if step["gradient_norm"]] or [0.0]
    over_time = [{name: each[name] for name in ("step", *ENDS)} for each in run.evaluations]
    return {
        "seed": run.seed,
        "points": [point._asdict() for point in run.points],
        **{name: over_time[-1][name] for name in ENDS},
        "over_time": over_time,
        "teaching": fmean(step["teaching"] / max(1, step["groups"]) for step in run.steps),
        "tokens_per_step": fmean(step["usage"]["generated_tokens"] for step in run.steps),
        **{f"{part}_s": median(step["seconds"].get(part, 0.0) for step in run.steps) for part in PARTS},
        "gradient_norm": fmean(norms),
        "gradient_spread": pstdev(norms) / (fmean(norms) or 1.0),
        "difference_max": max(step["difference_max"] for step in run.steps),
    }


def row_of(arm: str, runs: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Results of the trainings of one arm: success, and the cost to reach each goal."""
    runs = sorted(runs, key=lambda run: run["seed"])
    curves = [[Point(**point) for point in run["points"]] for run in runs]
    last = [points[-1].success for points in curves]
    row: dict[str, Any] = {"arm": arm, "title": TITLES[arm], "seeds": [run["seed"] for run in runs]}
    row["start"], row["end"] = median(points[0].success for points in curves), median(last)
    row["end_interval"] = interval(last, seed)
    measured = [unit for unit in UNITS if (arm, unit) not in NOT_MEASURED]
    for goal in GOALS:
        found = [reached(points, goal) for points in curves]
        row[f"to_{goal}"] = {
            "num": len(found) - found.count(None),
            **dict.fromkeys((*UNITS, "seconds_interval", "gpu_seconds_interval")),
        }
        for unit in measured:  # a training that never reached the goal counts as infinitely late
            values = [inf if point is None else getattr(point, unit) for point in found]
            row[f"to_{goal}"] |= {unit: finite(median(values)), f"{unit}_interval": interval(values, seed)}
    for of, names in ((median, (*ENDS, *(f"{part}_s" for part in PARTS))), (fmean, AVERAGES)):
        for name in names:  # records of before 2026-11-25 lack some
            known = [run[name] for run in runs if name in run]
            row[name] = of(known) if known else None
    row["over_time"] = [
        {name: median(each[name] for each in at) for name in ("step", *ENDS)}
        for at in zip(*(run["over_time"] for run in runs if "over_time" in run), strict=False)
    ]
    return {**row, "difference_max": max(run["difference_max"] for run in runs), "runs": runs}


def tables(record: Mapping[str, Any]) -> str:
    return "\n\n".join(
        text for style, rows in record["styles"].items() for text in (_to_goal(style, rows), _ends(style, rows))
    )


def _ranged(value: float | None, ends: Sequence[float | None] | None, digits: int = 0) -> str:
    text = number(value, digits)
    if value is None or ends is None:
        return text
    low, high = ("never" if end is None else number(end, digits) for end in ends)
    return f"{text} ({low} to {high})"


def _to_goal(style: str, rows: Sequence[Row], goal: float = GOALS[0]) -> str:
    key = f"to_{goal}"
    return columns(f"{style}: to a success of {goal}, medians", rows, {
        "arm": lambda row: row["title"],
        "seeds, that got there": lambda row: f"{row[key]['num']} of {len(row['seeds'])}",
        "steps": lambda row: number(row[key]["steps"], 1),
        "thousand tokens": lambda row: number(row[key]["tokens"] and row[key]["tokens"] / 1000, 0),
        "seconds here": lambda row: _ranged(row[key]["seconds"], row[key]["seconds_interval"]),
        "at a GPU's ratios": lambda row: _ranged(row[key]["gpu_seconds"], row[key]["gpu_seconds_interval"]),
    })  # fmt: skip


def _ends(style: str, rows: Sequence[Row]) -> str:
    return columns(f"{style}: at the end", rows, {
        "arm": lambda row: row["title"],
        "success": lambda row: _ranged(row["end"], row["end_interval"], 2),
        "easy, hard": lambda row: f"{row['easy']:.2f}, {row['hard']:.2f}",
        "before": lambda row: "{easy:.2f}, {hard:.2f}".format(**row["over_time"][0]) if row["over_time"] else "—",
        "mean, P99 length": lambda row: f"{row['length']:.0f}, {row['p99']:.0f}",
        "groups that teach": lambda row: percent(row["teaching"]),
        "gradient norm, spread": lambda row: f"{row['gradient_norm']:.2f}, {row['gradient_spread']:.2f}",
        f"{', '.join(PARTS)} of a step, s": lambda row: ", ".join(number(row[f"{part}_s"], 2) for part in PARTS),
    })  # fmt: skip


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A panel per style: success over seconds at a GPU's ratios, a line per arm (mean of its seeds at each step)."""
    styles = record["styles"]
    with picture(path, figsize=(7 * len(styles), 4.8), width_ratios=(1,) * len(styles), w_pad=2) as panels:
        for axes, (style, rows) in zip(panels, styles.items(), strict=True):
            for row in [row for row in rows if row["arm"] in PICTURED]:
                curves = [run["points"] for run in row["runs"]]
                places = zip(*curves, strict=True)
                means = [(fmean(p["gpu_seconds"] for p in at), fmean(p["success"] for p in at)) for at in places]
                axes.plot(
                    *zip(*means, strict=True), "o-", ms=3, color=f"C{PICTURED.index(row['arm'])}", label=row["title"]
                )
            axes.set_xlabel("seconds at a GPU's ratios")
            axes.set_ylabel("held-out success")
            axes.set_title(style, loc="left", weight="bold")
            axes.legend(frameon=False, fontsize=8)


def styles_of(folders: Mapping[str, Path], earlier: Mapping[str, Sequence[Row]], seed: int) -> dict[str, list[Row]]:
    """A row per arm, of the runs in the folders and of further runs in an earlier record."""
    styles = {}
    for style in dict.fromkeys((*earlier, *folders)):
        found = {(row["arm"], run["seed"]): run for row in earlier.get(style, ()) for run in row["runs"]}
        runs = read(folders[style]) if style in folders else []
        runs += [randomly_pruned(run) for run in runs if run.arm == HALF]
        found |= {(run.arm, run.seed): summary(run) for run in runs}
        by_arm = {name: [run for (arm, _), run in found.items() if arm == name] for name in TITLES}
        styles[style] = [row_of(arm, of, seed) for arm, of in by_arm.items() if of]
    return styles


def main() -> None:
    arguments = arguments_of(__doc__, "time_to_reward.report", plot=True)
    arguments.add_argument("folders", nargs="*", metavar="STYLE=FOLDER", help="a name, and a folder of runs")
    arguments.add_argument("--with", dest="earlier", type=Path, help="an earlier record, whose runs are added")
    arguments.set_defaults(
        output=ROOT / "benchmarks/results/time_to_reward.json", plot=ROOT / "docs/images/time_to_reward.png"
    )
    parser, arguments = arguments, arguments.parse_args()
    folders = {style: Path(folder) for style, _, folder in (word.partition("=") for word in arguments.folders)}
    if not folders and arguments.earlier is None:
        parser.error("name a folder of runs, such as careful=runs/careful, or an earlier record by --with")
    for style, folder in folders.items():
        if not (folder / "about.json").exists() or not read(folder):
            parser.error(f"{folder} (style {style!r}) has no finished runs of benchmarks.time_to_reward.run or .trl")
    record = record_of_run(seed=arguments.seed, workload={"trainings": __doc__})
    earlier = {"styles": {}, "about": {}} if arguments.earlier is None else json.loads(arguments.earlier.read_text())
    abouts = {style: json.loads((folder / "about.json").read_text()) for style, folder in folders.items()}
    for style in abouts.keys() & earlier["about"].keys():
        new, old = abouts[style]["policy"], earlier["about"][style].get("policy")
        if new != old:
            raise SystemExit(
                f"error: {style!r} has trainings of policy {new}, its record of {old}. Name another style."
            )
    record |= {"styles": styles_of(folders, earlier["styles"], arguments.seed), "about": {**earlier["about"], **abouts}}
    publish(arguments, record, tables, draw, is_measured=False)


if __name__ == "__main__":
    main()
