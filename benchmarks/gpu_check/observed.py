"""Pieces about what engines observe: against torch, against the same engine run otherwise, and in steps that vLLM
itself fails when they do what they should not."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.engine import Engine, EngineError, Wanted
from benchmarks.gpu_check.truth import Truth

DETECTION_LENGTH = 12
MOST_DIFFERENCE = {"cuda": 5e-3, "cpu": 1e-4}
"""Of a confidence or a score in float32: attention kernels of a GPU multiply in tf32."""


def scored_groups(bench: Bench) -> list[Wanted]:
    """Groups of 4 whose candidates end at different lengths, most after their detection; beside each a request that
    belongs to no group."""
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
    """Each engine says its own tokens; torch says what they are worth."""
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
    """A kernel that reads what is not written yet says something else where every launch is waited for: all is equal,
    to the last bit."""
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
    """The same requests on ours, with groups that are scored, and on stock's without. Where stock's own steps fail,
    ours are not judged. Three times over: in the first step of each kind a kernel would be compiled."""
    ours, stock = bench.engines.values()
    ours.publish_head(DETECTION_LENGTH)
    plain = [Wanted(request.prompt, request.max_tokens, request.seed) for request in scored_groups(bench)]
    said = {"stock": fault_of(stock, plain), "ours": fault_of(ours, scored_groups(bench))}
    bench.result("faults", said)
    bench.check("ours fails no step where stock fails none", said["ours"] is None or said["stock"] is not None,
                said["ours"], None)  # fmt: skip


def fault_of(engine: Engine, requests: list[Wanted]) -> str | None:
    """What ended the engine in one of three runs."""
    try:
        for _ in range(3):
            engine.run(requests)
    except EngineError as error:
        return str(error)[-500:]
    return None
