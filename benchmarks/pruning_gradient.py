"""What pruning does to the gradient, in a GRPO whose true gradient is known (toy_grpo.py): no model, no engine.

quality    squared mean over variance of a group's estimate, across groups. What z does beyond h is integrated out
rules      none (all candidates), random, balance, paper, gradient, and gradient that knows `PAST_REWARDS` earlier
           rewards of the prompt ("history"); all in the code that decides in the engine, same groups, same chance, and
           q as it is: with q as it is learned, benchmarks.pruning_rules
settings   other group sizes and keep ratios
arrival    siblings judged one by one, four by four, all at once

Errors are standard errors over seeds, of a difference between rules over the seeds' differences.

Run from the repository root: python -m benchmarks.pruning_gradient
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.common import record_of_run, with_error, write_json
from benchmarks.toy_grpo import ESTIMATES, GROUP_SIZE, Estimate, Groups, Pruned, World, quality
from vllm_rollout.group.gradient import gradient_rule, population_of
from vllm_rollout.group.pruning import group_rule, solve_paper
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.success import NO_REWARDS, PromptSuccess
from vllm_rollout.group.survivors import choose_survivors

SUCCESS_RATES = (0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9)
CONCENTRATIONS = (3.0, 20.0)
"""Of the beta distribution: at a mean of 0.5 prompts differ by 0.25, or by 0.11 (standard deviations)."""
AUCS = (0.5, 0.65, 0.85)
SHARES = (0.5, 0.8)
"""Correlation of success with the direction of the gradient."""
PLAN = PruningPlan(detection_length=1, allow_fewer=True)

Rule = Literal["none", "random", "balance", "paper", "gradient", "history"]
RULES: tuple[Rule, ...] = ("none", "random", "balance", "paper", "gradient", "history")


Survival = Callable[[Sequence[float], Sequence[tuple[float, bool]], PromptSuccess, int], list[float]]
"""(q of the batch, (q, kept) of earlier siblings, the prompt's past, siblings to come) -> survival probabilities."""


def survival_of(rule: Rule, world: World, plan: PruningPlan) -> Survival:
    if rule == "none":
        return lambda batch, earlier, past, num_to_come: [1.0] * len(batch)
    if rule == "random":
        return lambda batch, earlier, past, num_to_come: [plan.keep_ratio] * len(batch)
    points = world.population()
    if rule == "paper":
        paper = solve_paper(points, plan)
        return lambda batch, earlier, past, num_to_come: [paper.survival(q) for q in batch]
    population = population_of(points)

    def survival(
        batch: Sequence[float], earlier: Sequence[tuple[float, bool]], past: PromptSuccess, num_to_come: int
    ) -> list[float]:
        if rule == "balance":
            solved = group_rule(batch, earlier, population.points, plan)
        else:
            known = past if rule == "history" else NO_REWARDS
            solved = gradient_rule(batch, earlier, population, plan, past=known, num_to_come=num_to_come)
        return [solved.survival(q) for q in batch]

    return survival


def prune(groups: Groups, survival: Survival, seed: int, batch_size: int) -> Pruned:
    kept = np.zeros(groups.q.shape, dtype=bool)
    probabilities = np.ones(groups.q.shape)
    size = groups.q.shape[1]
    for g, (qs, past) in enumerate(zip(groups.q.tolist(), groups.past, strict=True)):
        decided: list[tuple[float, bool]] = []
        for start in range(0, size, batch_size):
            batch = range(start, min(size, start + batch_size))
            wanted = survival([qs[i] for i in batch], decided, past, size - batch.stop)
            chosen = choose_survivors(dict(zip(batch, wanted, strict=True)), seed=seed, group=str(g))
            decided += [(qs[i], i in chosen.kept) for i in batch]
            for i in batch:
                kept[g, i], probabilities[g, i] = i in chosen.kept, chosen.probabilities[i]
    return Pruned(kept, probabilities)


Measured = dict[Estimate, list[float]]
"""Qualities by seed."""


def measure(
    world: World, plan: PruningPlan, rules: Sequence[Rule], num_groups: int, num_seeds: int, batch_size: int
) -> dict[Rule, Measured]:
    found: dict[Rule, Measured] = {rule: {estimate: [] for estimate in ESTIMATES} for rule in rules}
    survivals = {rule: survival_of(rule, world, plan) for rule in rules}
    for seed in range(num_seeds):
        groups = world.groups(num_groups, seed + 1)
        for rule in rules:
            pruned = prune(groups, survivals[rule], seed, batch_size)
            for estimate in ESTIMATES:
                found[rule][estimate].append(quality(groups, pruned, world.share, estimate))
    return found


def row_of(found: Mapping[Rule, Measured]) -> dict[str, Any]:
    """Qualities, and the gains of the gradient rule, plain, over random and balance in units of their errors."""
    row: dict[str, Any] = {}
    for rule, by_seed in found.items():
        row[rule] = {name: with_error(values) for name, values in by_seed.items()}
    for ours in ("gradient", "history"):
        for other in ("random", "balance"):
            if ours in found and other in found:
                gains = [a - b for a, b in zip(found[ours]["plain"], found[other]["plain"], strict=True)]
                row[f"{ours}_minus_{other}"] = with_error(gains)
    return row


def rules_rows(num_groups: int, num_seeds: int) -> list[dict[str, Any]]:
    worlds = [World(s, c, auc, rate) for s in SHARES for c in CONCENTRATIONS for auc in AUCS for rate in SUCCESS_RATES]
    return [
        asdict(world) | row_of(measure(world, PLAN, RULES, num_groups, num_seeds, GROUP_SIZE))
        for world in track(worlds, "rules, by AUC and success rate")
    ]


def settings_rows(num_groups: int, num_seeds: int) -> list[dict[str, Any]]:
    cases = [
        (World(0.5, 3.0, auc, rate, size), replace(PLAN, keep_ratio=keep))
        for size, keep in ((8, 0.5), (16, 0.25), (16, 0.75), (32, 0.5))
        for auc in (0.65, 0.85)
        for rate in (0.05, 0.3, 0.5)
    ]
    rules: tuple[Rule, ...] = ("random", "balance", "gradient")
    return [
        asdict(world)
        | {"keep_ratio": plan.keep_ratio}
        | row_of(measure(world, plan, rules, num_groups, num_seeds, world.group_size))
        for world, plan in track(cases, "settings")
    ]


def arrival_rows(num_groups: int, num_seeds: int) -> list[dict[str, Any]]:
    cases = [(World(0.5, 3.0, 0.85, rate), size) for rate in (0.05, 0.3, 0.5) for size in (1, 4, 16)]
    rules: tuple[Rule, ...] = ("random", "balance", "gradient")
    return [
        asdict(world) | {"batch_size": size} | row_of(measure(world, PLAN, rules, num_groups, num_seeds, size))
        for world, size in track(cases, "arrival")
    ]


def worse_cells(rows: Sequence[Mapping[str, Any]], ours: str, num_errors: float = 2.0) -> list[dict[str, Any]]:
    """Where the rule is worse than random or balance by more than so many standard errors."""
    return [
        {"row": i, "than": other, **row[f"{ours}_minus_{other}"]}
        for i, row in enumerate(rows)
        for other in ("random", "balance")
        if row[f"{ours}_minus_{other}"]["mean"] < -num_errors * row[f"{ours}_minus_{other}"]["error"] - 1e-12
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: quality, plain / weighted / corrected; differences of the gradient rule with their errors."""
    rules = [rule for rule in RULES if rule in rows[0]]
    names = [name for name, value in rows[0].items() if not isinstance(value, Mapping)]
    gains = [name for name in rows[0] if "_minus_" in name]
    header = [*names, *rules, *gains]
    lines = ["| " + " | ".join(name.replace("_", " ") for name in header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [f"{row[name]:g}" for name in names]
        cells += [" / ".join(f"{row[rule][estimate]['mean']:.3f}" for estimate in ESTIMATES) for rule in rules]
        cells += [f"{row[gain]['mean']:+.3f} ± {row[gain]['error']:.3f}" for gain in gains]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=500, help="groups per seed and cell (default 500)")
    parser.add_argument("--seeds", type=int, default=8, help="seeds, from 2 on (default 8)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/pruning_gradient.json"))
    args = parser.parse_args()
    if args.seeds < 2 or args.groups < 2:
        parser.error("--seeds and --groups must be at least 2: there is no error of one")

    record = record_of_run(
        seed=1,
        workload={"groups": f"{args.seeds} seeds of {args.groups} groups per cell", "plan": asdict(PLAN)},
    )
    record["rules"] = rules_rows(args.groups, args.seeds)
    record["worse"] = {ours: worse_cells(record["rules"], ours) for ours in ("gradient", "history")}
    record["settings"] = settings_rows(args.groups, args.seeds)
    record["arrival"] = arrival_rows(args.groups, args.seeds)
    write_json(args.output, record)
    for part in ("rules", "settings", "arrival"):
        print(f"\n{part}\n\n{table(record[part])}")
    for ours, cells in record["worse"].items():
        Console().print(f"{ours}: worse than random or balance by more than two errors in {len(cells)} comparisons")
    Console().print(f"written to {args.output}")


if __name__ == "__main__":
    main()
