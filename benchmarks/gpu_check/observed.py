"""Pieces about values that engines observe: against torch, and against the same engine run in another way.

Some run in modes in which vLLM itself fails a step that synchronizes or compiles.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.engine import Engine, EngineError, Wanted
from benchmarks.gpu_check.truth import Truth

DETECTION_LENGTH = 12
MOST_DIFFERENCE = {"cuda": 5e-3, "cpu": 1e-4}
"""Largest difference of a confidence or a score in float32. Attention kernels of a GPU multiply in tf32."""


def scored_groups(bench: Bench) -> list[Wanted]:
    """Groups of 4 whose candidates end at different lengths, most of them after their detection.

    Beside each group there is a request that belongs to no group.
    """
    requests = []
    for group in range(2 if bench.small else 12):
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
                )
            )
        requests.append(Wanted(prompt=[3 + group, 9], max_tokens=20, seed=group))
    return requests


def run_scored(bench: Bench, engine: Engine) -> list[dict[str, Any]]:
    engine.publish_head(DETECTION_LENGTH)
    engine.watch_scores()
    return engine.run(scored_groups(bench))["candidates"]


def runners(bench: Bench) -> None:
    """Each engine samples its own tokens, and torch computes their confidences and scores."""
    truth = Truth(bench.models.path("tiny"))
    for name, engine in bench.engines.items():
        against_torch(bench, name, truth, run_scored(bench, engine))


def against_torch(bench: Bench, name: str, truth: Truth, said: list[dict[str, Any]]) -> None:
    limit = MOST_DIFFERENCE[bench.device]
    differences = {"confidence": 0.0, "score": 0.0}
    num_scored = num_due = 0
    for request, candidate in zip(scored_groups(bench), said, strict=True):
        if request.group is None:
            continue
        true = truth.of(request.prompt, candidate["tokens"], DETECTION_LENGTH)
        num_due += true["score"] is not None
        num_scored += candidate.get("score") is not None
        for what in differences:
            if true[what] is not None:
                pairs = zip(candidate.get(what) or [float("inf")] * len(true[what]), true[what], strict=True)
                differences[what] = max(differences[what], *(abs(a - b) for a, b in pairs))
    bench.result(f"{name}: largest difference to torch", {k: round(value, 7) for k, value in differences.items()})
    bench.check(f"{name}: candidates scored", num_scored == num_due > 0, num_scored, num_due)
    for what, value in differences.items():
        bench.check(f"{name}: {what} against torch", value <= limit, value, limit)


def launch_blocking(bench: Bench) -> None:
    """Runs with and without CUDA_LAUNCH_BLOCKING are equal to the last bit.

    A kernel that reads values before they are written would give another result if every launch is awaited.
    """
    blocking, ordinary = (run_scored(bench, engine) for engine in bench.engines.values())
    num_other = sum(a != b for a, b in zip(blocking, ordinary, strict=True))
    bench.check(f"candidates that differ, of {len(ordinary)}", num_other == 0, num_other, 0)
    num_scored = sum(candidate.get("score") is not None for candidate in ordinary)
    bench.check("candidates were scored", num_scored > 0, num_scored, "> 0")


def sleep(bench: Bench) -> None:
    (engine,) = bench.engines.values()
    truth = Truth(bench.models.path("tiny"))
    against_torch(bench, "before", truth, run_scored(bench, engine))
    engine.sleep_and_wake()
    against_torch(bench, "after", truth, engine.run(scored_groups(bench))["candidates"])


def sync_check(bench: Bench) -> None:
    steps_pass(bench)


def jit_monitor(bench: Bench) -> None:
    steps_pass(bench)


def steps_pass(bench: Bench) -> None:
    """Run the same requests on ours, with scored groups, and on stock's, without groups.

    If stock's own steps fail, ours are not judged. There are three runs, because the first step of each kind would
    compile a kernel.
    """
    ours, stock = bench.engines.values()
    ours.publish_head(DETECTION_LENGTH)
    plain = [Wanted(request.prompt, request.max_tokens, request.seed) for request in scored_groups(bench)]
    said = {"stock": fault_of(stock, plain), "ours": fault_of(ours, scored_groups(bench))}
    bench.result("faults", said)
    bench.check("ours fails no step where stock fails none", said["ours"] is None or said["stock"] is not None,
                said["ours"], None)  # fmt: skip


def fault_of(engine: Engine, requests: list[Wanted]) -> str | None:
    """The error that ended the engine in one of three runs, or None."""
    try:
        for _ in range(3):
            engine.run(requests)
    except EngineError as error:
        return str(error)[-500:]
    return None
