"""Bias of labels by races, how far audit groups remove it, and the cost of audits.

Bias: a synthetic stream through the real rules (Learning). Groups want 8 of 16 candidates. 31 % of all answers are
right. Wrong answers are longer by 0, 0.5 or 1.0 in log length. Scores have an AUC of 0.80. After each step of 16
groups, rewards come for the first 8 that finish and survive. Each error is an estimate minus the truth: mean success
probability of all candidates (`calibrated`), the report's success rate of all (`report`), and the trainer's weighted
mean over trajectories whose `inclusion_probability` is known (`estimate`). Mean and standard error over seeds.

Cost: log-normal lengths (0.7 in the logarithm), requests whose prompts are answered together. Results are the length of
the longest candidate that a request waits for, and the tokens generated, as multiples of those without redundancy.

Run from the repository root: python -m benchmarks.audits (some 5 minutes on two cores).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import exp, sqrt
from random import Random
from statistics import fmean, stdev
from typing import Any

from rich.progress import track

from benchmarks.common import arguments_of, publish, record_of_run
from benchmarks.tables import Row, columns
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.audit import AuditTurns, AuditUnit, draw_audit
from vllm_rollout.parts.pruning.rules.learning import REPORT_WINDOW, Learning, Siblings
from vllm_rollout.parts.pruning.rules.pruning_plan import Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.report import rules_report

NO_NUMBER = float("nan")
RATE = 0.306
"""The true success rate of all answers."""
SPREAD = 0.7
"""Standard deviation of log lengths."""
GROUP_SIZE, NUM_CANDIDATES = 8, 16
GROUPS_PER_STEP = 16
GAP = 1.2
"""Difference of the mean scores of right and wrong answers, in standard deviations: an AUC of 0.80."""
RACED = PruningPlan(16, keep_ratio=1.0, mode="shadow")
PRUNED = PruningPlan(16, keep_ratio=0.75)
WAYS = {"raced": RACED, "raced and pruned": PRUNED}
RATIOS = (0.0, 0.05, 0.1)
LONGER = (0.0, 0.5, 1.0)
NUM_PROMPTS = (1, 16, 64)


def main() -> None:
    parser = arguments_of(__doc__, "audits", repeats=8)
    parser.add_argument("--groups", type=int, default=2000, help="groups per stream (default %(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    workload = {
        "success_rate": RATE, "log_spread": SPREAD, "group_size": GROUP_SIZE, "num_candidates": NUM_CANDIDATES,
        "groups": arguments.groups, "groups_per_step": GROUPS_PER_STEP, "seeds": arguments.repeats,
    }  # fmt: skip
    record = record_of_run(seed=arguments.seed, workload=workload)
    cases = [
        {"way": way, "longer": longer, "audit_ratio": ratio} for way, longer, ratio in product(WAYS, LONGER, RATIOS)
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        found = [pool.submit(errors_of, case, arguments.repeats, arguments.groups, arguments.seed) for case in cases]
        prices = [pool.submit(cost, num, unit) for num in NUM_PROMPTS for unit in ("group", "rollout")]
        record["bias"] = [case | each.result() for case, each in track(list(zip(cases, found, strict=True)))]
    record["cost"] = [each.result() for each in prices]
    publish(arguments, record, tables)


def errors_of(case: Row, num_seeds: int, num_groups: int, first_seed: int) -> dict[str, dict[str, float]]:
    settings = {"plan": WAYS[case["way"]], "longer": case["longer"], "audit_ratio": case["audit_ratio"]}
    found = errors(num_seeds=num_seeds, num_groups=num_groups, first_seed=first_seed, **settings)
    return {name: summary(values) for name, values in found.items()}


def observation(logit: float | None, confidence: float = NO_NUMBER) -> Observation:
    return Observation(Confidence(confidence, confidence, confidence), logit, 1)


def stream(
    learning: Learning,
    *,
    plan: PruningPlan,
    audit_ratio: float,
    num_groups: int,
    seed: int,
    longer: float = 0.5,
) -> Iterator[tuple[Any, ...]]:
    """Events that server and trainer get: ("trajectory", audited, inclusion probability, right), ("q", probability,
    right) and ("scored", right).

    longer: how much longer wrong answers are, in log length.
    """
    rng = Random(seed)
    awaited: list[tuple[Any, ...]] = []
    for number in range(num_groups):
        if number % GROUPS_PER_STEP == 0:
            for each in awaited:
                learning.reward(*each)
            awaited.clear()
        audit = draw_audit(audit_ratio, seed, str(number), number)
        num_candidates = GROUP_SIZE if audit else NUM_CANDIDATES
        right = [rng.random() < RATE for _ in range(num_candidates)]
        lengths = [rng.gauss(0.0 if y else longer, SPREAD) for y in right]
        seen = {i: observation(rng.gauss(GAP * y, 1.0)) for i, y in enumerate(right)}
        of_group = plan.audited(races=True) if audit else plan
        assessments = learning.assess(of_group, seen, Siblings(seed, str(number), at_least=0))
        kept = [i for i, each in assessments.items() if each.keep or of_group.mode == "shadow"]
        for index in sorted(kept, key=lengths.__getitem__)[:GROUP_SIZE]:
            origin, active = "audit" if audit else "race", of_group.mode == "active"
            awaited.append((seen[index], assessments[index], 99, right[index], str(number), active, origin))
            yield "trajectory", audit, assessments[index].survival_probability if active else 1.0, right[index]
        for index, assessment in assessments.items():
            yield "scored", right[index]
            if assessment.success_probability is not None:
                yield "q", assessment.success_probability, right[index]


def errors(*, num_seeds: int, num_groups: int, first_seed: int = 0, **settings: Any) -> dict[str, list[float]]:
    """Estimate minus truth, one value per seed. Calibration is taken over the second half of a stream."""
    found: dict[str, list[float]] = {"calibrated": [], "report": [], "estimate": []}
    for seed in range(first_seed, first_seed + num_seeds):
        learning = Learning(16)
        seen = list(stream(learning, seed=seed, num_groups=num_groups, **settings))
        qs = [each[1] - each[2] for each in seen if each[0] == "q"]
        found["calibrated"].append(fmean(qs[len(qs) // 2 :]))
        report = rules_report(learning.outcomes(), learning.num_judged, learning.num_pruned, learning.audit_report())
        part = report.active if settings["plan"].mode == "active" else report.shadow
        scored = [each[1] for each in seen if each[0] == "scored"]
        found["report"].append(part.positive_ratio - fmean(scored[-REPORT_WINDOW * NUM_CANDIDATES // GROUP_SIZE :]))
        known = [(1 / each[2], each[3]) for each in seen if each[0] == "trajectory" and each[1]]
        if known:
            found["estimate"].append(sum(w * y for w, y in known) / sum(w for w, _ in known) - fmean(scored))
    return {name: values for name, values in found.items() if values}


def summary(values: list[float]) -> dict[str, float]:
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": fmean(values), "standard_error": error, "rms": sqrt(fmean(value * value for value in values))}


def cost(num_prompts: int, unit: AuditUnit, ratio: float = 0.05, num_requests: int = 2000) -> dict[str, Any]:
    """Cost of auditing a share `ratio` of raced requests, as means over requests."""
    rng, turns = Random(0), AuditTurns()
    waits: dict[str, list[float]] = {"plain": [], "raced": [], "audited": []}
    tokens: dict[str, list[float]] = {"plain": [], "raced": [], "audited": []}
    for number in range(num_requests):
        if unit == "rollout":
            marks = [turns.take("", ratio)] * num_prompts
        else:
            marks = [draw_audit(ratio, number, str(prompt), prompt) for prompt in range(num_prompts)]
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


def tables(record: Row) -> str:
    def believed(name: str) -> Callable[[Row], str]:
        return lambda row: f"{row[name]['mean']:+.3f} ± {row[name]['standard_error']:.3f}" if name in row else "—"

    biases = columns("Believed less what is true", record["bias"], {
        "way": lambda row: row["way"],
        "wrong longer by": lambda row: f"{row['longer']}",
        "audits": lambda row: f"{row['audit_ratio']:.0%}",
        **{name: believed(name) for name in ("calibrated", "report", "estimate")},
    })  # fmt: skip
    costs = columns("What is waited for and generated, over no redundancy", record["cost"], {
        "prompts": lambda row: f"{row['num_prompts']}",
        "audited by": lambda row: row["audit_unit"],
        **{
            f"{what}, {way}": lambda row, what=what, way=way: f"{row[what][way]:.2f}"
            for what in ("wait", "tokens")
            for way in ("raced", "audited")
        },
    })  # fmt: skip
    return "\n\n".join([biases, costs])


if __name__ == "__main__":
    main()
