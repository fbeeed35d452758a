"""Pieces about groups that move between two engines on one device, with their KV blocks and without."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.common import median
from benchmarks.gpu_check.engine import Engine, Engines, Settings
from benchmarks.gpu_check.equal import EAGER, V1, V2
from benchmarks.gpu_check.pieces import Result

NUM_BEFORE, NUM_AFTER = 20, 40
"""Tokens of a candidate when it moves, and after it."""
CONTEXTS = (1_024, 4_096, 16_384, 30_000)
SMALL_CONTEXTS = (100, 200)
GROUP_SIZE = 8
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)


def move_tokens(engines: Engines) -> Result:
    """What a group says when it moves, against what it says when it stays, in float32."""
    result = Result()
    for name, environment in (("V1", V1), ("V2", V2)):
        settings = Settings(options={**EAGER, "dtype": "float32"} | SHARED, environment=environment)
        with engines.start_pair(settings) as (source, target):
            sampling = [{**fields, "max_tokens": NUM_BEFORE + NUM_AFTER} for fields in SAMPLING]
            prompt = prompt_of(1, 150)
            stays = f"{name}, stays"
            source.begin(stays, prompt, sampling)
            expected = in_order(source.end(stays))
            target.end(stays)
            for with_kv in (True, False):
                group = f"{name}, {'with' if with_kv else 'without'} KV"
                moved = move(source, target, group, prompt, sampling, with_kv)
                num_other = sum(a != b for a, b in zip(moved["said"], expected, strict=True))
                result.check(f"{group}: candidates that differ, of {len(expected)}", num_other == 0, num_other, 0)
                if with_kv:
                    check_way(result, engines, group, moved)
    return result


def move_8b(engines: Engines) -> Result:
    """Seconds of a move by context length: to take blocks along, and to compute them again."""
    result = Result()
    contexts = SMALL_CONTEXTS if engines.small else CONTEXTS
    group_size, repeats = (2, 1) if engines.small else (GROUP_SIZE, 5)
    length = {"max_model_len": 512 if engines.small else 32_768}
    seconds: dict[str, dict[str, Any]] = {}
    with engines.start_pair(Settings(model="8b", options={"max_num_seqs": 64, **SHARED, **length})) as (source, target):
        for context in contexts:
            prompt = prompt_of(context, context)
            sampling = [{"seed": index, "max_tokens": NUM_BEFORE + NUM_AFTER} for index in range(group_size)]
            rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
            for repeat in range(1 + repeats):  # the first one warms up
                for with_kv, found in rows.items():
                    found.append(move(source, target, f"{context}.{repeat}.{with_kv}", prompt, sampling, with_kv))
            check_way(result, engines, f"{context} tokens", rows[True][-1])
            seconds[str(context)] = {
                "kv": medians(rows[True][1:]),
                "recompute": medians(rows[False][1:]),
                "num_blocks": rows[True][-1]["num_blocks"],
            }
    result.values["seconds_by_context"] = seconds
    if not engines.small:
        kv, again = (seconds[str(contexts[-1])][way]["first_token_s"] for way in ("kv", "recompute"))
        result.check(f"a move of {contexts[-1]} tokens with KV takes less than without", kv < again, kv, again)
    return result


SHARED = {"gpu_memory_utilization": 0.42, "enable_prefix_caching": True}
"""Two engines on one device."""


def move(
    source: Engine, target: Engine, group: str, prompt: list[int], sampling: list[dict[str, Any]], with_kv: bool
) -> dict[str, Any]:
    """One move in the middle of a group, and what both engines said together; both are empty afterwards."""
    source.begin(group, prompt, sampling)
    source.until(group, NUM_BEFORE)
    released = source.release(group)
    adopted = target.adopt(group, released.pop("parcel"), with_kv)
    source.confirm(group)
    before, after = released.pop("said"), target.end(group)
    source.end(group)
    return {**released, **adopted, "said": in_order({id: before.get(id, []) + said for id, said in after.items()})}


def in_order(said: dict[str, list[int]]) -> list[list[int]]:
    """By candidate."""
    return [said[id] for id in sorted(said)]


def check_way(result: Result, engines: Engines, what: str, moved: dict[str, Any]) -> None:
    way = "host_memory" if engines.small else "cuda_ipc"
    result.check(f"{what}: blocks went by {way}", moved["ways"] == [way], moved["ways"], [way])
    arrived, sent = moved["num_blocks_in"], moved["num_blocks"]
    result.check(f"{what}: blocks that arrived", arrived == sent > 0, arrived, sent)


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in ("release_s", "adopt_s", "first_token_s")}


def prompt_of(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(10, 200) for _ in range(length)]
