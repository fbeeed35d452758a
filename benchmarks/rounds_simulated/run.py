"""Tail batching at the scale of RollPacker's evaluation, in the simulator: what short and long rounds save.

No GPU and no engine: whole runs through the rules of `group/`, on a clock that counts bytes read from memory. Five
parts: `sweep` (Fig. 12 of the paper), `shares` (how much of the result hangs on how much prompts differ), `queue_order`
(which prompts a long round takes), `whole_epochs` (what it costs when each of them comes back whole), `order` (which
prompts come back when, and how long what comes back is). All numbers that go in are in setup.py and in the result's
`workload`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.common import record_of_run, write_json
from benchmarks.rounds_simulated.picture import draw
from benchmarks.rounds_simulated.setup import (
    BETWEEN_SHARE,
    BOTH,
    MESSAGE_S,
    MODEL_NAMES,
    MODELS,
    OTHER_SHARES,
    PROMPTS_ONLY,
    PROMPTS_PER_ROUND,
    RESPONSES_ONLY,
    SYNCHRONOUS,
    ModelName,
    lengths,
    speculating,
    sweep_settings,
    workload,
)
from benchmarks.rounds_simulated.tables import tables
from vllm_rollout.group.rounds import QUEUE_ORDERS
from vllm_rollout.simulator.rounds.fairness import fairness_of
from vllm_rollout.simulator.rounds.outcome import (
    RunOutcome,
    mean_of_longest,
    mean_seconds,
    percentile_of_lengths,
)
from vllm_rollout.simulator.rounds.prompts import GeneratedDataSet
from vllm_rollout.simulator.rounds.replay import RunConditions
from vllm_rollout.simulator.rounds.settings import RoundSetting
from vllm_rollout.simulator.rounds.sweep import RoundSweep, sweep_rounds

QUEUE_FACTORS = (1.25, 1.4, 2.5)
ORDER_MODEL: ModelName = "14B/16k"
MANY_EPOCHS = 4
LARGE = 4
"""Times the prompts of the other parts: in a longer epoch a few rounds of waiting are less."""
NUM_DRAWN_ROUNDS = 20


def rows_of(sweeps: Sequence[RoundSweep]) -> list[dict[str, Any]]:
    """One row per setting; values are means over the sweeps, which differ in their seed."""
    rows = []
    for position, outcome in enumerate(sweeps[0].outcomes):
        outcomes = [sweep.outcomes[position] for sweep in sweeps]
        speed_ups = [sweep.speed_up(its) for sweep, its in zip(sweeps, outcomes, strict=True)]
        rows.append(
            {
                "setting": outcome.setting.name,
                "prompt_speculation": outcome.setting.terms.prompt_speculation,
                "response_speculation": outcome.setting.terms.response_speculation,
                "queue_order": outcome.setting.terms.queue_order,
                "speed_up": fmean(speed_ups),
                "speed_up_range": [min(speed_ups), max(speed_ups)],
                "speed_up_of_run": fmean(s.speed_up_of_run(its) for s, its in zip(sweeps, outcomes, strict=True)),
                **{field: _mean(value(its) for its in outcomes) for field, value in VALUES.items()},
                "length_bias": fmean(s.length_bias(its) for s, its in zip(sweeps, outcomes, strict=True)),
                "num_preemptions": sum(its.num_preemptions for its in outcomes),
                "fairness": _mean_fairness(outcomes),
            }
        )
    return rows


VALUES: dict[str, Callable[[RunOutcome], float | None]] = {
    "round_s": lambda its: its.round_s,
    "prompt_s": lambda its: its.prompt_s,
    "num_returned": lambda its: sum(len(one.returned) for one in its.full_rounds),
    "short_s": lambda its: mean_seconds(its.of("short")),
    "long_s": lambda its: mean_seconds(its.of("long")),
    "num_short": lambda its: len(its.of("short")),
    "num_long": lambda its: len(its.of("long")),
    "short_longest": lambda its: mean_of_longest(its.of("short")),
    "short_least_longest": lambda its: min(one.max_tokens for one in its.of("short")),
    "long_longest": lambda its: mean_of_longest(its.of("long")),
    "short_p75": lambda its: percentile_of_lengths(its.of("short"), 75),
    "long_p75": lambda its: percentile_of_lengths(its.of("long"), 75),
    "generated_tokens": lambda its: its.generated_tokens,
    "returned_tokens": lambda its: its.returned_tokens,
    "wasted_share": lambda its: its.wasted_tokens / its.generated_tokens,
}


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _mean_fairness(outcomes: Sequence[RunOutcome]) -> dict[str, Any]:
    """Means over seeds, but for what is a bound."""
    seen = [asdict(fairness_of(outcome)) for outcome in outcomes]
    bounds = {"least_returns": min, "most_returns": max, "max_wait": max, "largest_departure": max}
    return {
        field: bounds[field](its[field] for its in seen) if field in bounds else _mean(its[field] for its in seen)
        for field in seen[0]
    }


def rounds_drawn(sweep: RoundSweep) -> dict[str, Any]:
    """Consecutive rounds without speculation and with both, for the picture."""
    drawn = {}
    both = next(outcome for outcome in sweep.outcomes if outcome.setting == BOTH)
    for outcome in (sweep.baseline, both):
        mean = outcome.returned_tokens / sum(len(prompt.lengths) for prompt in outcome.returned)
        first = outcome.rounds[:NUM_DRAWN_ROUNDS]
        drawn[outcome.setting.name] = {
            "kind": [its.kind for its in first],
            "seconds": [its.seconds for its in first],
            "longest": [its.max_tokens for its in first],
            "mean_over_run": [fmean(its.lengths) / mean for its in first],
        }
    return drawn


@dataclass(frozen=True, slots=True)
class Part:
    """Settings on the same data sets."""

    name: ModelName
    settings: Sequence[RoundSetting]
    between: float
    num_prompts: int
    epochs: int
    seeds: Sequence[int]
    whole_epochs: bool = False

    @property
    def num_rounds(self) -> int:
        """About: rounds that end a run are not full."""
        return len(self.settings) * len(self.seeds) * self.epochs * self.num_prompts // PROMPTS_PER_ROUND

    def run(self, on_round: Callable[[], None]) -> list[RoundSweep]:
        """One sweep per seed."""
        machine = MODELS[self.name].machine
        sweeps = []
        for seed in self.seeds:
            data = GeneratedDataSet(lengths(self.name, self.between, self.num_prompts), seed)
            conditions = RunConditions(data, machine, self.epochs, seed, MESSAGE_S, self.whole_epochs)
            sweeps.append(sweep_rounds(conditions, self.settings, lambda setting, done: on_round()))
        return sweeps


def parts_of(num_prompts: int, epochs: int, seeds: Sequence[int]) -> dict[tuple[str, ...], Part]:
    """Where each part goes in the result, and what it is."""

    four = [SYNCHRONOUS, RESPONSES_ONLY, PROMPTS_ONLY, BOTH]
    queue = [speculating(factor, factor, order) for factor in QUEUE_FACTORS for order in QUEUE_ORDERS]
    more = [speculating(prompts, responses) for prompts in (1.1, 1.5) for responses in (1.0, prompts)]
    many = Part(ORDER_MODEL, [*four[:-1], *more, BOTH], BETWEEN_SHARE, num_prompts, MANY_EPOCHS, seeds[:1])
    large = Part(ORDER_MODEL, four, BETWEEN_SHARE, LARGE * num_prompts, 1, seeds[:1])
    ends = [SYNCHRONOUS, speculating(1.1, 1.1), BOTH]
    border = [Part(ORDER_MODEL, ends, BETWEEN_SHARE, num_prompts * n, 1, seeds[:2], True) for n in (1, 2, LARGE)]
    return {
        **{
            ("sweep", name): Part(name, sweep_settings(), BETWEEN_SHARE, num_prompts, epochs, seeds)
            for name in MODEL_NAMES
        },
        **{
            ("shares", name, f"{b:g}"): Part(name, four, b, num_prompts, epochs, seeds[:1])
            for name in MODEL_NAMES
            for b in OTHER_SHARES
        },
        ("queue_order",): Part(ORDER_MODEL, [SYNCHRONOUS, *queue], BETWEEN_SHARE, num_prompts, epochs, seeds[:1]),
        **{("whole_epochs", str(part.num_prompts)): part for part in border},
        **{("order", f"epochs of {its.num_prompts:,} prompts: {its.epochs}"): its for its in (many, large)},
    }


def measure(num_prompts: int, epochs: int, seeds: Sequence[int], console: Console) -> dict[str, Any]:
    parts = parts_of(num_prompts, epochs, seeds)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    result: dict[str, Any] = {}
    with progress:
        row = progress.add_task("", total=sum(part.num_rounds for part in parts.values()))
        for place, part in parts.items():
            progress.update(row, description=" ".join(place))
            sweeps = part.run(lambda: progress.advance(row))
            inner = result
            for name in place[:-1]:
                inner = inner.setdefault(name, {})
            inner[place[-1]] = rows_of(sweeps)
            if place == ("sweep", ORDER_MODEL):
                result["rounds"] = rounds_drawn(sweeps[0])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1024, help="of an epoch (default 1024)")
    parser.add_argument("--epochs", type=int, default=3, help="of a run (default 3)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the sweep's settings (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/rounds_simulated.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/rounds_simulated.png"))
    parser.add_argument("--again", action="store_true", help="tables and picture of the numbers that are there")
    args = parser.parse_args()
    console = Console()
    if args.again:
        record = json.loads(args.output.read_text())
    else:
        record = record_of_run(seed=args.seed, workload=workload(args.prompts, args.epochs, args.seeds))
        started = time.monotonic()
        record |= measure(args.prompts, args.epochs, range(args.seed, args.seed + args.seeds), console)
        record["took_s"] = round(time.monotonic() - started, 1)
        write_json(args.output, record)
        console.print(f"Numbers: {args.output}")
    print(tables(record))
    draw(record, args.picture)
    console.print(f"Picture: {args.picture}")
