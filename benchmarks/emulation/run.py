"""Does an emulated device take as long as the engine that it stands for?: `python -m benchmarks.emulation`.

The engine of this machine is profiled (`vllm-rollout profile`), then asked for four things, several times with other
seeds: a dual-end rollout that waits for all, a race, a rollout that prunes half of its candidates, a period of rounds
of a run. Lengths are recorded (`--rollout-record`). Then the same requests go to emulated servers, one fresh server for
each, that know the profile and the recorded lengths and nothing else of the real runs. Seconds are those of the client,
from the request to the whole answer; the real engine does everything several times, and the median counts.

A machine that others share is not as fast now as when it was profiled. The real server compares its decode steps with
the profile (`step_time_drift`); what it saw is written down as `drift`.

What was stopped in the real run has no recorded length. Where the same candidate ran to its end in the dual-end rollout
(same seed), it gets that length; otherwise it does not end by itself. Same seeds do not always make the same answers in
another batch.

On a CPU a step holds the core that the scheduler needs, and the profile has both in it; the emulated device lets the
scheduler work beside its steps, as a GPU does. The difference is the host's part of a step.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.common import ROOT, median, record_of_run, server_process, write_json
from benchmarks.emulation.lengths import Lengths, emulated_rows, lengths_of
from benchmarks.emulation.ways import TITLES, WAYS, Asked, Sizes
from benchmarks.tables import grid, number, percent
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.demo.rounds.rounds import messages
from vllm_rollout.group.prompt_key import digest_of
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm, server_flags
from vllm_rollout.trace.rows import RolloutPrompt, RolloutRow

OUTPUT = ROOT / "benchmarks/results/emulation.json"
PROFILED_CONTEXTS = (64, 256, 512)
FULL_WAY = "dual_end"
"""The way in which every candidate runs to its end."""


def main() -> None:
    arguments = _parse_arguments()
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in fields(Sizes)})
    exit_on_sigterm()
    console = Console(stderr=True)
    folder = arguments.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    begun = record_of_run(seed=sizes.seed, workload={"sizes": asdict(sizes), "ways": TITLES, "conditions": __doc__})
    bench = Bench(sizes, folder, shlex.split(arguments.server_args), console)
    bench.profile(again=not arguments.keep_profile)
    bench.record.unlink(missing_ok=True)
    with bench.server(
        "real", ["--rollout-record", str(bench.record), "--rollout-profile", str(bench.profiled)]
    ) as server:
        real, drift = uvloop.run(bench.measure_real(server))
    emulated = {key: bench.measure_emulated(*key) for key in real}
    result = {**begun, "drift": drift, **summarize(real, emulated)}
    write_json(arguments.output, result)
    print(table(result))


Key = tuple[str, int]
"""A way and its repeat."""


def drift_of(metrics: str) -> dict[str, float]:
    """Live over profiled time of decode steps by ranges of batch sizes, "5-8", from a server's metrics."""
    name = "vllm_rollout:step_time_drift"
    families = (family for family in text_string_to_metric_families(metrics) if family.name == name)
    return {sample.labels["batch_sizes"]: sample.value for family in families for sample in family.samples}


class Bench:
    def __init__(self, sizes: Sizes, folder: Path, more: Sequence[str], console: Console) -> None:
        self._sizes = sizes
        self._folder = folder
        self._flags = [*server_flags(sizes.max_num_seqs), *more]
        self._console = console
        self.profiled = folder / "profile.json"
        self.record = folder / "recorded.jsonl"
        self._lengths: dict[Key, Lengths] = {}
        self._names: dict[Key, dict[str, str]] = {}
        """Digests by prompt id."""

    def profile(self, *, again: bool) -> None:
        if self.profiled.exists() and not again:
            return
        contexts = ",".join(map(str, PROFILED_CONTEXTS))
        command = [sys.executable, "-m", "vllm_rollout.cli", "profile", self._sizes.model, "--restart", "--no-logprobs"]
        command += ["--output", str(self.profiled), "--contexts", contexts, "--", *self._flags]
        self._console.print(f"$ {shlex.join(command)}")
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

    def server(self, name: str, flags: Sequence[str]) -> ServerProcess:
        model = resolve(self._sizes.model)
        return server_process("rollout", model, [*self._flags, *flags], self._folder / f"{name}.log")

    async def measure_real(self, server: ServerProcess) -> tuple[dict[Key, list[Asked]], dict[str, float]]:
        """Every way of every repeat once per pass (the recorded lengths are those of the first), and how long decode
        steps took in the last of them, as parts of the profile's, by ranges of batch sizes."""
        server.wait_until_healthy(lambda seconds, line: None)
        found: dict[Key, list[Asked]] = {}
        async with AsyncRolloutClient(server.url) as client:
            for way in WAYS:
                await self._warm_up(client, way)
            for number_of in range(self._sizes.passes):
                for repeat, way in product(range(self._sizes.repeats), WAYS):
                    begins = self._recorded_bytes()
                    asked = await WAYS[way](client, self._sizes, repeat)
                    self._console.print(
                        f"real, pass {number_of + 1}, {way}, repeat {repeat + 1}: {asked.seconds:.2f} s"
                    )
                    found.setdefault((way, repeat), []).append(asked)
                    if not number_of:
                        self._lengths[way, repeat] = lengths_of(self._recorded(begins))
                        self._names[way, repeat] = self._digests(server.url, self._sizes.questions(way, repeat))
        return found, drift_of(httpx.get(f"{server.url}/metrics", timeout=30).text)

    def measure_emulated(self, way: str, repeat: int) -> Asked:
        """On a server of its own."""
        name = f"{way}_{repeat}"
        rows = emulated_rows(
            self._lengths[way, repeat],
            {} if way == "rounds" else self._lengths[FULL_WAY, repeat],
            self._names[way, repeat],
            self._sizes.max_tokens,
        )
        (self._folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        device = self._folder / f"{name}.json"
        device.write_text(json.dumps({"profile": self.profiled.name, "lengths": {"trace": f"{name}.jsonl"}}))
        with self.server(name, ["--emulate", str(device)]) as server:
            server.wait_until_healthy(lambda seconds, line: None)
            asked = uvloop.run(self._ask_emulated(server, way, repeat))
        self._console.print(f"emulated, {way}, repeat {repeat + 1}: {asked.seconds:.2f} s")
        return asked

    async def _ask_emulated(self, server: ServerProcess, way: str, repeat: int) -> Asked:
        async with AsyncRolloutClient(server.url) as client:
            await self._warm_up(client, way)
            return await WAYS[way](client, self._sizes, repeat)

    async def _warm_up(self, client: AsyncRolloutClient, way: str) -> None:
        """Prompts into the prefix cache, as in a second epoch."""
        prompts: list[Any] = [{"messages": messages(question)} for question in self._sizes.questions(way, 0)]
        await client.rollout(prompts, 1, sampling={"max_tokens": 1})

    def _recorded_bytes(self) -> int:
        return self.record.stat().st_size if self.record.exists() else 0

    def _recorded(self, begins: int) -> list[list[RolloutPrompt]]:
        """Rollouts that were recorded since; the one that teaches pruning ends early and says nothing of lengths."""
        lines = self.record.read_bytes()[begins:].decode().splitlines()
        rows = [RolloutRow.model_validate_json(line) for line in lines if "group_size" in json.loads(line)]
        return [row.prompts for row in rows if row.max_tokens == self._sizes.max_tokens]

    def _digests(self, url: str, questions: Sequence[str]) -> dict[str, str]:
        model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        found = {}
        for number_of, question in enumerate(questions):
            body = {"model": model, "messages": messages(question)}
            answer = httpx.post(f"{url}/tokenize", json=body, timeout=30)
            answer.raise_for_status()
            found[str(number_of)] = digest_of(answer.json()["tokens"])
        return found


def summarize(real: Mapping[Key, Sequence[Asked]], emulated: Mapping[Key, Asked]) -> dict[str, Any]:
    """By way: seconds of each repeat, the median over its passes, the emulated device's and their ratio.

    `spread` is what the real engine differs from itself: slowest pass / fastest, of a repeat.
    """
    ways = {}
    for way in WAYS:
        keys = [key for key in real if key[0] == way]
        seconds = [median(asked.seconds for asked in real[key]) for key in keys]
        passes = [[asked.seconds for asked in real[key]] for key in keys]
        ways[way] = {
            "real_passes_s": passes,
            "real_s": seconds,
            "emulated_s": [emulated[key].seconds for key in keys],
            "ratio": sum(emulated[key].seconds for key in keys) / sum(seconds),
            "spread": median(max(each) / min(each) for each in passes),
            "real_tokens": [real[key][0].generated_tokens for key in keys],
            "emulated_tokens": [emulated[key].generated_tokens for key in keys],
        }
    return {"ways": ways, "largest_error": max(abs(row["ratio"] - 1) for row in ways.values())}


def table(result: dict[str, Any]) -> str:
    rows = []
    for way, row in result["ways"].items():
        tokens = sum(row["emulated_tokens"]) / sum(row["real_tokens"])
        cells = [TITLES[way], number(sum(row["real_s"]), 1), number(sum(row["emulated_s"]), 1)]
        rows.append([*cells, percent(row["ratio"] - 1, 1), number(row["spread"], 2), number(tokens, 3)])
    header = ["", "real, s", "emulated, s", "error", "slowest pass / fastest, real", "tokens, emulated / real"]
    sizes = result["workload"]["sizes"]
    title = (
        f"{sizes['prompts']} prompts, {sizes['group_size']} of {sizes['group_size'] + sizes['redundancy']}; rounds of "
        f"{sizes['prompts_per_round']} x {sizes['group_size']}; at most {sizes['max_tokens']} tokens"
    )
    return grid(title, header, rows)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.emulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--output", type=Path, default=OUTPUT, help="profile, traces and logs go into the folder of that name beside it"
    )
    add("--keep-profile", action="store_true", help="use the profile in that folder, if there is one")
    add("--server-args", default="", help="more flags for every server")
    add("--model", default=DEFAULT_MODEL, help="default %(default)s")
    add("--prompts", type=int, default=6, help="of a rollout (default %(default)s)")
    add("--group-size", type=int, default=4, help="trajectories per prompt (default %(default)s)")
    add("--redundancy", type=int, default=4, help="spare candidates per prompt (default %(default)s)")
    add("--prompts-per-round", type=int, default=4, help="P0 (default %(default)s)")
    add("--max-tokens", type=int, default=384, help="length cap (default %(default)s)")
    add("--repeats", type=int, default=2, help="other seeds (default %(default)s)")
    add("--passes", type=int, default=3, help="times that the real engine does each; their median counts (default 3)")
    add("--seed", type=int, default=31, help="repeat r has this + 1000 r (default %(default)s)")
    return parser.parse_args()
