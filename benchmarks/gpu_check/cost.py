"""Pieces that measure: overhead against stock vLLM, a race, the profile."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack

from benchmarks.common import median, quartiles
from benchmarks.gpu_check.engine import Engine, Engines, Settings, Wanted
from benchmarks.gpu_check.pieces import Result

GROUP = 16
WANTED = {"idle": 0.995, "tagged": 0.99}
ORDER = ("stock", "idle", "tagged")
PROFILE_ARGUMENTS = (
    *("--batch-sizes", "1,2,4,8,16,32,64,128,192,256", "--contexts", "128,2048", "--"),
    *("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096", "--max-num-seqs", "256"),
)


def overhead_256(engines: Engines) -> Result:
    return overhead(engines, num_seqs=256, max_tokens=256)


def overhead_1024(engines: Engines) -> Result:
    return overhead(engines, num_seqs=1024, max_tokens=128)


def overhead(engines: Engines, num_seqs: int, max_tokens: int) -> Result:
    """Stock and ours on one GPU, in turn; a ratio is taken within a repeat. The first repeat warms up."""
    result = Result()
    repeats = 1 if engines.small else 9
    if engines.small:
        num_seqs, max_tokens = GROUP, 8
    options = {"max_num_seqs": num_seqs, "gpu_memory_utilization": 0.42}
    ratios: dict[str, list[float]] = {way: [] for way in WANTED}
    seconds_of_stock = []
    with ExitStack() as stack:
        ours: Engine = stack.enter_context(engines.start(Settings("rollout", "8b", options)))
        stock: Engine = stack.enter_context(engines.start(Settings("stock", "8b", options)))
        order = list(ORDER)
        for repeat in range(repeats + 1):
            order.append(order.pop(0))
            seconds = {}
            for way in order:
                requests = groups(num_seqs // GROUP, [max_tokens] * GROUP, tagged=way == "tagged")
                engine = stock if way == "stock" else ours
                seconds[way] = engine.run(requests)["seconds"]
            if repeat:
                seconds_of_stock.append(seconds["stock"])
                for way, values in ratios.items():
                    values.append(seconds["stock"] / seconds[way])
    result.values["step_ms_stock"] = round(1000 * median(seconds_of_stock) / max_tokens, 3)
    for way, values in ratios.items():
        result.values[way] = quartiles(values)
        enough = median(values) >= WANTED[way] or engines.small
        result.check(f"{way}: throughput over stock's", enough, round(median(values), 4), WANTED[way])
    return result


def groups(
    num_groups: int, lengths: list[int], *, tagged: bool, group_size: int = GROUP, ends: bool = False
) -> list[Wanted]:
    """One candidate per length in every group; `ends`: by itself, so that it is valid."""
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
        )
        for group in range(num_groups)
        for index, length in enumerate(lengths)
    ]


def race_8b(engines: Engines) -> Result:
    """16 candidates of which 8 are wanted, lengths log-normal with a median of 300 tokens, the same in every way."""
    result = Result()
    rng = random.Random(0)
    longest = 20 if engines.small else 900
    middle = 8 if engines.small else 300
    lengths = [max(4, min(longest, round(middle * rng.lognormvariate(0, 0.8)))) for _ in range(GROUP)]
    num_groups = 1 if engines.small else 16
    seconds: dict[str, list[float]] = {"all of 16": [], "first 8 of 16": []}
    with engines.start(
        Settings("rollout", "8b", {"max_num_seqs": num_groups * GROUP, "max_model_len": 2048})
    ) as engine:
        for repeat in range(2 if engines.small else 6):
            for way, group_size in (("all of 16", GROUP), ("first 8 of 16", GROUP // 2)):
                answer = engine.run(groups(num_groups, lengths, tagged=True, group_size=group_size, ends=True))
                states = Counter(candidate["state"] for candidate in answer["candidates"])
                if repeat:
                    seconds[way].append(answer["seconds"])
                if group_size < GROUP:
                    enough = states == Counter(finished=num_groups * group_size, surplus=num_groups * group_size)
                    result.check(f"run {repeat}: 8 of each group finish, 8 are stopped", enough, dict(states))
                    tokens = sum(len(candidate["tokens"]) for candidate in answer["candidates"])
    result.values |= {way: median(values) for way, values in seconds.items()}
    result.values["lengths"] = lengths
    result.values["share_of_tokens"] = round(tokens / (num_groups * sum(lengths)), 3)
    speedup = median(seconds["all of 16"]) / median(seconds["first 8 of 16"])
    result.check("the race is faster than waiting for all", speedup > 1 or engines.small, round(speedup, 3), "> 1")
    return result


def profile_8b(engines: Engines) -> Result:
    result = Result()
    written = engines.profile("8b", *PROFILE_ARGUMENTS)
    result.values["fits"] = written["fits"]
    result.check("curves were fitted", bool(written["fits"]), len(written["fits"]), "> 0")
    return result
