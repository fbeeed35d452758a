"""Rounds whose candidates do not fit into the KV cache, with and without `--parallelism auto`, on an emulated device.

Everything but the device is the real thing: HTTP, runs, the planner, engines that are rebuilt behind the server, vLLM's
scheduler, KV cache manager and preemption. Every way runs the same prompts and lengths on a fresh server:

fixed-1, fixed-2, fixed-4  one tensor-parallel size
roomy-1                    the same at 1, with a KV cache for everybody: what preemptions alone cost
auto                       begins at 1; the planner decides (RollPacker section 4.2)
auto-profile               the same with --rollout-profile: the profile says where to begin

The pressure is synthetic: the KV cache of one device holds --kv-tokens, of two twice as many. A step reads the weights
and the KV cache, spread over the devices, and with more than one of them waits for two all-reduces per layer; devices
that a smaller size leaves idle do nothing for it. Time is stretched (--speed 0.5: every step lasts twice as long);
seconds of rounds are the device's. Seconds of a rebuild are this host's, without a model to load; a round's time is
without them. Beside each way stands the simulator, on the same lengths and costs.

Run from the repository root: python -m benchmarks.planner_emulated
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.console import Console

from benchmarks.common import ROOT, record_of_run, server_process, write_json
from benchmarks.rounds_emulated.workload import FIRST_SEED, EmulatedDataSet, Workload
from benchmarks.rounds_simulated.setup import GPU_SOURCE, MESSAGE_S, MODEL_SOURCE, PROMPT_TOKENS, TAIL_SOURCE
from benchmarks.tables import grid, number, percent
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.emulation.step_log import Summary, read_steps
from vllm_rollout.group.cost import CostModel, PTLCurve
from vllm_rollout.group.forecast import EngineSize, choose_start, expected_round
from vllm_rollout.group.planner import sizes_of
from vllm_rollout.group.rounds import RoundKind, RunTerms
from vllm_rollout.models import resolve
from vllm_rollout.process import ServerProcess, exit_on_sigterm
from vllm_rollout.profiling.profile_file import CurveFit, EngineFacts, Profile
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.rounds.replay import RunConditions, replay_run
from vllm_rollout.simulator.rounds.settings import RoundSetting
from vllm_rollout.simulator.rounds.sizes import SizedMachines

OUTPUT = ROOT / "benchmarks/results/planner_emulated.json"
MODEL = "tiny-random"
"""Its configuration is served: 4 attention heads, which 4 devices can share."""
NUM_DEVICES = 4
WAYS: dict[str, tuple[str, ...]] = {
    **{f"fixed-{size}": ("--tensor-parallel-size", str(size)) for size in sizes_of(NUM_DEVICES, NUM_DEVICES)},
    "roomy-1": ("--tensor-parallel-size", "1"),
    "auto": ("--parallelism", "auto", "--parallelism-devices", str(NUM_DEVICES)),
    "auto-profile": (
        "--parallelism", "auto", "--parallelism-devices", str(NUM_DEVICES), "--rollout-profile", "profile.json",
    ),
}  # fmt: skip
ALL_REDUCE_S = 15e-6
"""Of a decode step's few hundred kilobytes over NVLink: assumed."""
MAX_NUM_SEQS = 512
ROOMY_TOKENS = 2**20
BLOCK_SIZE = 16


class RoundRow(NamedTuple):
    """A round; seconds of the device's clock."""

    kind: RoundKind
    size: int
    seconds: float
    num_preemptions: int
    generated_tokens: int
    rebuild_s: float | None
    """Of this host, before the round."""


@dataclass(frozen=True)
class PressedWorkload(Workload):
    """Rounds on one engine whose KV cache is small."""

    kv_tokens: int
    """Of one device."""
    cap: int
    """Output tokens of a candidate."""
    num_periods: int

    @property
    def max_tokens(self) -> int:
        return self.cap

    @property
    def token_ids(self) -> range:
        return range(100, 500)

    @property
    def terms_of_run(self) -> RunTerms:
        return self.terms(1.25, 1.25)

    @property
    def num_run_prompts(self) -> int:
        return self.num_periods * self.num_prompts(self.terms_of_run)

    def cost(self, size: int) -> CostModel:
        model = replace(self.model, tensor_parallel_size=size)
        waits_s = 0.0 if size == 1 else 2 * model.num_layers * ALL_REDUCE_S
        curves = tuple(
            (context, PTLCurve(curve.batch_sizes, tuple(seconds + waits_s for seconds in curve.seconds)))
            for context, curve in model.cost.curves
        )
        return replace(model.cost, curves=curves, max_num_seqs=MAX_NUM_SEQS)


def main() -> None:
    arguments = _parse_arguments()
    exit_on_sigterm()
    console = Console(stderr=True)
    its = PressedWorkload(
        "7B/8k", 1, arguments.prompts_per_round, arguments.group_size, arguments.seed, arguments.kv_tokens,
        arguments.max_tokens, arguments.periods,
    )  # fmt: skip
    result = record_of_run(seed=arguments.seed, workload=described(its, arguments.speed))
    if arguments.keep and arguments.output.exists():
        before = json.loads(arguments.output.read_text())
        if before["workload"] | {"conditions": __doc__} != json.loads(json.dumps(result["workload"])):
            raise SystemExit(f"{arguments.output} is of another workload. Leave --keep out.")
        result["ways"] = before["ways"]
    ways = result.setdefault("ways", {})
    for way in arguments.ways:
        ways[way] = measure(its, way, arguments.speed)
        console.print(f"{way}: {ways[way]['seconds']:.1f} s", highlight=False)
        write_json(arguments.output, result | {"ways": {way: ways[way] for way in WAYS if way in ways}})
    result["ways"] = {way: ways[way] for way in WAYS if way in ways}
    result["simulated"] = {way: simulated(its, way) for way in WAYS}
    write_json(arguments.output, result)
    print(table(result))


def described(its: PressedWorkload, speed: float) -> dict[str, Any]:
    return {
        "conditions": __doc__, "model": its.model.described(), "speed": speed, "kv_tokens_of_one": its.kv_tokens,
        "prompts_per_round": its.prompts_per_round, "group_size": its.group_size, "max_tokens": its.max_tokens,
        "prompts": its.num_run_prompts, "all_reduce_s": ALL_REDUCE_S,
        "step_ms_of_128_at_context_600": {
            str(size): 1e3 * its.cost(size).ptl(128, 600) for size in sizes_of(NUM_DEVICES, NUM_DEVICES)
        },
        "sources": [GPU_SOURCE, MODEL_SOURCE, TAIL_SOURCE],
    }  # fmt: skip


def measure(its: PressedWorkload, way: str, speed: float) -> dict[str, Any]:
    """One way on a fresh server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with pressed_server(its, way, speed, folder) as server:
            server.wait_until_healthy(lambda seconds, line: None)
            rows = uvloop.run(_rounds(its, size_of(way), server.url, speed))
        steps = Summary.of(read_steps(folder / "steps")[0].steps)
    return summary_of(rows) | {"idle_share": steps.idle_s / (steps.busy_s + steps.idle_s)}


def pressed_server(its: PressedWorkload, way: str, speed: float, folder: Path) -> ServerProcess:
    write_profile(its, resolve(MODEL), folder / "profile.json")
    device = {"profile": "profile.json", "lengths": its.device["lengths"], "seed": its.seed}
    if way.startswith("roomy"):
        device["kv_tokens"] = ROOMY_TOKENS
    (folder / "device.json").write_text(json.dumps(device))
    flags = [
        "--max-model-len", str(its.max_tokens + 1024), "--max-num-seqs", str(MAX_NUM_SEQS),
        "--max-num-batched-tokens", "8192", "--block-size", str(BLOCK_SIZE), "--emulate", str(folder / "device.json"),
        "--emulate-log", str(folder / "steps"), "--emulate-speed", str(speed), "--disable-uvicorn-access-log",
        *(str(folder / flag) if flag == "profile.json" else flag for flag in WAYS[way]),
    ]  # fmt: skip
    return server_process("rollout", resolve(MODEL), flags, folder / "server.log")


def write_profile(its: PressedWorkload, model: str, path: Path) -> None:
    """What `vllm-rollout profile` would have measured of such devices."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_rollout.adapter.api.fingerprint import fingerprint_of

    engines, fits = [], []
    for size in sizes_of(NUM_DEVICES, NUM_DEVICES):
        cost = its.cost(size)
        engines.append(
            EngineFacts(
                tensor_parallel_size=size, max_num_seqs=MAX_NUM_SEQS, max_model_len=its.max_tokens + 1024,
                max_num_batched_tokens=8192, block_size=BLOCK_SIZE, kv_capacity_tokens=size * its.kv_tokens,
                kv_bytes_per_token=its.model.kv_bytes_per_token, prefill_s_per_token=cost.prefill_s_per_token,
                step_prefill_s=cost.step_prefill_s,
            )
        )  # fmt: skip
        fits += [
            CurveFit(
                tensor_parallel_size=size, context_tokens=round(context) or 1, mean_context_tokens=context,
                batch_sizes=curve.batch_sizes, seconds=curve.seconds, r_squared=1.0, residuals={},
            )
            for context, curve in cost.curves
        ]  # fmt: skip
    config = EngineArgs(model=model).create_engine_config()
    Profile(
        created="", updated="", command="", model_name=MODEL, model=fingerprint_of(config), hardware={}, versions={},
        serve_flags=(), flags={}, logprobs=False, engines=tuple(engines), fits=tuple(fits),
    ).write(path)  # fmt: skip


def size_of(way: str) -> int | None:
    """None where the planner says it."""
    flag, value, *_ = WAYS[way]
    return int(value) if flag == "--tensor-parallel-size" else None


def simulated(its: PressedWorkload, way: str) -> dict[str, Any]:
    """The same rounds in the simulator, where a rebuild takes no time."""
    kv_tokens = ROOMY_TOKENS if way.startswith("roomy") else its.kv_tokens
    sizes = sizes_of(NUM_DEVICES, NUM_DEVICES)
    machines = {size: Machine(its.cost(size), 1, MAX_NUM_SEQS, size * kv_tokens) for size in sizes}
    size = size_of(way)
    planned = None
    if size is None:
        knows_costs = way == "auto-profile"
        size = start_of(its) if knows_costs else min(sizes)
        planned = SizedMachines(machines, size, knows_costs)
    data = EmulatedDataSet(its, its.num_run_prompts)
    conditions = RunConditions(data, machines[size], seed=its.seed, message_s=MESSAGE_S, sizes=planned)
    run = replay_run(conditions, RoundSetting.of(its.terms_of_run))
    return means_of(
        [
            {
                "kind": each.kind,
                "size": each.tensor_parallel_size or size,
                "seconds": each.seconds,
                "num_preemptions": each.num_preemptions,
            }
            for each in run.rounds
        ]
    )


def start_of(its: PressedWorkload) -> int:
    """Where a server with the profile begins."""
    engines = {size: EngineSize(its.cost(size), size * its.kv_tokens) for size in sizes_of(NUM_DEVICES, NUM_DEVICES)}
    terms = its.terms_of_run
    expected = expected_round(
        terms.num_prompts * terms.num_candidates, terms.prompts_per_round * terms.group_size, its.max_tokens,
        prompt_tokens=PROMPT_TOKENS, group_size=terms.num_candidates,
    )  # fmt: skip
    return choose_start(engines, expected).size


async def _rounds(its: PressedWorkload, fixed_size: int | None, url: str, speed: float) -> list[RoundRow]:
    terms, rows = its.terms_of_run, []
    prompts = EmulatedDataSet(its, its.num_run_prompts).in_order(its.seed)
    async with AsyncRolloutClient(url) as client:
        run = await client.run(
            terms.group_size,
            terms.prompts_per_round,
            prompt_speculation=terms.prompt_speculation,
            response_speculation=terms.response_speculation,
            sampling={"max_tokens": its.max_tokens, "seed": FIRST_SEED},
            return_logprobs=False,
            return_text=False,
        )
        num_rebuilds = num_preempted = 0
        async for answer in run.rounds(prompts):
            now = (await run.refresh()).parallelism
            is_rebuilt = now is not None and now.num_rebuilds > num_rebuilds
            if is_rebuilt:
                num_rebuilds, num_preempted = now.num_rebuilds, 0  # another engine, which counts from zero
            (engine,) = await client.engines()
            rows.append(
                RoundRow(
                    answer.kind,
                    fixed_size if now is None else now.tensor_parallel_size,
                    answer.timing.latency_s * speed,
                    engine.num_preemptions - num_preempted,
                    answer.usage.generated_tokens,
                    now.last_rebuild_s if is_rebuilt else None,
                )
            )
            num_preempted = engine.num_preemptions
    return rows


def summary_of(rows: list[RoundRow]) -> dict[str, Any]:
    return {
        **means_of([row._asdict() for row in rows]),
        "rebuild_s": [row.rebuild_s for row in rows if row.rebuild_s is not None],
    }


def means_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of measured rounds, or of simulated ones."""
    result: dict[str, Any] = {
        "seconds": sum(each["seconds"] for each in rounds),
        "num_preemptions": sum(each["num_preemptions"] for each in rounds),
    }
    for kind in ("short", "long"):
        of_kind = [each for each in rounds if each["kind"] == kind]
        for name, key in ((f"{kind}_s", "seconds"), (f"{kind}_preemptions", "num_preemptions")):
            result[name] = sum(each[key] for each in of_kind) / len(of_kind) if of_kind else None
    return result | {"rounds": rounds}


def table(result: dict[str, Any]) -> str:
    """Each measured number with the simulated one behind it."""
    its, sources = result["workload"], (result["ways"], result["simulated"])

    def both(way: str, shown: Callable[[dict[str, Any], dict[str, Any] | None], str]) -> list[str]:
        return [shown(of[way], of.get("fixed-1")) if way in of else "—" for of in sources]

    def times(key: str) -> Callable[[dict[str, Any], dict[str, Any] | None], str]:
        return lambda row, base: number(base[key] / row[key], 2) if base else "—"

    rows = []
    for way, simulated_row in result["simulated"].items():
        measured = result["ways"].get(way)
        sizes = [each["size"] for each in (measured or simulated_row)["rounds"]]
        rows.append(
            [
                way, " ".join(map(str, sizes)),
                *both(way, lambda row, _: number(row["short_preemptions"], 0)),
                *both(way, lambda row, _: number(row["short_s"], 2)), *both(way, times("short_s")),
                *both(way, lambda row, _: number(row["long_s"], 2)),
                *both(way, lambda row, _: number(row["seconds"], 1)), *both(way, times("seconds")),
                "—" if measured is None else " ".join(number(seconds, 1) for seconds in measured["rebuild_s"]) or "0",
                "—" if measured is None else percent(measured["idle_share"], 1),
            ]
        )  # fmt: skip
    title = (
        f"rounds of {its['prompts_per_round']} x {its['group_size']}, at most {its['max_tokens']} tokens, KV cache of "
        f"{its['kv_tokens_of_one']:,} tokens per device, speed {its['speed']:g}"
    )
    names = ("preemptions per short round", "short round, s", "× fixed-1", "long round, s", "all, s", "× fixed-1")
    header = ["", "sizes", *(column for name in names for column in (name, "simulated")), "rebuilds, s", "idle"]
    return grid(title, header, rows)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prompts-per-round", type=int, default=16, help="P0 (default %(default)s)")
    add("--group-size", type=int, default=8, help="R0 (default %(default)s)")
    add("--max-tokens", type=int, default=2048, help="default %(default)s")
    add("--kv-tokens", type=int, default=40_000, help="of one device (default %(default)s)")
    add("--periods", type=int, default=2, help="as many short rounds as fill a long one, and that one")
    add("--ways", nargs="*", choices=list(WAYS), default=list(WAYS), help="default: all; none: simulate only")
    add("--keep", action="store_true", help="keep the other ways that --output has of the same workload")
    add("--speed", type=float, default=0.5, help="--emulate-speed of the server (default %(default)s)")
    add("--seed", type=int, default=3, help="default %(default)s")
    add("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
