"""The piece about drafts from memory: their gain if all are right, and the cost of their loop if none is."""

from __future__ import annotations

from benchmarks.common import median, quartiles
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.engine import Engine, Wanted

GROUP = 16


def drafts(bench: Bench) -> None:
    """Greedy candidates, whose tokens are the same each time.

    Told: prompts that have run once, so that all drafts are right. New: new prompts, whose siblings run side by side,
    so that the synchronous loop of runner V1 is paid for nothing.
    """
    drafting, plain = bench.engines.values()
    num_groups, max_tokens = (1, 12) if bench.small else (4, 192)
    told = [_group(f"told{number}", number, max_tokens) for number in range(num_groups)]
    told = [each for group in told for each in group]
    ratios: dict[str, list[float]] = {"told": [], "new": []}
    for repeat in range(2 if bench.small else 4):
        new = [
            each
            for number in range(num_groups)
            for each in _group(f"new{repeat}.{number}", 1000 + 10 * repeat + number, max_tokens, temperature=1.0)
        ]
        seconds: dict[tuple[str, str], float] = {}
        tokens: dict[str, list[list[int]]] = {}
        for what, requests in (("told", told), ("new", new)):
            for way, engine in (("drafts", drafting), ("none", plain)):
                seconds[what, way], said = _run(engine, requests)
                bench.value(repeat=repeat, candidates=what, way=way, seconds=round(seconds[what, way], 4))
                if what == "told":
                    tokens[way] = said
        if repeat:  # the first one tells
            for what, values in ratios.items():
                values.append(seconds[what, "none"] / seconds[what, "drafts"])
                bench.result(f"{what}: times as fast as V2, asynchronous, without drafts", quartiles(values))
    lengths = {way: [len(each) for each in said] for way, said in tokens.items()}
    bench.check("as many tokens with drafts as without", lengths["drafts"] == lengths["none"], lengths["drafts"][:4])
    bench.speed("right drafts are faster", median(ratios["told"]) > 1, round(median(ratios["told"]), 3), "> 1")


def _run(engine: Engine, requests: list[Wanted]) -> tuple[float, list[list[int]]]:
    answer = engine.run(requests)
    return answer["seconds"], [candidate["tokens"] for candidate in answer["candidates"]]


def _group(key: str, number: int, max_tokens: int, temperature: float = 0.0) -> list[Wanted]:
    return [
        Wanted(
            prompt=[3 + (11 * number + i) % 400 for i in range(48)],
            max_tokens=max_tokens,
            seed=index,
            temperature=temperature,
            group=key,
            index=index,
            group_size=GROUP,
            num_candidates=GROUP,
        )
        for index in range(GROUP)
    ]
