"""Pieces that compare speeds of a model of 8B's shape, ours and stock's in turn on one card."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from benchmarks.common import median, quartiles
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.engine import Engine, Wanted

GROUP = 16
REPEATS = 6
WANTED_RATIOS = {"idle": 0.995, "tagged": 0.99, "scored": 0.99}
WAYS = ("stock", *WANTED_RATIOS)
DETECTION_LENGTH = 128
TRAIN_BUDGETS_S = (0.0, 0.005)


def groups(
    num_groups: int,
    lengths: list[int],
    *,
    tagged: bool,
    group_size: int = GROUP,
    ends: bool = False,
    detection_length: int | None = None,
) -> list[Wanted]:
    """One candidate per length in every group. With `ends` a candidate ends by itself, so that it is valid."""
    return [
        Wanted(
            prompt=[3 + (7 * group + i) % 400 for i in range(64)],
            max_tokens=2 * length if ends else length,
            ends_at=length if ends else None,
            group=f"g{group}" if tagged else None,
            index=index,
            group_size=group_size,
            num_candidates=len(lengths),
            early_stop=group_size < len(lengths),
            detection_length=detection_length,
        )
        for group in range(num_groups)
        for index, length in enumerate(lengths)
    ]


def overhead(bench: Bench) -> None:
    """Stock and ours in turn. A ratio is taken within a repeat, and the first repeat warms up.

    The last run of each is timed step by step, in the same way for both. In one step of `scored` all 256 candidates are
    due.
    """
    ours, stock = bench.engines.values()
    num_seqs, max_tokens, due_at = (GROUP, 12, 6) if bench.small else (256, 256, DETECTION_LENGTH)
    ours.publish_head(due_at)
    requests = {
        way: groups(num_seqs // GROUP, [max_tokens] * GROUP, tagged=way in ("tagged", "scored"),
                    detection_length=due_at if way == "scored" else None)
        for way in WAYS
    }  # fmt: skip
    ratios: dict[str, list[float]] = {way: [] for way in WANTED_RATIOS}
    order, seconds = list(WAYS), {}
    for repeat in range(2 if bench.small else REPEATS + 1):
        if repeat > 3 and not bench.time_for_another(2 * sum(seconds.values())):
            break
        order.append(order.pop(0))
        for way in order:
            answer = (stock if way == "stock" else ours).run(requests[way])
            seconds[way] = answer["seconds"]
            preempted = sum(candidate.get("num_preemptions", 0) for candidate in answer["candidates"])
            bench.value(repeat=repeat, way=way, seconds=round(seconds[way], 4), preemptions=preempted)
        for way, values in ratios.items() if repeat else ():
            values.append(seconds["stock"] / seconds[way])
            bench.result(f"{way}: throughput over stock's", quartiles(values))
    for way, values in ratios.items():
        bench.speed(
            f"{way}: throughput over stock's", median(values) >= WANTED_RATIOS[way], median(values), WANTED_RATIOS[way]
        )
    steps = {way: (stock if way == "stock" else ours).run(requests[way], watch_steps=True)["step_ms"] for way in WAYS}
    for way, step_ms in steps.items():
        bench.value(way=way, step_ms=[round(ms, 3) for ms in step_ms])
    bench.result("median step, ms", {way: round(median(step_ms), 3) for way, step_ms in steps.items()})
    bench.result("the due step takes longer by, ms", round(due_step_ms(steps["scored"], due_at), 3))


def due_step_ms(step_ms: list[float], due_at: int) -> float:
    """Milliseconds by which the slowest step around the detection exceeds the median."""
    around = step_ms[max(0, due_at - 4) : due_at + 4]
    return max(around) - median(step_ms)


def log_normal_lengths(small: bool) -> list[int]:
    """16 lengths with a median of 300 tokens, the same in every run."""
    rng = random.Random(0)
    longest, middle = (20, 8) if small else (900, 300)
    return [max(4, min(longest, round(middle * rng.lognormvariate(0, 0.8)))) for _ in range(GROUP)]


def race(bench: Bench) -> None:
    """16 candidates of which 8 are wanted: stock and ours wait for all, and ours stops the other 8."""
    ours, stock = bench.engines.values()
    lengths = log_normal_lengths(bench.small)
    num_groups = 1 if bench.small else 16
    ways: dict[str, tuple[Engine, list[Wanted]]] = {
        "stock waits for all": (stock, groups(num_groups, lengths, tagged=False, ends=True)),
        "ours waits for all": (ours, groups(num_groups, lengths, tagged=True, ends=True)),
        "ours, first 8": (ours, groups(num_groups, lengths, tagged=True, group_size=GROUP // 2, ends=True)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    took = 0.0
    for repeat in range(2 if bench.small else 4):
        if repeat > 1 and not bench.time_for_another(took):
            break
        took = 0.0
        for way, (engine, requests) in ways.items():
            answer = engine.run(requests)
            took += answer["seconds"]
            num_tokens = sum(len(candidate["tokens"]) for candidate in answer["candidates"])
            bench.value(repeat=repeat, way=way, seconds=round(answer["seconds"], 4), num_tokens=num_tokens)
            if repeat:
                seconds[way].append(answer["seconds"])
            if way == "ours, first 8":
                check_states(bench, repeat, num_groups, answer["candidates"])
                bench.result("share of tokens", round(num_tokens / (num_groups * sum(lengths)), 3))
        for way in ways if repeat else ():
            pairs = zip(seconds["stock waits for all"], seconds[way], strict=True)
            bench.result(f"{way}: times as fast as stock", quartiles([a / b for a, b in pairs]))
    gain = median(seconds["stock waits for all"]) / median(seconds["ours, first 8"])
    bench.speed("the race is faster than stock's waiting for all", gain > 1, round(gain, 3), "> 1")


def check_states(bench: Bench, repeat: int, num_groups: int, candidates: list[dict[str, Any]]) -> None:
    states = Counter(candidate["state"] for candidate in candidates)
    half = num_groups * GROUP // 2
    enough = states == Counter(finished=half, surplus=half)
    bench.check(f"run {repeat}: 8 of each group finish, 8 are stopped", enough, dict(states))


def training(bench: Bench) -> None:
    """Throughput of the same candidates with a head that trains between steps, and without one."""
    (engine,) = bench.engines.values()
    num_seqs, max_tokens, num_rows = (GROUP, 12, 64) if bench.small else (256, 96, 4096)
    requests = groups(num_seqs // GROUP, [max_tokens] * GROUP, tagged=True)
    ratios = []
    for repeat in range(2 if bench.small else 4):
        seconds = {}
        for budget_s in TRAIN_BUDGETS_S:
            answer = engine.train_beside(requests, num_rows, budget_s)
            seconds[budget_s] = answer["seconds"]
            bench.value(repeat=repeat, budget_ms=1e3 * budget_s, seconds=round(answer["seconds"], 4),
                        step_ms=round(median(answer["step_ms"]), 3),
                        train_ms=round(median(answer["train_ms"]), 3) if answer["train_ms"] else None)  # fmt: skip
        bench.check(f"run {repeat}: the head was trained", answer["num_trained_steps"] > 0, answer["num_trained_steps"])
        if repeat:
            ratios.append(seconds[0.0] / seconds[TRAIN_BUDGETS_S[-1]])
            bench.result("throughput while a head trains 5 ms after each step, over none", quartiles(ratios))
