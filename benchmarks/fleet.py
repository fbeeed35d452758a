"""Four emulated servers behind our client, and behind vLLM's router, against one server with four ranks.

Everything but the device is real. In each repeat all ways run the same groups, one after the other, so that a repeat is
a set of pairs. All servers stay up:

ranks            one server with four data-parallel ranks, one request with all prompts
client           RolloutClient([url, url, url, url]), one call with all prompts
round_robin      vllm-router 0.1.17 before the four servers, a request per prompt, all at once
consistent_hash  as round_robin, but the router goes by a hash of each request

Steps are long and candidates few, so that the host is not what is measured.

Run from the repository root: python -m benchmarks.fleet --router PYTHON, an interpreter that has vllm-router
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import arguments_of, emulated_process, in_turn, median, publish, ratios, record_of_run, started
from benchmarks.tables import columns, number
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.process import exit_on_sigterm, free_port

NUM_ENGINES = 4
DEVICE = {
    "step": {"ms": 80, "ms_per_request": 0.5},
    "lengths": {"log_normal": {"mean": 50, "sigma": 0.8, "prompt_sigma": 0.5}},
}
WAYS = ("ranks", "client", "round_robin", "consistent_hash")
TOKENS = "vllm:generation_tokens_total"
MAX_TOKENS = 300


def main() -> None:
    parser = arguments_of(__doc__, "fleet", repeats=5)
    add = parser.add_argument
    add("--router", type=Path, required=True, help="an interpreter with vllm-router")
    add("--prompts", type=int, default=32, help="prompts per rollout (default %(default)s)")
    add("--group-size", type=int, default=4, help="answers per group (default %(default)s)")
    add("--redundancy", type=int, default=2, help="spare candidates per group (default %(default)s)")
    add("--max-num-seqs", type=int, default=32, help="--max-num-seqs of each engine (default %(default)s)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    workload = {
        "conditions": __doc__, "device": DEVICE, "engines": NUM_ENGINES, "max_tokens": MAX_TOKENS,
        "prompts": arguments.prompts, "group_size": arguments.group_size, "redundancy": arguments.redundancy,
        "max_num_seqs": arguments.max_num_seqs,
    }  # fmt: skip
    result = record_of_run(seed=arguments.seed, workload=workload) | {"repeats": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        flags = ["--max-num-seqs", str(arguments.max_num_seqs)]
        ranks = ["--data-parallel-size", str(NUM_ENGINES), "--api-server-count", "1"]
        urls = []
        for name, its in [("ranks", ranks), *((f"server-{number}", []) for number in range(NUM_ENGINES))]:
            place = Path(folder, name)
            place.mkdir()
            urls.append(stack.enter_context(started(emulated_process(DEVICE, [*flags, *its], place))).url)
        first, servers = urls[0], urls[1:]
        routers = {way: stack.enter_context(router(arguments.router, servers, way)) for way in WAYS[2:]}
        targets: dict[str, Any] = {"ranks": first, "client": servers, **routers}
        for repeat in range(-1, arguments.repeats):  # the first warms up
            row = {}
            for way in in_turn(WAYS, repeat):
                counted = [first] if way == "ranks" else servers
                row[way] = measure(targets[way], counted, prompts(arguments, repeat), workload, is_split=way in routers)
            if repeat >= 0:
                result["repeats"].append(row)
            seconds = [f"{way} {row[way]['seconds']:.1f} s" for way in WAYS]
            Console(stderr=True).print(", ".join(seconds), highlight=False)
    seconds_of = {way: [row[way]["seconds"] for row in result["repeats"]] for way in WAYS}
    result["ratios"] = {way: ratios(seconds_of[way], seconds_of["ranks"]) for way in WAYS}
    publish(arguments, result, table)


def prompts(arguments: Any, repeat: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{repeat}-{number}", "prompt": f"seed {arguments.seed}, repeat {repeat}, question {number}"}
        for number in range(arguments.prompts)
    ]


def measure(
    target: Any, counted: list[str], prompts: list[dict[str, Any]], workload: dict[str, Any], *, is_split: bool
) -> dict[str, Any]:
    before = tokens_of(counted)
    seconds, generated = asyncio.run(roll_out(target, prompts, workload, is_split))
    tokens = [after - old for after, old in zip(tokens_of(counted), before, strict=True)]
    return {"seconds": seconds, "generated_tokens": generated, "engine_tokens": tokens}


async def roll_out(
    target: Any, prompts: list[dict[str, Any]], workload: dict[str, Any], is_split: bool
) -> tuple[float, int]:
    sizes = (workload["group_size"], workload["redundancy"])
    async with AsyncRolloutClient(target) as client:

        async def one(some: list[dict[str, Any]]) -> int:
            sampling = {"max_tokens": MAX_TOKENS, "seed": 1}
            answer = await client.rollout(some, *sizes, sampling_params=sampling, include=[])
            assert all(group.status == "complete" for group in answer.groups)
            return answer.usage.generated_tokens

        began = time.perf_counter()
        parts = [[prompt] for prompt in prompts] if is_split else [prompts]
        generated = sum(await asyncio.gather(*map(one, parts)))
        return time.perf_counter() - began, generated


def tokens_of(urls: list[str]) -> list[int]:
    """Tokens generated by each engine so far."""
    lines = [line for url in urls for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines()]
    return [round(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(TOKENS)]


@contextmanager
def router(python: Path, servers: list[str], policy: str) -> Iterator[str]:
    """URL of vLLM's router, running before these servers until the end of the block."""
    port = free_port()
    command = [
        str(python), "-m", "vllm_router.launch_router", "--worker-urls", *servers, "--policy", policy,
        "--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "warning",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5).is_success:
                    break
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def table(result: dict[str, Any]) -> str:
    rows, its = result["repeats"], result["workload"]

    def share(way: str) -> float:
        """Tokens of the engine with most of them, over the mean."""
        return median(max(row[way]["engine_tokens"]) * NUM_ENGINES / sum(row[way]["engine_tokens"]) for row in rows)

    title = f"{its['prompts']} x {its['group_size']} of {its['group_size'] + its['redundancy']}, {NUM_ENGINES} engines"
    return columns(title, [{"way": way} for way in WAYS], {
        "": lambda row: row["way"],
        "seconds": lambda row: number(median(each[row["way"]]["seconds"] for each in rows), 1),
        "times ranks": lambda row: number(median(result["ratios"][row["way"]]), 2),
        "from": lambda row: number(min(result["ratios"][row["way"]]), 2),
        "to": lambda row: number(max(result["ratios"][row["way"]]), 2),
        "busiest engine's tokens / mean": lambda row: number(share(row["way"]), 2),
    })  # fmt: skip


if __name__ == "__main__":
    main()
