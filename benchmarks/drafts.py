"""Drafts on a real model: tokens of a step, what becomes of drafts, and CPU seconds, with and without.

Each run is an engine in a process of its own; runs of the ways alternate. In it 16, 4 and 1 candidates of a prompt are
answered at once: of prompts that the engine has not seen, and then of the same ones again, as a deferred prompt or
a second epoch is.

without  no drafts
drafts   chosen by what steps take here, as a server on this machine would
gpu      chosen as where a step takes what examples/emulate_7b.json says, which does not wait for drafts; the tokens are
         this model's, verified here
ngram    vLLM's own, --speculative-config as in its documentation: five tokens that followed the last four before in
         the prompt or the candidate's own text; the engine and its scheduler are ours

CPU seconds are the engine process' own, since other programs take the clock's. Tokens of each, and drafts of each, are
those of one candidate in one step. How long answers are is luck, and so is how many candidates run at once: "times as
fast" is against what the same tokens would have taken in steps of as many candidates without drafts, by the seconds of
that file, or by a line through the CPU seconds of the runs without: so much a step, and so much a candidate.

Run from the repository root: python -m benchmarks.drafts
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import arguments_of, median, publish, record_of_run, write_json
from benchmarks.prompts import PROMPTS
from benchmarks.tables import columns, number, percent
from vllm_rollout.emulation.device import cost_of
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.group.drafting import NUM_BINS, DraftingRule
from vllm_rollout.group.lengths.cost import CostModel
from vllm_rollout.models import DEFAULT_MODEL, resolve

NGRAM_CONFIG = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
WAYS = ("without", "drafts", "gpu", "ngram")
SIZES = (16, 4, 1)
EPOCHS = ("new", "again")
NUM_PROMPTS = 2
"""Of each size; they run one after the other."""
MAX_TOKENS = 128
DEVICE = "examples/emulate_7b.json"
CONTEXT_TOKENS = 128
"""Of a candidate, on average, for the device's seconds."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


class Counting(DraftingRule):
    """The rule, and what it was told; with `device` it learns that device's seconds instead of these."""

    def __init__(self, device: CostModel | None) -> None:
        super().__init__()
        self._device = device
        self.estimated = 0.0

    def took(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        priced = seconds if self._device is None else self._device.ptl(num_rows + num_drafts, CONTEXT_TOKENS)
        super().took(num_rows, num_drafts, priced)

    def verified(self, num_drafts: Any, num_accepted: Any) -> None:
        super().verified(num_drafts, num_accepted)
        self.estimated += sum(num * (bin + 0.5) / NUM_BINS for bin, num in enumerate(num_drafts))


def main() -> None:
    parser = arguments_of(__doc__, "drafts", seed=1, repeats=3)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model's name or folder (default %(default)s)")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds of one run at most (default %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="which of them (default: all)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        measure(args.way, resolve(args.model), args.seed)
        return
    workload = {
        "conditions": __doc__, "model": args.model, "max_tokens": MAX_TOKENS, "temperature": 1, "repeats": args.repeats,
        "prompts_of_each_size": NUM_PROMPTS, "limit_s": args.limit,
    }  # fmt: skip
    record = record_of_run(seed=args.seed, workload=workload) | {"runs": []}
    console = Console(stderr=True, width=120)
    for repeat, way in product(range(args.repeats), args.ways):
        cells, fault = in_a_process(way, args.model, args.seed + repeat, args.limit)
        record["runs"].append({"way": way, "repeat": repeat, "fault": fault, "cells": cells})
        write_json(args.output, record)
        console.print(f"{way}, repeat {repeat}: {len(cells)} cells, {fault or 'ended'}", highlight=False)
    publish(args, record | {"rows": rows(record["runs"])}, tables)


def in_a_process(way: str, model: str, seed: int, limit_s: float) -> tuple[list[dict[str, Any]], str | None]:
    """What was measured before it ended, and what ended it before its time."""
    command = [sys.executable, "-m", "benchmarks.drafts", "--way", way, "--model", model, "--seed", str(seed)]
    fault = None
    with tempfile.TemporaryFile("w+") as out:
        try:
            code = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=out, timeout=limit_s).returncode
            fault = f"ended with {code}" if code else None
        except subprocess.TimeoutExpired:
            fault = f"not over after {limit_s:g} s"
        out.seek(0)
        return [json.loads(line) for line in out if line.startswith("{")], fault


def measure(way: str, model: str, seed: int) -> None:
    """In this process: print a line of JSON for each epoch and size."""
    from vllm import LLM

    from vllm_rollout.adapter.options import DRAFTS_CONFIG

    device = cost_of(Settings.read(DEVICE))
    rule = Counting(device if way == "gpu" else None)

    def place_rule(worker: Any) -> None:
        worker.model_runner.drafts.rule = rule

    llm = LLM(
        model, max_model_len=1024, max_num_seqs=32, enforce_eager=True, block_size=32, disable_log_stats=True,
        seed=seed, scheduler_cls="vllm_rollout.Scheduler", worker_cls="vllm_rollout.Worker",
        speculative_config={"without": None, "ngram": NGRAM_CONFIG}.get(way, dict(DRAFTS_CONFIG)),
    )  # fmt: skip
    if way in ("drafts", "gpu"):
        llm.llm_engine.collective_rpc(place_rule)
    answer(llm, "What is the capital of France?", 16, "warm-up", rule, device)
    for epoch, size in product(EPOCHS, SIZES):
        total = Counter[str]()
        for place in range(SIZES.index(size) * NUM_PROMPTS, (SIZES.index(size) + 1) * NUM_PROMPTS):
            total.update(answer(llm, PROMPTS[place], size, f"{epoch}-{place}", rule, device))
        print(json.dumps({"epoch": epoch, "candidates": size, **total}), flush=True)


def answer(llm: Any, prompt: str, size: int, group_id: str, rule: Counting, device: CostModel) -> dict[str, float]:
    """All answers of one prompt."""
    from vllm import SamplingParams

    from vllm_rollout.adapter.wire import CandidateTag
    from vllm_rollout.group.plans.terms import GroupTerms

    text = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    began, began_cpu = time.perf_counter(), time.process_time()
    estimated = rule.estimated
    found = {"tokens": 0, "rows": 0, "steps": 0, "drafted": 0, "device_s": 0.0}
    for index in range(size):
        tag = CandidateTag(group_id, index, GroupTerms(size, size), 16)
        params = SamplingParams(temperature=1, max_tokens=MAX_TOKENS, extra_args=tag.to_extra_args())
        engine.add_request(f"{group_id}-{index}", text, params)
    while engine.has_unfinished_requests():
        num_rows = len(scheduler.running) or size  # nobody runs before the first step
        drafted = sum(len(request.spec_token_ids) for request in scheduler.running)
        found["tokens"] += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        found["rows"] += num_rows
        found["steps"] += 1
        found["drafted"] += drafted
        found["device_s"] += device.ptl(num_rows + drafted, CONTEXT_TOKENS)
    found |= {"accepted": found["tokens"] - found["rows"], "estimated": rule.estimated - estimated}
    return found | {"cpu_s": time.process_time() - began_cpu, "wall_s": time.perf_counter() - began}


def rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per workload and way: medians over repeats."""
    plain = [cell for run in runs if run["way"] == "without" for cell in run["cells"]]
    counts, seconds = [[cell["steps"], cell["rows"]] for cell in plain], [cell["cpu_s"] for cell in plain]
    line = np.linalg.lstsq(np.array(counts, dtype=float), np.array(seconds), rcond=None)[0].tolist()
    device = cost_of(Settings.read(DEVICE))
    found = []
    for epoch, size in product(EPOCHS, SIZES):
        row: dict[str, Any] = {"epoch": epoch, "candidates": size}
        for way in WAYS:
            cells = [cell for run in runs if run["way"] == way for cell in run["cells"]]
            its = [cell for cell in cells if (cell["epoch"], cell["candidates"]) == (epoch, size)]
            row[way] = summary(its, line, device) if its else None
        found.append(row)
    return found


def summary(cells: list[dict[str, Any]], line: tuple[float, float], device: CostModel) -> dict[str, Any]:
    """`line`: CPU seconds of a step without drafts, and of a candidate in it."""
    drafting = [cell for cell in cells if cell["drafted"]]

    def by_cpu(cell: dict[str, Any]) -> float:
        plain_s = line[0] * cell["steps"] + line[1] * cell["rows"]
        return float(cell["tokens"] / cell["rows"] * plain_s / cell["cpu_s"])

    def by_device(cell: dict[str, Any]) -> float:
        plain_s = cell["steps"] * device.ptl(cell["rows"] / cell["steps"], CONTEXT_TOKENS)
        return float(cell["tokens"] / cell["rows"] * plain_s / cell["device_s"])

    return {
        "runs": len(cells),
        "cpu_ms_per_token": median(1e3 * cell["cpu_s"] / cell["tokens"] for cell in cells),
        "faster_by_cpu": median(map(by_cpu, cells)),
        "faster_by_device": median(map(by_device, cells)),
        "tokens_per_row": median(cell["tokens"] / cell["rows"] for cell in cells),
        "drafts_per_row": median(cell["drafted"] / cell["rows"] for cell in cells),
        "accepted": median(cell["accepted"] / cell["drafted"] for cell in drafting) if drafting else None,
        "estimated": median(cell["estimated"] / cell["drafted"] for cell in drafting) if drafting else None,
    }


def tables(result: dict[str, Any]) -> str:
    def of(way: str, field: str, digits: int = 2) -> Any:
        return lambda row: number((row[way] or {}).get(field), digits)

    shown = columns(
        f"Drafts of {result['workload']['model']}",
        result["rows"],
        {
            "prompts": lambda row: row["epoch"],
            "candidates": lambda row: number(row["candidates"]),
            "CPU ms a token, without": of("without", "cpu_ms_per_token", 1),
            "without, against its line": of("without", "faster_by_cpu"),
            "drafts of each": of("drafts", "drafts_per_row"),
            "tokens of each": of("drafts", "tokens_per_row"),
            "times as fast, CPU": of("drafts", "faster_by_cpu"),
            "gpu: drafts of each": of("gpu", "drafts_per_row"),
            "tokens of each ": of("gpu", "tokens_per_row"),
            "accepted": lambda row: percent((row["gpu"] or {}).get("accepted")),
            "estimated": lambda row: percent((row["gpu"] or {}).get("estimated")),
            "times as fast, that device": of("gpu", "faster_by_device"),
            "CPU": of("gpu", "faster_by_cpu"),
            "ngram: drafts of each": of("ngram", "drafts_per_row"),
            "tokens of each  ": of("ngram", "tokens_per_row"),
            "accepted ": lambda row: percent((row["ngram"] or {}).get("accepted")),
            "times as fast, CPU ": of("ngram", "faster_by_cpu"),
            "that device": of("ngram", "faster_by_device"),
        },
    )
    faults = [f"{run['way']}, repeat {run['repeat']}: {run['fault']}." for run in result["runs"] if run["fault"]]
    return "\n\n".join([shown, *faults])


if __name__ == "__main__":
    main()
