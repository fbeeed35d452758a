"""Tables, a picture and a JSON file from the records of `benchmarks.asynchronous.run`. Runs that go on are left out.

    python -m benchmarks.asynchronous.report runs/asynchronous [--add benchmarks/results/asynchronous.json]

- All runs of a world end after the same seconds, and are evaluated at the same moments.
- Seconds to a goal are interpolated between evaluations. A run that did not reach it counts as infinitely late.
- A gain is the median over seeds of the ratio to another arm with the same seed, with a 90 % bootstrap interval.
- Success at the end is the mean of a run's last END evaluations.
- The bound has neither bubbles nor staleness. It learns as waiting does, and its seconds are the work over the devices:
  steps of the engine that are always full, training, and no transfer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.asynchronous.arms import ARMS, WAIT
from benchmarks.asynchronous.clock import WORLDS
from benchmarks.asynchronous.run import __doc__ as HOW_TO_RUN
from benchmarks.common import ROOT, arguments_of, median_of_known, publish, record_of_run
from benchmarks.tables import Row, bars, columns, grid, number, picture
from benchmarks.time_to_reward.report import finite, interval
from benchmarks.time_to_reward.run import whole_lines

GOALS = (0.6, 0.7)
END = 3
OVER_TIME = ("seconds", "step", "generated", "success", "easy", "hard", "length", "p99")
"""Values of each evaluation: seconds, updates, sampled tokens, success and lengths of held-out problems."""
BOUND = "bound"
TITLES = {**{arm: its.title for arm, its in ARMS.items()}, BOUND: "no device idles, 8 of 8"}
KEYS = tuple(f"to_{goal}" for goal in GOALS)
RIVALS = [name for name, arm in ARMS.items() if arm.splits_devices and arm.plan == WAIT.plan]
"""Asynchronous arms without a race. The best one has most seeds, and of those the lowest median."""
PICTURED = (
    *("wait", "off", "stale1", "stale2", "stale2-drop", "race", "race-taught", "off-race-taught"),
    *("stale1-race16-taught", BOUND),
)
"""Arms whose success over seconds is drawn."""
OF_STEPS = ("staleness", "token_staleness", "reward", "difference")
"""Means over all updates: updates between a group's start and its batch, and between a token and its batch."""


def run_of(record: Path) -> dict[str, Any] | None:
    """Values of a run for the record. None if it goes on."""
    lines = whole_lines(record)
    if not lines or lines[-1]["kind"] != "end":
        return None
    arm, _, seed = record.stem.rpartition("-")
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    over_time = {name: [round(each.get(name, 0), 4) for each in evaluations] for name in OVER_TIME}
    taken = [[s["staleness"] for s in steps if a["step"] < s["step"] <= b["step"]] for a, b in pairwise(evaluations)]
    over_time["staleness"] = [0.0, *(round(fmean(its), 2) if its else None for its in taken)]
    last = evaluations[-1]
    return {
        "arm": arm,
        "seed": int(seed),
        "rollout_share": lines[0]["rollout_share"],
        "limit_s": lines[0]["limit_s"],
        **goals_of(over_time),
        "end": fmean(over_time["success"][-END:]),
        "end_hard": fmean(over_time["hard"][-END:]),
        "end_p99": median(over_time["p99"][-END:]),
        "steps": len(steps),
        **{name: fmean(step[name] for step in steps) if steps else 0.0 for name in OF_STEPS},
        "max_staleness": max((step["max_staleness"] for step in steps), default=0),
        **{name: last.get(name, 0) for name in ("generated", "trained", "rollout_s", "training_s", "dropped")},
        "over_time": over_time,
    }


def bound_of(record: Path) -> dict[str, Any] | None:
    """The bound from a run of waiting. It ends early, after the updates of that run."""
    if (run := run_of(record)) is None:
        return None
    steps = [line for line in whole_lines(record) if line["kind"] == "step"]
    seconds = [0.0, *(line["work_s"] + line["training_s"] for line in steps)]
    over_time = {**run["over_time"], "seconds": [round(seconds[step], 1) for step in run["over_time"]["step"]]}
    its = {**run, "arm": BOUND, "limit_s": seconds[-1], **dict.fromkeys(("end", "end_hard", "end_p99"))}
    return {**its, **goals_of(over_time), "over_time": over_time}


def goals_of(over_time: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    return {key: finite(seconds_to(goal, over_time)) for key, goal in zip(KEYS, GOALS, strict=True)}


def seconds_to(goal: float, over_time: Mapping[str, Sequence[float]]) -> float:
    """Seconds until success first reached the goal. Infinite if it never did."""
    points = zip(over_time["seconds"], over_time["success"], strict=True)
    for (before_s, before), (after_s, after) in pairwise(points):
        if after >= goal:
            return after_s if before >= goal else before_s + (after_s - before_s) * (goal - before) / (after - before)
    return inf


def row_of(runs: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The runs of an arm."""
    arm = runs[0]["arm"]
    row = {"arm": arm, "title": TITLES[arm], "seeds": [run["seed"] for run in runs]}
    for key in ("rollout_share", "end", "end_hard", "end_p99", "steps", "generated", *OF_STEPS[:2], "dropped"):
        row[key] = median_of_known(run[key] for run in runs)
    row["max_staleness"] = max(run["max_staleness"] for run in runs)
    row["step_s"] = median(run["limit_s"] / max(1, run["steps"]) for run in runs)
    row["end_interval"] = None if arm == BOUND else interval([run["end"] for run in runs], seed)
    for key in KEYS:
        seconds = [run[key] or inf for run in runs]
        found = {"num": sum(map(isfinite, seconds)), "seconds": finite(median(seconds))}
        row[key] = {**found, "interval": interval(seconds, seed)}
    return {**row, "runs": runs}


def gain(row: Row, over: Row, key: str, seed: int) -> dict[str, Any]:
    """Times by which a row's runs are sooner than the other row's runs of equal seeds."""
    others = {run["seed"]: run[key] or inf for run in over["runs"]}
    pairs = [(others[run["seed"]], run[key] or inf) for run in row["runs"] if run["seed"] in others]
    gains = [other / own for other, own in pairs if isfinite(other) or isfinite(own)]
    value = finite(median(gains)) if gains else None
    return {"value": value, "interval": interval(gains, seed), "num": len(gains), "arm": over["arm"]}


def rows_of(folder: Path, seed: int, earlier: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """A row per arm, in the order of TITLES, with its gain over waiting and over the best asynchronous arm.

    `earlier`: runs of a report. A run in the folder replaces one of the same arm and seed.
    """
    records = sorted(folder.glob("*.jsonl"))
    found = [*map(run_of, records), *(bound_of(record) for record in records if record.stem.startswith("wait-"))]
    by_name = {(run["seed"], run["arm"]): run for run in [*earlier, *found] if run is not None}
    runs = [run for _, run in sorted(by_name.items())]
    by_arm = {arm: [run for run in runs if run["arm"] == arm] for arm in TITLES}
    rows = [row_of(its, seed) for its in by_arm.values() if its]
    for key in KEYS:
        waiting = [row for row in rows if row["arm"] == "wait"]
        rivals = [row for row in rows if row["arm"] in RIVALS]
        best = sorted(rivals, key=lambda row: (-len(row["seeds"]), row[key]["seconds"] or inf))[:1]
        for row in rows:
            for name, over in (("gain", waiting), ("gain_over_best", best)):
                row[key][name] = gain(row, over[0], key, seed) if over else None
    return rows


def tables(record: Mapping[str, Any]) -> str:
    trained = [table(world, rows) for world, rows in record["worlds"].items() for table in (_to_goals, _ends)]
    return "\n\n".join([*trained, *([_speeds(record["speeds"])] if record.get("speeds") else [])])


def _ranged(value: float | None, ends: Sequence[float | None] | None, digits: int) -> str:
    if value is None or ends is None:
        return number(value, digits)
    low, high = ("never" if end is None else number(end, digits) for end in ends)
    return f"{number(value, digits)} ({low} to {high})"


def _gain(found: Mapping[str, Any] | None) -> str:
    return number(None) if found is None else _ranged(found["value"], found["interval"], 2)


def _to_goals(world: str, rows: Sequence[Row]) -> str:
    cells = {"arm": lambda row: row["title"], "seeds": lambda row: str(len(row["seeds"]))}
    for goal, key in zip(GOALS, KEYS, strict=True):
        best = next((row[key]["gain_over_best"]["arm"] for row in rows if row[key]["gain_over_best"]), "none")
        cells |= {
            f"reached {goal:.2f}": lambda row, key=key: f"{row[key]['num']}",
            f"seconds to {goal:.2f}": lambda row, key=key: _ranged(row[key]["seconds"], row[key]["interval"], 0),
            f"over waiting, {goal:.2f}": lambda row, key=key: _gain(row[key]["gain"]),
            f"over {best}, {goal:.2f}": lambda row, key=key: _gain(row[key]["gain_over_best"]),
        }
    return columns(f"{world}: seconds to a success, medians", rows, cells)


def _ends(world: str, rows: Sequence[Row]) -> str:
    return columns(f"{world}: at the end, medians", rows, {
        "arm": lambda row: row["title"],
        "success": lambda row: _ranged(row["end"], row["end_interval"], 2),
        "hard problems": lambda row: number(row["end_hard"], 2),
        "P99 length": lambda row: number(row["end_p99"], 0),
        "updates": lambda row: number(float(row["steps"]), 0),
        "seconds per update": lambda row: number(row["step_s"], 1),
        "thousand tokens": lambda row: number(row["generated"] / 1000, 0),
        "staleness of groups, most": lambda row: f"{row['staleness']:.1f}, {row['max_staleness']}",
        "of tokens": lambda row: number(row["token_staleness"], 1),
        "dropped": lambda row: number(float(row["dropped"]), 0),
        "devices that roll out": lambda row: number(row["rollout_share"], 2),
    })  # fmt: skip


def _speeds(speeds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Seconds per update as multiples of the bound's, an arm per row and a world per column."""
    header = [f"{world} ({its['wait']['bound_s']:.1f} s)" for world, its in speeds.items()]
    rows = [
        [
            arm.title,
            *(
                number(its[name]["update_s"] / its["wait"]["bound_s"], 2) if name in its else "—"
                for its in speeds.values()
            ),
        ]
        for name, arm in ARMS.items()
        if any(name in its for its in speeds.values())
    ]
    return grid("seconds per update over the bound's, lengths of the pilot", ["arm", *header], rows)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """The first world: success over seconds of the main arms, and seconds to the first goal of all arms."""
    (world, rows), key = next(iter(record["worlds"].items())), KEYS[0]
    main = [row for row in rows if row["arm"] in PICTURED]
    colors = {row["arm"]: f"C{PICTURED.index(row['arm'])}" if row in main else "lightgray" for row in rows}
    with picture(path, figsize=(15, max(5.0, 0.32 * len(rows) + 1.5)), width_ratios=(1.1, 1), w_pad=2) as panels:
        for row in main:
            curves = [run["over_time"] for run in row["runs"]]
            means = [fmean(at) for at in zip(*(curve["success"] for curve in curves), strict=True)]
            seconds = [fmean(at) for at in zip(*(curve["seconds"] for curve in curves), strict=True)]
            panels[0].plot(seconds, means, "o-", ms=3, color=colors[row["arm"]])
        panels[0].set_xlabel("seconds at a GPU's ratios")
        panels[0].set_ylabel("held-out success, mean of seeds")
        training = f"training is {100 * WORLDS[world].training:.0f} % of a step that waits"
        panels[0].set_title(f"{training}; colors as on the right, light gray: not drawn", loc="left", weight="bold")
        panels[0].set_ylim(0, 1.02)
        limit = rows[0]["runs"][0]["limit_s"]
        bars(
            panels[1],
            {row["arm"]: row[key]["seconds"] or limit for row in rows},
            colors=colors,
            names={row["arm"]: row["title"] for row in rows},
            texts={row["arm"]: f"{row[key]['seconds'] or nan:.0f} s".replace("nan s", "not reached") for row in rows},
            runs={row["arm"]: [run[key] or limit for run in row["runs"]] for row in rows},
            title=f"until a success of {GOALS[0]:.2f}",
            xlabel="seconds at a GPU's ratios, median (ticks: seeds)",
        )


def main() -> None:
    arguments = arguments_of(__doc__, "asynchronous.report", plot=True)
    arguments.add_argument("folder", type=Path, help="a folder of benchmarks.asynchronous.run")
    arguments.add_argument("--add", type=Path, metavar="JSON", help="add the runs of this earlier report to them")
    arguments.set_defaults(
        output=ROOT / "benchmarks/results/asynchronous_2.json", plot=ROOT / "docs/images/asynchronous_2.png"
    )
    parser, arguments = arguments, arguments.parse_args()
    if not (arguments.folder / "about.json").exists():
        parser.error(f"{arguments.folder} has no runs of benchmarks.asynchronous.run")
    record = record_of_run(seed=arguments.seed, workload={"runs": HOW_TO_RUN, "report": __doc__})
    record["about"] = json.loads((arguments.folder / "about.json").read_text())
    earlier = {} if arguments.add is None else json.loads(arguments.add.read_text())
    if earlier and any(earlier["about"][name] != record["about"][name] for name in ("policy", "flags")):
        raise SystemExit(f"error: {arguments.add} has runs of another policy or other flags. Leave --add out.")
    before = {world: [run for row in rows for run in row["runs"]] for world, rows in earlier.get("worlds", {}).items()}
    found = {world: rows_of(arguments.folder / world, arguments.seed, before.get(world, ())) for world in WORLDS}
    record["worlds"] = {world: rows for world, rows in found.items() if rows}
    if not record["worlds"]:
        parser.error(f"{arguments.folder} has no finished runs of benchmarks.asynchronous.run")
    for name in ("check", "speeds"):
        path = arguments.folder / f"{name}.json"
        record[name] = json.loads(path.read_text()) if path.exists() else earlier.get(name)
    publish(arguments, record, tables, draw, is_measured=False)


if __name__ == "__main__":
    main()
