"""Cost of vllm-rollout when it saves nothing: throughput against stock vLLM, paired.

64 candidates (4 prompts x 16) all run to max_tokens (ignore_eos), so every way decodes the same number of tokens in as
many steps. In each repeat every way runs once, and the order rotates. A ratio is taken within the repeat.

  stock     stock vLLM
  idle      vllm-rollout, the same requests without our fields
  tagged    vllm-rollout, groups of 16 of 16: no candidate is stopped, confidence is observed
  ..._logprobs   the same three ways with logprobs=0, as trainers ask for

Each engine runs in a process of its own (those of `benchmarks.gpu_check`), with all its parts in that process. Nothing
overlaps, so every cost that we add to a step shows. On a CPU the kernel's placement matters more than the code, so the
first core runs the model and the others the rest.

The tiny random model is the worst case (a step of a few milliseconds). The embedded default is a real model.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import arguments_of, median, publish, quartiles, ratios, record_of_run
from benchmarks.gpu_check.cost import GROUP, groups
from benchmarks.gpu_check.engine import Engine, Settings
from benchmarks.tables import columns, number
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import exit_on_sigterm, log_folder

TINY = "tiny-random"
NUM_PROMPTS = 4
TARGETS = {"idle": {TINY: 0.99, DEFAULT_MODEL: 0.99}, "tagged": {TINY: 0.97, DEFAULT_MODEL: 0.99}}
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
OPTIONS = {
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": NUM_PROMPTS * GROUP,
    "distributed_executor_backend": "mp",  # the model has a core of its own
}
WAYS = ("stock", "idle", "tagged", "stock_logprobs", "idle_logprobs", "tagged_logprobs")


def main() -> None:
    parser = arguments_of(__doc__, "overhead", repeats=15)
    parser.add_argument("--models", nargs="+", default=[TINY, DEFAULT_MODEL])
    parser.add_argument("--max-tokens", type=int, default=512, help="on the tiny model. Others get an eighth, and a "
        "third of the repeats")  # fmt: skip
    arguments = parser.parse_args()
    exit_on_sigterm()
    workload = {"concurrent": NUM_PROMPTS * GROUP, "prompt_tokens": 64, "ways": __doc__, "targets": TARGETS}
    begun = record_of_run(seed=arguments.seed, workload=workload)
    publish(arguments, {**begun, "results": [measure(model, arguments) for model in arguments.models]}, tables)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    repeats, max_tokens = arguments.repeats, arguments.max_tokens
    if model != TINY:
        repeats, max_tokens = max(3, repeats // 3), max_tokens // 8
    throughput: dict[str, list[float]] = {way: [] for way in WAYS}
    with log_folder() as folder, ExitStack() as stack:
        path = Path(resolve(model))
        log = stack.enter_context((folder / "engines.log").open("wb"))
        engines = {
            kind: stack.enter_context(Engine(Settings(kind, "tiny", OPTIONS, ENVIRONMENT), path, log.fileno()))
            for kind in ("stock", "rollout")
        }
        order = list(WAYS)
        for repeat in range(repeats + 1):
            order.append(order.pop(0))
            for way in order:
                engine = engines["stock" if way.startswith("stock") else "rollout"]
                requests = groups(NUM_PROMPTS, [max_tokens] * GROUP, tagged=way.startswith("tagged"))
                if way.endswith("logprobs"):
                    requests = [replace(request, logprobs=0) for request in requests]
                seconds = engine.run(requests)["seconds"]
                if repeat:  # the first round warms up
                    throughput[way].append(len(requests) * max_tokens / seconds)
            Console(stderr=True).print(f"{model}: repeat {repeat} of {repeats}", highlight=False)
    return {
        "part": "engine",
        "model": model,
        "repeats": repeats,
        "max_tokens": max_tokens,
        "step_ms_stock": 1000 * NUM_PROMPTS * GROUP / median(throughput["stock"]),
        "tokens_per_s": {way: [round(value, 1) for value in values] for way, values in throughput.items()},
        "ratios": {way: ratio_to_stock(throughput, way) for way in WAYS if not way.startswith("stock")},
    }


def ratio_to_stock(throughput: dict[str, list[float]], way: str) -> dict[str, float]:
    """Median and quartiles of the ratios within a repeat."""
    return quartiles(ratios(throughput[way], throughput["stock_logprobs" if way.endswith("logprobs") else "stock"]))


def tables(result: dict[str, Any]) -> str:
    rows = [(row, way, ratio) for row in result["results"] for way, ratio in row["ratios"].items()]
    return columns(
        "Throughput / stock's",
        [{**ratio, "model": row["model"], "ms": row["step_ms_stock"], "way": way} for row, way, ratio in rows],
        {
            "model": lambda row: f"{row['model']} ({row['ms']:.1f} ms a step)",
            "way": lambda row: row["way"],
            "throughput / stock's": lambda row: number(row["median"]),
            "quartiles": lambda row: f"{row['p25']:.3f} to {row['p75']:.3f}",
            "target": lambda row: number(TARGETS[row["way"].removesuffix("_logprobs")].get(row["model"]), 2),
        },
    )


if __name__ == "__main__":
    main()
