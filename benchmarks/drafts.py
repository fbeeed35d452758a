"""Drafts on a real model: steps and CPU seconds with drafts and without.

Each way is an engine in a process of its own, in which the same workloads run: 16, 4 and 1 candidates of a prompt at
once, on prompts that the engine has not seen, and on the same ones again, as a deferred prompt or a second epoch is.
What counts is the process' CPU seconds per token, since other programs take the clock's, and steps per token, which say
what a device would save that waits for its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.common import arguments_of, median, publish, record_of_run
from benchmarks.prompts import PROMPTS
from benchmarks.tables import columns, number
from vllm_rollout.models import DEFAULT_MODEL, resolve

WAYS = ("without", "drafts")
SIZES = (16, 4, 1)
EPOCHS = ("new", "again")
MAX_TOKENS = 128
NUM_PROMPTS = 2
"""Of each size and repeat; they run one after the other."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = arguments_of(__doc__, "drafts", seed=1, repeats=3)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model's name or folder (default %(default)s)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.way is not None:
        print("RESULT " + json.dumps(measure(args.way, resolve(args.model), args.seed, args.repeats)))
        return
    record = record_of_run(
        seed=args.seed,
        workload={
            "model": args.model, "max_tokens": MAX_TOKENS, "temperature": 1, "candidates": SIZES,
            "prompts_of_each": NUM_PROMPTS, "repeats": args.repeats,
        },
    )  # fmt: skip
    runs = [run for way in WAYS for run in in_a_process(way, args)]
    publish(args, record | {"rows": rows(runs), "runs": runs}, tables)


def in_a_process(way: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    command = ["--way", way, "--model", args.model, "--seed", str(args.seed), "--repeats", str(args.repeats)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.drafts", *command],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(f"{way}: the engine's process ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(found[0].removeprefix("RESULT "))


def measure(way: str, model: str, seed: int, repeats: int) -> list[dict[str, Any]]:
    """In this process: one entry per repeat, epoch and size."""
    from vllm import LLM

    from vllm_rollout.adapter.options import DRAFTS_CONFIG

    config = dict(DRAFTS_CONFIG) if way == "drafts" else None
    llm = LLM(
        model, max_model_len=1024, max_num_seqs=32, enforce_eager=True, block_size=32, disable_log_stats=True,
        seed=seed, scheduler_cls="vllm_rollout.Scheduler", worker_cls="vllm_rollout.Worker", speculative_config=config,
    )  # fmt: skip
    run(llm, "What is the capital of France?", 16, "warm-up")
    found = []
    for repeat in range(repeats):
        for epoch, size in product(EPOCHS, SIZES):
            total = {"tokens": 0, "steps": 0, "cpu_s": 0.0}
            for number_of_prompt in range(NUM_PROMPTS):
                text = PROMPTS[(SIZES.index(size) * NUM_PROMPTS + number_of_prompt) % len(PROMPTS)]
                # Another repeat, another prompt: nothing is known of it. Another size, too.
                prompt = f"Question {repeat + 1}.{size}: {text}"
                done = run(llm, prompt, size, f"{repeat}-{epoch}-{size}-{number_of_prompt}")
                total = {key: total[key] + done[key] for key in total}
            found.append({"way": way, "repeat": repeat, "epoch": epoch, "candidates": size, **total})
    return found


def run(llm: Any, prompt: str, size: int, group_id: str) -> dict[str, float]:
    """All answers of one prompt."""
    from vllm import SamplingParams

    from vllm_rollout.adapter.wire import CandidateTag
    from vllm_rollout.group.plans.terms import GroupTerms

    text = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    engine, began, steps, tokens = llm.llm_engine, time.process_time(), 0, 0
    for index in range(size):
        tag = CandidateTag(group_id, index, GroupTerms(size, size), 16)
        params = SamplingParams(temperature=1, max_tokens=MAX_TOKENS, extra_args=tag.to_extra_args())
        engine.add_request(f"{group_id}-{index}", text, params)
    while engine.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        steps += 1
    return {"tokens": tokens, "steps": steps, "cpu_s": time.process_time() - began}


def rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per workload, medians over repeats; ratios are to the same repeat without drafts."""
    of = {(run["way"], run["epoch"], run["candidates"], run["repeat"]): run for run in runs}
    repeats = sorted({run["repeat"] for run in runs})
    found = []
    for epoch, size in product(EPOCHS, SIZES):
        row: dict[str, Any] = {"epoch": epoch, "candidates": size}
        for way in WAYS:
            its = [of[way, epoch, size, repeat] for repeat in repeats]
            plain = [of["without", epoch, size, repeat] for repeat in repeats]
            row[way] = {
                "cpu_ms_per_token": median(1e3 * run["cpu_s"] / run["tokens"] for run in its),
                "faster": median(
                    (base["cpu_s"] / base["tokens"]) / (run["cpu_s"] / run["tokens"])
                    for run, base in zip(its, plain, strict=True)
                ),
                "tokens_per_row_and_step": median(run["tokens"] / run["steps"] for run in its)
                / median(run["tokens"] / run["steps"] for run in plain),
            }
        found.append(row)
    return found


def tables(result: dict[str, Any]) -> str:
    return columns(
        f"drafts, {result['workload']['model']}",
        result["rows"],
        {
            "prompts": lambda row: "new" if row["epoch"] == "new" else "answered before",
            "candidates at once": lambda row: number(row["candidates"]),
            "CPU ms per token, without": lambda row: number(row["without"]["cpu_ms_per_token"], 1),
            "drafts: faster": lambda row: number(row["drafts"]["faster"], 2),
            "in steps": lambda row: number(row["drafts"]["tokens_per_row_and_step"], 2),
        },
    )


if __name__ == "__main__":
    main()
