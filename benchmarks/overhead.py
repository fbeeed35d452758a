"""What vllm-rollout costs where it saves nothing: throughput against stock vLLM, paired.

64 candidates (4 prompts x 16) all run to max_tokens (ignore_eos), so every way decodes the same number of tokens in as
many steps. Stock and ours take turns: in each repeat every way runs once, the order rotating, and a ratio is taken
within the repeat.

  stock     stock vLLM
  idle      vllm-rollout, the same requests: no field of ours
  tagged    vllm-rollout, groups of 16 of 16: the stop never fires, confidence is observed
  ..._logprobs   the same three with logprobs=0, as trainers ask for

Measured four times. `engine`: vLLM's LLM class with everything in one process, two such processes in turn; nothing
overlaps, so that all that we add to a step shows. `actor`: the same, with what a trainer's own engine gets of us: our
scheduler and vLLM's worker, and fields that name no group in place of a client's tag. `llm`: the same with
`vllm_rollout.LLM`, where a group is one request of n=16 and its outputs go through an event loop. `http`: two servers,
one /v1/completions request of n=16; here stock sends a message per token and candidate to an API process, groups do
not.

On a CPU the kernel's placement decides more than the code does: with the engine's Python beside the model's threads on
one core a step takes 30 % longer, for minutes at a time. So the first core is the model's, the others run the rest.

The tiny random model is the worst case (a step of a few milliseconds); the embedded default is a real one. `--vllm`
measures on other versions of vLLM, each in its environment of `make test-versions`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.common import median, percentile, record_of_run, server_process, write_json
from benchmarks.versions.environment import ROOT, python_of
from vllm_rollout.adapter.compat import PREFERRED_VLLM, SUPPORTED_VLLM
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm, server_environment

NUM_PROMPTS, NUM_CHOICES, PROMPT_TOKENS = 4, 16, 64
TARGETS = {"idle": {"tiny-random": 0.99, DEFAULT_MODEL: 0.99}, "tagged": {"tiny-random": 0.97, DEFAULT_MODEL: 0.99}}
CHILD_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
}
PARTS = ("engine", "actor", "llm", "http")
WAYS = ("stock", "idle", "tagged", "stock_logprobs", "idle_logprobs", "tagged_logprobs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-random", DEFAULT_MODEL], help="models to measure")
    parser.add_argument("--repeats", type=int, default=15, help="repeats on the tiny model; a third as many on others")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens on the tiny model; an eighth on others")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--vllm", nargs="+", choices=SUPPORTED_VLLM, default=[PREFERRED_VLLM], metavar="VERSION")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/overhead.json"))
    parser.add_argument("--quick", action="store_true", help="three repeats on the tiny model only")
    args = parser.parse_args()
    if args.child:
        serve_child(*args.child)
        return
    if args.quick:
        args.models, args.repeats = ["tiny-random"], 3
    exit_on_sigterm()
    console = Console()
    results = []
    for version in args.vllm:
        python = python_of(version, ROOT / ".venvs", PREFERRED_VLLM)
        results += [{"vllm": version, **row} for row in measure_all(args, python, console)]
    workload = {
        "concurrent": NUM_PROMPTS * NUM_CHOICES,
        "prompt_tokens": PROMPT_TOKENS,
        "ways": "see the module's docstring",
        "targets": TARGETS,
    }
    write_json(args.output, {**record_of_run(seed=args.seed, workload=workload), "results": results})
    console.print(f"written to {args.output}")


def measure_all(args: argparse.Namespace, python: Path, console: Console) -> list[dict[str, Any]]:
    results = []
    for model in args.models:
        tiny = model == "tiny-random"
        repeats = args.repeats if tiny else max(3, args.repeats // 3)
        max_tokens = args.max_tokens if tiny else args.max_tokens // 8
        for part in args.parts:
            results.append(measure(part, model, repeats, max_tokens, python, console))
    return results


def measure(part: str, model: str, repeats: int, max_tokens: int, python: Path, console: Console) -> dict[str, Any]:
    throughput: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        with console.status(f"{part}: starting stock and ours, {model}"):
            start = start_servers if part == "http" else partial(start_engines, "rollout" if part == "engine" else part)
            run = start(stack, resolve(model), Path(logs), python)
        progress = stack.enter_context(Progress(console=console))
        task = progress.add_task(f"{part}, {model}", total=(repeats + 1) * len(WAYS))
        order = list(WAYS)
        for repeat in range(repeats + 1):
            order.append(order.pop(0))
            for way in order:
                seconds = run(way, max_tokens)
                if repeat:  # the first round warms up
                    throughput[way].append(NUM_PROMPTS * NUM_CHOICES * max_tokens / seconds)
                progress.advance(task)
    row = {
        "part": part,
        "model": model,
        "repeats": repeats,
        "max_tokens": max_tokens,
        "step_ms_stock": 1000 * NUM_PROMPTS * NUM_CHOICES / median(throughput["stock"]),
        "tokens_per_s": {way: [round(value, 1) for value in values] for way, values in throughput.items()},
        "ratios": {way: ratio_to_stock(throughput, way) for way in WAYS if not way.startswith("stock")},
    }
    show(row, console)
    return row


def prompts() -> list[list[int]]:
    return [[3 + (7 * p + i) % 400 for i in range(PROMPT_TOKENS)] for p in range(NUM_PROMPTS)]


def start_engines(ours: str, stack: ExitStack, model: str, logs: Path, python: Path) -> Callable[[str, int], float]:
    """Two child processes with an engine each; returns a function that runs a way in one of them, in seconds."""
    children = {}
    for kind in ("stock", ours):
        environment = {**server_environment(model), **CHILD_ENVIRONMENT}
        command = [str(python), "-m", "benchmarks.overhead", "--child", kind, model]
        log = stack.enter_context((logs / f"{kind}.log").open("w"))
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        stack.callback(child.kill)
        children[kind] = child

    def run(way: str, max_tokens: int) -> float:
        child = children["stock" if way.startswith("stock") else ours]
        print(way, max_tokens, file=child.stdin, flush=True)
        for line in child.stdout:
            if line.startswith("SECONDS "):
                return float(line.split()[1])
        raise RuntimeError(
            f"the engine of {way} ended:\n" + "".join(path.read_text()[-2000:] for path in logs.iterdir())
        )

    return run


def serve_child(kind: str, model: str) -> None:
    """Hold an engine and run a way for each line of standard input."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    import vllm_rollout
    from vllm_rollout.adapter.names import SCHEDULER_CLS, WORKER_CLS
    from vllm_rollout.adapter.wire import CandidateTag
    from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
    from vllm_rollout.group.lifecycle import GroupTerms

    ours = {
        "stock": {},
        "rollout": {"scheduler_cls": SCHEDULER_CLS, "worker_cls": WORKER_CLS},
        "actor": {"scheduler_cls": SCHEDULER_CLS},
        "llm": {},
    }[kind]
    llm_class = vllm_rollout.LLM if kind == "llm" else LLM
    llm = llm_class(model, max_model_len=1024, enforce_eager=True, block_size=32, max_num_seqs=64, **ours)
    for run_number, line in enumerate(sys.stdin):
        way, max_tokens = line.split()
        requests, params = [], []
        is_one_request = kind == "llm" and way.startswith("tagged")
        for p, prompt in enumerate(prompts()):
            for index in range(1 if is_one_request else NUM_CHOICES):
                tag = CandidateTag(
                    f"{run_number}-{p}", index, GroupTerms(NUM_CHOICES, NUM_CHOICES), OUTPUT_INTERVAL_TOKENS
                )
                fields: dict[str, Any] = {
                    "actor": {"rollout_group_size": NUM_CHOICES},
                    "llm": {"rollout_redundancy": 0},
                }.get(kind, tag.to_extra_args())
                requests.append({"prompt_token_ids": prompt})
                params.append(
                    SamplingParams(
                        n=NUM_CHOICES if is_one_request else 1,
                        temperature=1,
                        max_tokens=int(max_tokens),
                        ignore_eos=True,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                        logprobs=0 if way.endswith("logprobs") else None,
                        extra_args=fields if way.startswith("tagged") else None,
                    )
                )
        started = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        print("SECONDS", time.perf_counter() - started, flush=True)


def start_servers(stack: ExitStack, model: str, logs: Path, python: Path) -> Callable[[str, int], float]:
    """Two servers; returns a function that sends a way's request to one of them, in seconds."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[0])
    flags = ["--enforce-eager", "--block-size", "32", "--max-num-seqs", "64", "--max-model-len", "1024"]
    servers: dict[str, ServerProcess] = {}
    for kind in ("stock", "rollout"):
        flags_of = [*flags, "--served-model-name", "model"]
        server = server_process(kind, model, flags_of, logs / f"{kind}.log", python=python)
        server.command = ["taskset", "--cpu-list", ",".join(map(str, cores[1:] or cores)), *server.command]
        servers[kind] = stack.enter_context(server)
        server.wait_until_healthy(lambda seconds, line: None)

    def run(way: str, max_tokens: int) -> float:
        return request(servers["stock" if way.startswith("stock") else "rollout"], way, max_tokens)

    return run


def request(server: ServerProcess, way: str, max_tokens: int) -> float:
    """Seconds for one request of 64 candidates."""
    body: dict[str, Any] = {
        "model": "model",
        "prompt": prompts(),
        "n": NUM_CHOICES,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if way.startswith("tagged"):
        body["vllm_xargs"] = {"rollout_redundancy": 0}
    if way.endswith("logprobs"):
        body["logprobs"] = 0
    started = time.perf_counter()
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=None, trust_env=False)
    seconds = time.perf_counter() - started
    response.raise_for_status()
    tokens = sum(len(choice["token_ids"]) for choice in response.json()["choices"])
    assert tokens == NUM_PROMPTS * NUM_CHOICES * max_tokens, tokens
    return seconds


def ratio_to_stock(throughput: dict[str, list[float]], way: str) -> dict[str, float]:
    """Median and quartiles of the ratios within a repeat."""
    stock = "stock_logprobs" if way.endswith("logprobs") else "stock"
    ratios = [ours / theirs for ours, theirs in zip(throughput[way], throughput[stock], strict=True)]
    return {"median": median(ratios), "p25": percentile(ratios, 25), "p75": percentile(ratios, 75)}


def show(row: dict[str, Any], console: Console) -> None:
    title = f"{row['part']}, {row['model']}: {row['step_ms_stock']:.1f} ms a step, {row['repeats']} repeats"
    table = Table("way", "throughput / stock's", "quartiles", "target", title=title)
    for way, ratio in row["ratios"].items():
        target = TARGETS.get(way.removesuffix("_logprobs"), {}).get(row["model"])
        table.add_row(way, f"{ratio['median']:.3f}", f"{ratio['p25']:.3f} to {ratio['p75']:.3f}", str(target or ""))
    console.print(table)


if __name__ == "__main__":
    main()
