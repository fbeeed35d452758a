"""Shared by an emulated device and the simulator: prompts, lengths and machine at RollPacker's scale.

Invariant: `emulation.fate` draws a candidate's length, and the length is the same each time the prompt runs.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import arguments_of, emulated_process, record_of_run
from benchmarks.rollpacker import (
    GPU_SOURCE,
    MODEL_NAMES,
    MODEL_SOURCE,
    MODELS,
    PROMPT_TOKENS,
    TAIL_SOURCE,
    TAILS,
    Model,
    ModelName,
)
from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.parts.emulation.fate import Fates
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.rounds.rules.rounds import Run, RunTerms
from vllm_rollout.parts.rounds.with_shaping.simulated.data import DataPrompt, Trainer
from vllm_rollout.process import ServerProcess
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate

FIRST_SEED = 1000
"""Sampling seed of candidate 0."""
TOKEN_IDS = range(100, 40_000)
"""Token ids that prompts are made of."""


@dataclass(frozen=True)
class Workload:
    model_name: ModelName
    num_ranks: int
    num_prompts: int
    """Prompts of a round or of a rollout."""
    group_size: int
    seed: int
    speed: float = 1.0
    """--rollout-emulate-speed of the server: 0.5 makes every step last twice as long."""

    @property
    def model(self) -> Model:
        return MODELS[self.model_name]

    @property
    def machine(self) -> Machine:
        return replace(self.model.machine, num_ranks=self.num_ranks)

    @property
    def device(self) -> dict[str, Any]:
        """For `--rollout-emulate`: `Model.cost` at batch sizes at which reading weights takes longer than computing."""
        cost = self.model.cost
        empty_s, one_token_s = cost.ptl(1, 0), cost.ptl(1, 1)
        return {
            "step": {
                "ms": 1e3 * empty_s,
                "ms_per_request": 0.0,
                "ms_per_context_token": 1e3 * (one_token_s - empty_s),
                "ms_per_prefilled_token": 1e3 * cost.prefill_s_per_token,
            },
            "kv_tokens": self.model.machine.kv_capacity_tokens,
            "lengths": {"log_normal": TAILS[self.model_name].described()},
            "seed": self.seed,
        }


class EmulatedDataSet:
    """Candidates of the emulated device, as the simulator's `DataSet`."""

    def __init__(self, its: Workload, num_prompts: int) -> None:
        self._fates = Fates(Settings.model_validate(its.device))
        self._max_tokens = max_tokens = its.model.max_tokens
        chance = random.Random(f"rounds_emulated/{its.seed}")
        self.token_ids = [
            [chance.randrange(TOKEN_IDS.start, TOKEN_IDS.stop) for _ in range(PROMPT_TOKENS)]
            for _ in range(num_prompts)
        ]
        self.prompts = [DataPrompt(number, str(number), PROMPT_TOKENS, max_tokens) for number in range(num_prompts)]

    def candidates(self, prompt: DataPrompt, epoch: int, attempt: int, count: int) -> list[PoolCandidate]:
        token_ids, first = self.token_ids[prompt.number], seed_for(FIRST_SEED, prompt.id)
        return [self._candidate(self._fates.of(token_ids, first + i, i, {}).length) for i in range(count)]

    def in_order(self, seed: int) -> list[dict[str, Any]]:
        """Prompts of requests, in the order in which the simulator's trainer hands them in."""
        all_at_once = Run(RunTerms(1, len(self.prompts), 1.0, 1.0))
        handed_in = Trainer(self.prompts, 1, seed).hand_in(all_at_once).prompts
        return [{"id": each.prompt_id, "prompt_token_ids": self.token_ids[int(each.prompt_id)]} for each in handed_in]

    def _candidate(self, length: int) -> PoolCandidate:
        num_tokens = min(length, self._max_tokens)
        end = "stop" if length <= self._max_tokens else "length"
        return PoolCandidate(num_tokens, end, num_tokens, False, None, None)


def workload_arguments(
    description: str | None, name: str, *, ranks: int, prompts: int, speed: float
) -> argparse.ArgumentParser:
    parser = arguments_of(description, name, seed=3)
    add = parser.add_argument
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="model: costs, lengths, cap (default %(default)s)")
    add("--ranks", type=int, default=ranks, help="data-parallel engines (default %(default)s)")
    add("--prompts", type=int, default=prompts, help="prompts per round or rollout (default %(default)s)")
    add("--group-size", type=int, default=8, help="answers per group (default %(default)s)")
    add("--speed", type=float, default=speed, help="--rollout-emulate-speed of the server (default %(default)s)")
    return parser


def workload_of(arguments: argparse.Namespace) -> Workload:
    return Workload(
        arguments.model, arguments.ranks, arguments.prompts, arguments.group_size, arguments.seed, arguments.speed
    )


def record_of(its: Workload, conditions: str | None) -> dict[str, Any]:
    """The head of a result: `record_of_run` with the workload and its sources."""
    workload = {
        "conditions": conditions, "model": its.model.described(), "ranks": its.num_ranks, "speed": its.speed,
        "prompts": its.num_prompts, "group_size": its.group_size, "device": its.device,
        "sources": [GPU_SOURCE, MODEL_SOURCE, TAIL_SOURCE],
    }  # fmt: skip
    return record_of_run(seed=its.seed, workload=workload)


def title_of(result: dict[str, Any]) -> str:
    its = result["workload"]
    return (
        f"{its['model']['title']}, {its['prompts']} x {its['group_size']}, {its['ranks']} ranks, speed {its['speed']:g}"
    )


def emulated_server(its: Workload, folder: Path) -> ServerProcess:
    """The server with the workload's device and ranks. The steps of each rank go into `folder`/steps."""
    flags = [
        "--max-model-len", str(its.model.max_tokens + 1024), "--max-num-seqs", str(its.machine.max_num_seqs),
        "--max-num-batched-tokens", "8192", "--block-size", str(its.machine.block_size),
        "--rollout-emulate-log", str(folder / "steps"), "--rollout-emulate-speed", str(its.speed),
        "--data-parallel-size", str(its.num_ranks), "--api-server-count", "1",
    ]  # fmt: skip
    return emulated_process(its.device, flags, folder)
