"""Host work that we add to an engine step, in microseconds, without a model and with operators that do nothing.

A GPU computes while the host prepares the next step. A step of a small model may end before the host is ready, and then
the host's work beside vLLM's own counts in full. Rows are candidates that all decode:

  observe     work of the worker in a step for its tracker, without the operators' own time
  scheduler   schedule and update_from_output, ours minus stock's, alternating; requests in groups of 16

`tagged` candidates are observed. `scored` ones have a detection length that they do not reach. In a step of `due` ones
all of them reach it.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.common import arguments_of, median, publish, record_of_run
from benchmarks.tables import columns, number
from tests.parts.pruning.scoring import ScoringTracker
from tests.parts.pruning.steps import group_terms, said
from tests.support.dry_run import DryRun
from vllm_rollout.adapter.faults import Faults
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.kernel.core.scheduler import RolloutScheduler
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.model_files import tiny
from vllm_rollout.parts.observing.tracker import tracker as tracking
from vllm_rollout.parts.observing.worker.observing import Observing
from vllm_rollout.parts.observing.worker.runner import StepReport
from vllm_rollout.parts.pruning.options import PruningOptions
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.worker import scorer as scoring
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing

ROWS = (16, 256, 1024)
GROUP_SIZE = 16
FAR = 10**6
"""A detection length that no candidate reaches."""
HIDDEN_SIZE, VOCABULARY = 64, 16
PROMPT = 8


def main() -> None:
    parser = arguments_of(__doc__, "overhead_host")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="candidates that decode")
    parser.add_argument("--steps", type=int, default=300, help="measured steps of each kind (default %(default)s)")
    arguments = parser.parse_args()
    record = record_of_run(seed=arguments.seed, workload={"ways": __doc__, "steps": arguments.steps})
    with tempfile.TemporaryDirectory() as model:
        tiny(model)
        rows = [
            {
                "rows": num_rows,
                **observe_us(num_rows, arguments.steps),
                **scheduler_us(model, num_rows, arguments.steps),
            }
            for num_rows in arguments.rows
        ]
    publish(arguments, {**record, "host_us": rows}, table)


def observe_us(num_rows: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of a step, by kind of candidate."""
    logits, hidden = torch.zeros(num_rows, VOCABULARY), torch.zeros(num_rows, HIDDEN_SIZE)
    ids = [f"request-{row}" for row in range(num_rows)]
    unfinished = np.zeros(num_rows, dtype=bool)
    found = {}
    with ExitStack() as stack:
        for name, empty in without_operators(num_rows).items():
            stack.enter_context(patch.object(tracking if hasattr(tracking, name) else scoring, name, empty))
        for kind, length in (("tagged", None), ("scored", FAR), ("due", PROMPT)):
            ring = FeatureRing(HIDDEN_SIZE, torch.float32, PruningOptions().feature_ring_bytes)
            tracker = ScoringTracker(torch.device("cpu"), ring=ring)
            for id in ids:
                tracker.add_scored(id, PROMPT, None if length is None else min(length, 4096))
            if length == FAR:
                lengths = tracker.scorer._detection_lengths
                lengths[lengths != 0] = FAR

            def step(number: int, tracker: ScoringTracker = tracker, kind: str = kind) -> None:
                tracker.start_step()
                tracker.see_hidden_states(hidden)
                num_computed = np.full(num_rows, 2 * PROMPT if kind == "due" else PROMPT + 1 + number)
                tracker.observe(list(ids), logits, num_computed - (kind == "due"), unfinished)
                report = StepReport(tracker.step, Observing(tracker, Faults()))
                report.attach(ModelRunnerOutput.__new__(ModelRunnerOutput))

            found[f"observe_{kind}"] = median_us(step, num_steps)
    return found


def without_operators(num_rows: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Replacements for the operators, each of which returns constants of the right shape."""
    ones, pairs, triples = torch.ones(num_rows), torch.ones(num_rows, 2), torch.ones(num_rows, 3)
    return {
        "token_confidence": lambda logits, rows: ones[: len(rows)],
        "update_confidence": lambda slots, *_: pairs[: len(slots)],
        "windowed_confidence": lambda trace, *_: triples[: len(trace)],
        "quality_head": lambda hidden, rows, *_: ones[: len(rows)],
    }


def scheduler_us(model: str, num_rows: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of a step with stock's scheduler, and how much longer ours takes, by kind of candidate."""
    kinds = {"stock": Scheduler, "idle": RolloutScheduler, "tagged": RolloutScheduler, "scored": RolloutScheduler}
    runs = {kind: DryRun(cls, model, max_num_seqs=num_rows, num_blocks=num_rows * 40 + 1000)
            for kind, cls in kinds.items()}  # fmt: skip
    for kind, run in runs.items():
        for row in range(num_rows):
            run.add(f"r{row}", FAR, max_tokens=4000, extra_args=tag(kind, row))
        for _ in range(8):  # prompts, first outputs
            run.step()
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    order = list(runs)
    gc.collect()
    gc.disable()
    for _ in range(num_steps):
        order.append(order.pop(0))  # the first one finds a colder cache
        for kind in order:
            run = runs[kind]
            started = time.perf_counter()
            scheduled = run.scheduler.schedule()
            half = time.perf_counter()
            output = run.sample(scheduled)
            resumed = time.perf_counter()
            run.scheduler.update_from_output(scheduled, output)
            times[kind].append(1e6 * (half - started + time.perf_counter() - resumed))
    gc.enable()
    extra = {
        f"scheduler_{kind}": round(median(a - b for a, b in zip(times[kind], times["stock"], strict=True)), 1)
        for kind in ("idle", "tagged", "scored")
    }
    return {"stock_scheduler": round(median(times["stock"]), 1), **extra}


def tag(kind: str, number: int) -> dict[str, Any] | None:
    if kind in ("stock", "idle"):
        return None
    plan = PruningPlan(4096, mode="shadow") if kind == "scored" else None
    group = f"group-{number // GROUP_SIZE}"
    terms = group_terms(GROUP_SIZE, GROUP_SIZE, pruning=plan)
    scoring = plan and Scoring(group, group, 0)
    return CandidateTag(group, number % GROUP_SIZE, terms, OUTPUT_INTERVAL_TOKENS, said(scoring)).to_extra_args()


def median_us(step: Callable[[int], None], num_steps: int) -> float:
    times = []
    for nth in range(num_steps):
        started = time.perf_counter()
        step(nth)
        times.append(1e6 * (time.perf_counter() - started))
    return round(median(times[num_steps // 10 :]), 1)


def table(result: dict[str, Any]) -> str:
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "candidates": lambda row: number(row["rows"]),
        "stock's scheduler": lambda row: number(row["stock_scheduler"], 0),
    }
    for kind in ("idle", "tagged", "scored"):
        cells[f"ours more, {kind}"] = lambda row, kind=kind: f"{row[f'scheduler_{kind}']:+,.0f}"
    for kind in ("tagged", "scored", "due"):
        cells[f"observe, {kind}"] = lambda row, kind=kind: number(row[f"observe_{kind}"], 0)
    return columns("Microseconds of the host per engine step", result["host_us"], cells)


if __name__ == "__main__":
    main()
