"""Pieces that run the same requests in two ways and compare what comes out, and those in which vLLM itself fails a step
that does what it should not."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.engine import Engines, Settings, Wanted
from benchmarks.gpu_check.pieces import Result

DETECTION_LENGTH = 12
COMPILED = {"max_num_seqs": 64}
EAGER = {**COMPILED, "enforce_eager": True}
GRAPHS = {**COMPILED, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}
"""Nothing is compiled, so that graphs run the kernels that eager mode runs."""
V1, V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def scored_groups(engines: Engines, *, expect: bool = False) -> list[Wanted]:
    """Groups of 4 whose candidates end at different lengths, most after their detection; every third one is a stranger
    that belongs to no group."""
    num_groups = 1 if engines.small else 12
    requests = []
    for group in range(num_groups):
        for index in range(4):
            requests.append(
                Wanted(
                    prompt=[3 + group, 4, 5, 6, 7, *range(8, 8 + 3 * index)],
                    max_tokens=8 + 6 * index + group,
                    seed=10 * group + index,
                    group=f"g{group}",
                    index=index,
                    group_size=4,
                    num_candidates=4,
                    detection_length=DETECTION_LENGTH,
                    expect=expect,
                )
            )
        requests.append(Wanted(prompt=[3 + group, 9], max_tokens=20, seed=group))
    return requests


def run_scored(engines: Engines, settings: Settings, *, expect: bool = False) -> list[dict[str, Any]]:
    with engines.start(settings) as engine:
        engine.publish_head(DETECTION_LENGTH)
        return engine.run(scored_groups(engines, expect=expect))["candidates"]


def compare(result: Result, what: str, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """All equal, to the last bit."""
    num_other = sum(a != b for a, b in zip(first, second, strict=True))
    result.check(f"{what}: candidates that differ, of {len(first)}", num_other == 0, num_other, 0)
    num_scored = sum(candidate.get("score") is not None for candidate in first)
    result.check(f"{what}: candidates were scored", num_scored > 0, num_scored, "> 0")


def launch_blocking(engines: Engines) -> Result:
    result = Result()
    ordinary = run_scored(engines, Settings(options=COMPILED))
    blocking = run_scored(engines, Settings(options=COMPILED, environment={"CUDA_LAUNCH_BLOCKING": "1"}))
    compare(result, "with and without CUDA_LAUNCH_BLOCKING", ordinary, blocking)
    return result


def graphs(engines: Engines) -> Result:
    """A batch is padded to the size of a graph, for which a matrix product may be another kernel: scores of the same
    tokens are compared to 1e-3."""
    result = Result()
    options = {"dtype": "float32"}
    eager = run_scored(engines, Settings(options={**EAGER, **options}))
    graph = run_scored(engines, Settings(options={**GRAPHS, **options}))
    pairs = [
        (a["score"], b["score"])
        for a, b in zip(eager, graph, strict=True)
        if a.get("score") and a["tokens"][:DETECTION_LENGTH] == b["tokens"][:DETECTION_LENGTH]
    ]
    num_scored = sum(candidate.get("score") is not None for candidate in eager)
    result.check("same tokens up to the detection", len(pairs) >= 0.9 * num_scored > 0, len(pairs), 0.9 * num_scored)
    furthest = max((abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)), default=None)
    result.check("largest difference of a score", furthest is not None and furthest < 1e-3, furthest, 1e-3)
    return result


def runner_loops(engines: Engines) -> Result:
    result = Result()
    loops = {
        "V1, synchronous": (V1, False),
        "V1, asynchronous": (V1, True),
        "V2, asynchronous": (V2, True),
    }
    for name, (environment, asynchronous) in loops.items():
        options = {**EAGER, "dtype": "float32", "async_scheduling": asynchronous}
        candidates = run_scored(engines, Settings(options=options, environment=environment), expect=True)
        of_groups = [candidate for candidate in candidates if "state" in candidate]
        unseen = sum(candidate["confidence"] is None for candidate in of_groups)
        result.check(f"{name}: candidates without a confidence", unseen == 0, unseen, 0)
        furthest = max(
            abs(seen - expected)
            for candidate in of_groups
            for seen, expected in zip(candidate["confidence"] or (9.9, 9.9), candidate["expected"], strict=True)
        )
        result.check(f"{name}: confidence against log probabilities", furthest < 2e-3, furthest, 2e-3)
        num_scored = sum(candidate.get("score") is not None for candidate in of_groups)
        wanted = sum(len(candidate["tokens"]) >= DETECTION_LENGTH for candidate in of_groups)
        result.check(f"{name}: candidates scored", num_scored == wanted > 0, num_scored, wanted)
    return result


def sleep(engines: Engines) -> Result:
    result = Result()
    options = {**EAGER, "enable_sleep_mode": not engines.small}
    with engines.start(Settings(options=options)) as engine:
        engine.publish_head(DETECTION_LENGTH)
        before = engine.run(scored_groups(engines))["candidates"]
        engine.sleep_and_wake()
        after = engine.run(scored_groups(engines))["candidates"]
    compare(result, "before and after sleep", before, after)
    return result


def sync_check(engines: Engines) -> Result:
    return steps_pass(engines, Settings(options=COMPILED, environment={"VLLM_GPU_SYNC_CHECK": "error"}))


def jit_monitor(engines: Engines) -> Result:
    return steps_pass(engines, Settings(options={**COMPILED, "jit_monitor_mode": "error"}))


def steps_pass(engines: Engines, settings: Settings) -> Result:
    """Prefills in chunks, strangers, groups that stop and candidates that are scored, three times over: the first step
    of each kind is where a kernel would be compiled."""
    result = Result()
    chunks = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    chunked = Settings(options={**settings.options, **chunks}, environment=settings.environment)
    with engines.start(chunked) as engine:
        engine.publish_head(DETECTION_LENGTH)
        for number in range(3):
            candidates = engine.run(scored_groups(engines))["candidates"]
            finished = sum(candidate["finish_reason"] == "length" for candidate in candidates)
            result.check(f"run {number}: requests that ended", finished == len(candidates), finished, len(candidates))
    return result
