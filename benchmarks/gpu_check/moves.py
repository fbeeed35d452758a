"""Pieces about groups that move between two engines on one device, with their KV blocks and without."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.common import median
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.engine import Engine

NUM_BEFORE, NUM_AFTER = 20, 40
"""Tokens of a candidate before its move, and after it."""
CONTEXTS = (1_024, 4_096, 16_384, 30_000)
SMALL_CONTEXTS = (100, 200)
GROUP_SIZE = 8
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)


def move_float32(bench: Bench) -> None:
    move_tokens(bench, ways=(True, False))


def move_bfloat16(bench: Bench) -> None:
    """Move with KV only, because recomputing in bfloat16 may round differently."""
    move_tokens(bench, ways=(True,))


def move_tokens(bench: Bench, ways: tuple[bool, ...]) -> None:
    """Tokens of a group that moves, against tokens of the same group when it stays."""
    source, target = bench.engines.values()
    sampling = [{**fields, "max_tokens": NUM_BEFORE + NUM_AFTER} for fields in SAMPLING]
    prompt = prompt_of(1, 150)
    source.begin("stays", prompt, sampling)
    expected = in_order(source.end("stays"))
    target.end("stays")
    for with_kv in ways:
        group = "with KV" if with_kv else "without KV"
        moved = move(source, target, group, prompt, sampling, with_kv)
        num_other = sum(a != b for a, b in zip(moved["said"], expected, strict=True))
        bench.check(f"{group}: candidates that differ, of {len(expected)}", num_other == 0, num_other, 0)
        if with_kv:
            check_way(bench, group, moved)


def move_8b(bench: Bench) -> None:
    """Seconds of a move by context length, with the KV blocks moved, and with the KV blocks computed again."""
    source, target = bench.engines.values()
    contexts = SMALL_CONTEXTS if bench.small else CONTEXTS
    group_size, repeats = (2, 1) if bench.small else (GROUP_SIZE, 5)
    seconds: dict[str, dict[str, Any]] = {}
    for context in contexts:
        prompt = prompt_of(context, context)
        sampling = [{"seed": index, "max_tokens": NUM_BEFORE + NUM_AFTER} for index in range(group_size)]
        rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for repeat in range(1 + repeats):  # the first one warms up
            for with_kv, found in rows.items():
                moved = move(source, target, f"{context}.{repeat}.{with_kv}", prompt, sampling, with_kv)
                found.append(moved)
                took = {name: round(value, 5) for name, value in moved.items() if name.endswith("_s")}
                bench.value(context=context, repeat=repeat, with_kv=with_kv, num_blocks=moved["num_blocks"], **took)
        check_way(bench, f"{context} tokens", rows[True][-1])
        seconds[str(context)] = {"kv": medians(rows[True][1:]), "recompute": medians(rows[False][1:])}
        bench.result("seconds by context", seconds)
    kv, again = (seconds[str(contexts[-1])][way]["first_token_s"] for way in ("kv", "recompute"))
    bench.speed(f"a move of {contexts[-1]} tokens with KV takes less than without", kv < again, kv, again)


def move(
    source: Engine, target: Engine, group: str, prompt: list[int], sampling: list[dict[str, Any]], with_kv: bool
) -> dict[str, Any]:
    """One move in the middle of a group: times, and the tokens of both engines. Both are empty afterwards."""
    source.begin(group, prompt, sampling)
    source.until(group, NUM_BEFORE)
    released = source.release(group)
    adopted = target.adopt(group, released.pop("parcel"), with_kv)
    source.confirm(group)
    before, after = released.pop("said"), target.end(group)
    source.end(group)
    return {**released, **adopted, "said": in_order({id: before.get(id, []) + said for id, said in after.items()})}


def in_order(said: dict[str, list[int]]) -> list[list[int]]:
    """Tokens in the order of candidates."""
    return [said[id] for id in sorted(said)]


def check_way(bench: Bench, what: str, moved: dict[str, Any]) -> None:
    way = "host_memory" if bench.small else "cuda_ipc"
    bench.check(f"{what}: blocks went by {way}", moved["ways"] == [way], moved["ways"], [way])
    arrived, sent = moved["num_blocks_in"], moved["num_blocks"]
    bench.check(f"{what}: blocks that arrived", arrived == sent > 0, arrived, sent)


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in ("release_s", "adopt_s", "first_token_s")}


def prompt_of(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(10, 200) for _ in range(length)]
