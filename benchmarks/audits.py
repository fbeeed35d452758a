"""What races make of labels, what audit groups take back of it, and what that costs.

Bias: a synthetic stream through the real rules (Learning). Groups of 8 wanted of 16; 31 % of all answers are right,
wrong ones longer by 0, 0.5 or 1.0 in log length; scores with an AUC of 0.80; rewards come for the first 8 that finish
and survive, after each step of 16 groups. What is believed, less what is true: mean success probability of all
candidates (`calibrated`), the report's success rate of all (`report`), and the trainer's weighted mean over
trajectories whose `inclusion_probability` is known (`estimate`). Mean and standard error over seeds.

Cost: log-normal lengths (0.7 in the logarithm), requests of so many prompts answered together. Length of the longest
candidate that a request waits for, and tokens generated, as multiples of what they are without redundancy.

Run from the repository root: python -m benchmarks.audits (some 5 minutes on one core).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import exp, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import record_of_run, write_json
from vllm_rollout.group.audit import AuditUnit, draw_audits
from vllm_rollout.group.learning import Learning
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.types import Confidence, Observation

NO_CONFIDENCE = Confidence(float("nan"), float("nan"), float("nan"))
RATE = 0.306
"""True success rate."""
SPREAD = 0.7
"""Of log lengths."""
GROUP_SIZE, NUM_CANDIDATES = 8, 16
GROUPS_PER_STEP = 16
GAP = 1.2
"""Between the mean scores of right and wrong answers, in their standard deviation: an AUC of 0.80."""
RACED = PruningPlan(16, keep_ratio=1.0, mode="shadow")
PRUNED = PruningPlan(16, keep_ratio=0.75)
WAYS = {"raced": RACED, "raced and pruned": PRUNED}
RATIOS = (0.0, 0.05, 0.1)
LONGER = (0.0, 0.5, 1.0)
NUM_PROMPTS = (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2000, help="of each stream; default %(default)s")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/audits.json"))
    args = parser.parse_args()
    workload = {
        "success_rate": RATE, "log_spread": SPREAD, "group_size": GROUP_SIZE, "num_candidates": NUM_CANDIDATES,
        "groups": args.groups, "groups_per_step": GROUPS_PER_STEP, "seeds": args.seeds,
    }  # fmt: skip
    record = record_of_run(seed=0, workload=workload)
    settings = [(way, longer, ratio) for way in WAYS for longer in LONGER for ratio in RATIOS]
    biases = []
    for way, longer, ratio in track(settings, "bias"):
        found = errors(plan=WAYS[way], longer=longer, audit_ratio=ratio, num_seeds=args.seeds, num_groups=args.groups)
        biases.append({"way": way, "longer": longer, "audit_ratio": ratio, **{k: summary(v) for k, v in found.items()}})
    costs = [cost(num, unit) for num in NUM_PROMPTS for unit in ("group", "rollout")]
    write_json(args.output, {**record, "bias": biases, "cost": costs})
    show(biases, costs, Console())


def stream(
    learning: Learning, *, plan: PruningPlan, audit_ratio: float, longer: float, num_groups: int, seed: int
) -> Iterator[tuple[Any, ...]]:
    """What a server and a trainer see: ("trajectory", audited, inclusion probability, right), ("q", probability)."""
    rng = Random(seed)
    audits = draw_audits(audit_ratio, seed, [str(number) for number in range(num_groups)], "group")
    awaited: list[tuple[Any, ...]] = []
    for number, audit in enumerate(audits):
        if number % GROUPS_PER_STEP == 0:
            for each in awaited:
                learning.reward(*each)
            awaited.clear()
        num_candidates = GROUP_SIZE if audit else NUM_CANDIDATES
        right = [rng.random() < RATE for _ in range(num_candidates)]
        lengths = [rng.gauss(0.0 if y else longer, SPREAD) for y in right]
        seen = {i: Observation(NO_CONFIDENCE, rng.gauss(GAP * y, 1.0), 1) for i, y in enumerate(right)}
        mode = "shadow" if audit else plan.mode
        of_group = PruningPlan(plan.detection_length, keep_ratio=plan.keep_ratio, mode=mode, audit=audit)
        assessments = learning.assess(of_group, seen, {}, seed=seed, group=str(number), at_least=0)
        kept = [i for i, each in assessments.items() if each.keep or mode == "shadow"]
        for index in sorted(kept, key=lengths.__getitem__)[:GROUP_SIZE]:
            origin = "audit" if audit else "race"
            awaited.append((seen[index], assessments[index], 99, right[index], str(number), mode == "active", origin))
            survival = 1.0 if mode == "shadow" else assessments[index].survival_probability
            yield "trajectory", audit, survival, right[index]
        for assessment in assessments.values():
            if assessment.success_probability is not None:
                yield "q", assessment.success_probability


def errors(*, num_seeds: int, num_groups: int, **settings: Any) -> dict[str, list[float]]:
    """What is believed less what is true, by seed; calibration over the second half of a stream."""
    found: dict[str, list[float]] = {"calibrated": [], "report": [], "estimate": []}
    for seed in range(num_seeds):
        learning = Learning(16)
        seen = list(stream(learning, seed=seed, num_groups=num_groups, **settings))
        qs = [each[1] for each in seen if each[0] == "q"]
        found["calibrated"].append(fmean(qs[len(qs) // 2 :]) - RATE)
        report = learning.report()
        part = report.active if settings["plan"].mode == "active" else report.shadow
        found["report"].append(part.positive_ratio - RATE)
        known = [(1 / each[2], each[3]) for each in seen if each[0] == "trajectory" and each[1]]
        if known:
            found["estimate"].append(sum(w * y for w, y in known) / sum(w for w, _ in known) - RATE)
    return {name: values for name, values in found.items() if values}


def summary(values: list[float]) -> dict[str, float]:
    return {"mean": fmean(values), "standard_error": stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0}


def cost(num_prompts: int, unit: AuditUnit, ratio: float = 0.05, num_requests: int = 2000) -> dict[str, Any]:
    """Of requests that race, of which a share is audited; a mean over requests."""
    rng = Random(0)
    waits: dict[str, list[float]] = {"plain": [], "raced": [], "audited": []}
    tokens: dict[str, list[float]] = {"plain": [], "raced": [], "audited": []}
    for number in range(num_requests):
        marks = draw_audits(ratio, number, [str(prompt) for prompt in range(num_prompts)], unit)
        wait, spent = dict.fromkeys(waits, 0.0), dict.fromkeys(waits, 0.0)
        for mark in marks:
            lengths = [exp(rng.gauss(0.0, SPREAD)) for _ in range(NUM_CANDIDATES)]
            last = sorted(lengths)[GROUP_SIZE - 1]
            plain = lengths[:GROUP_SIZE]
            of_way = {"plain": plain, "raced": [min(length, last) for length in lengths]}
            of_way["audited"] = of_way["plain" if mark else "raced"]
            for way, of_group in of_way.items():
                wait[way] = max(wait[way], *of_group)
                spent[way] += sum(of_group)
        for way in waits:
            waits[way].append(wait[way])
            tokens[way].append(spent[way])
    return {
        "num_prompts": num_prompts,
        "audit_unit": unit,
        "audit_ratio": ratio,
        "wait": {way: fmean(waits[way]) / fmean(waits["plain"]) for way in ("raced", "audited")},
        "tokens": {way: fmean(tokens[way]) / fmean(tokens["plain"]) for way in ("raced", "audited")},
    }


def show(biases: list[dict[str, Any]], costs: list[dict[str, Any]], console: Console) -> None:
    table = Table("way", "wrong longer by", "audits", "calibrated", "report", "estimate", title="believed - true")
    for row in biases:
        cells = [
            f"{row[name]['mean']:+.3f} ± {row[name]['standard_error']:.3f}" if name in row else "—"
            for name in ("calibrated", "report", "estimate")
        ]
        table.add_row(row["way"], f"{row['longer']}", f"{row['audit_ratio']:.0%}", *cells)
    console.print(table)
    table = Table("prompts", "unit", "wait, raced", "audited", "tokens, raced", "audited", title="over no redundancy")
    for row in costs:
        numbers = [f"{row[what][way]:.2f}" for what in ("wait", "tokens") for way in ("raced", "audited")]
        table.add_row(str(row["num_prompts"]), row["audit_unit"], *numbers)
    console.print(table)


if __name__ == "__main__":
    main()
