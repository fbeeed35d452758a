"""The same prompts, lengths and machine for the emulated device and for the simulator.

Models, lengths and their sources are those of `benchmarks.rounds_simulated`.
Invariant: a candidate's length is what `emulation.fate` draws, and the same each time its prompt runs.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import server_process
from benchmarks.rounds_simulated.setup import BETWEEN_SHARE, MODELS, PROMPT_TOKENS, Model, ModelName, lengths
from vllm_rollout.emulation.fate import Fates
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.group.prompt_key import seed_for
from vllm_rollout.group.rounds import Run, RunTerms
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import ServerProcess
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.pool import PoolCandidate
from vllm_rollout.simulator.rounds.prompts import DataPrompt
from vllm_rollout.simulator.rounds.trainer import Trainer

FIRST_SEED = 1000
"""Sampling seed of candidate 0."""
SYNCHRONOUS_ROUNDS = 2
"""Where nothing is deferred, every round is like the other."""


@dataclass(frozen=True)
class Workload:
    model_name: ModelName
    num_ranks: int
    prompts_per_round: int
    group_size: int
    seed: int

    @property
    def model(self) -> Model:
        return MODELS[self.model_name]

    @property
    def max_tokens(self) -> int:
        return self.model.max_tokens

    @property
    def token_ids(self) -> range:
        """That prompts are made of."""
        return range(100, 40_000)

    @property
    def machine(self) -> Machine:
        return replace(self.model.machine, num_ranks=self.num_ranks)

    @property
    def device(self) -> dict[str, Any]:
        """For `--emulate`: `Model.cost` below the batch size where computing takes longer than reading weights."""
        model = self.model
        empty_s, one_token_s = model.cost.ptl(1, 0), model.cost.ptl(1, 1)
        its = lengths(self.model_name, BETWEEN_SHARE, 1)
        return {
            "step": {
                "ms": 1e3 * empty_s,
                "ms_per_request": 0.0,
                "ms_per_context_token": 1e3 * (one_token_s - empty_s),
                "ms_per_prefilled_token": 1e3 * model.cost.prefill_s_per_token,
            },
            "kv_tokens": model.machine.kv_capacity_tokens,
            "lengths": {
                "log_normal": {
                    "mean": its.median * math.exp((its.sigma**2 + its.prompt_sigma**2) / 2),
                    "sigma": its.sigma,
                    "prompt_sigma": its.prompt_sigma,
                }
            },
            "seed": self.seed,
        }

    def terms(self, prompts: float, responses: float) -> RunTerms:
        return RunTerms(self.group_size, self.prompts_per_round, prompts, responses)

    def num_prompts(self, terms: RunTerms) -> int:
        """Of one period; where nothing is deferred, of `SYNCHRONOUS_ROUNDS` rounds."""
        return terms.num_period_prompts or SYNCHRONOUS_ROUNDS * terms.prompts_per_round


class EmulatedDataSet:
    """What the emulated device would say, as the simulator's `DataSet`."""

    def __init__(self, its: Workload, num_prompts: int) -> None:
        self._fates = Fates(Settings.model_validate(its.device))
        self._max_tokens = its.max_tokens
        chance = random.Random(f"rounds_emulated/{its.seed}")
        self.token_ids = [
            [chance.randrange(its.token_ids.start, its.token_ids.stop) for _ in range(PROMPT_TOKENS)]
            for _ in range(num_prompts)
        ]
        self.prompts = [DataPrompt(number, str(number), PROMPT_TOKENS, its.max_tokens) for number in range(num_prompts)]

    def candidates(self, prompt: DataPrompt, epoch: int, attempt: int, count: int) -> list[PoolCandidate]:
        token_ids, first = self.token_ids[prompt.number], seed_for(FIRST_SEED, prompt.id)
        return [self._candidate(self._fates.of(token_ids, first + i, i, {}).length) for i in range(count)]

    def in_order(self, seed: int) -> list[dict[str, Any]]:
        """Prompts of requests, as the simulator's trainer hands them in."""
        all_at_once = Run(RunTerms(1, len(self.prompts), 1.0, 1.0))
        handed_in = Trainer(self.prompts, 1, seed).hand_in(all_at_once).prompts
        return [{"id": each.prompt_id, "prompt_token_ids": self.token_ids[int(each.prompt_id)]} for each in handed_in]

    def _candidate(self, length: int) -> PoolCandidate:
        num_tokens = min(length, self._max_tokens)
        end = "stop" if length <= self._max_tokens else "length"
        return PoolCandidate(num_tokens, end, num_tokens, False, None, None)


def emulated_server(its: Workload, speed: float, folder: Path) -> ServerProcess:
    """Its device and ranks; the steps of each go into `folder`/steps."""
    device = folder / "device.json"
    device.write_text(json.dumps(its.device))
    flags = [
        "--max-model-len", str(its.max_tokens + 1024), "--max-num-seqs", str(its.machine.max_num_seqs),
        "--max-num-batched-tokens", "8192", "--block-size", str(its.machine.block_size), "--emulate", str(device),
        "--emulate-log", str(folder / "steps"), "--emulate-speed", str(speed),
        "--data-parallel-size", str(its.num_ranks), "--api-server-count", "1", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    return server_process("rollout", resolve(DEFAULT_MODEL), flags, folder / "server.log")
