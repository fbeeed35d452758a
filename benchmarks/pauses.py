"""How long the step loop of an engine core is held up by what API processes ask of it, part of benchmarks/scheduler.py.

The real scheduler steps with `NUM_RUNNING` requests and made-up outputs; between two steps the calls that have come are
carried out, as vLLM does. An API process posts `NUM_REWARDS` rewards, trains, and saves the state, `NUM_PROMPTS`
prompts and two heads, all at the same time. A pause is the time that all calls between two steps take. The garbage
collector, which may come at any moment, is off.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ParallelConfig

from tests.support.dry_run import DryRun
from vllm_rollout.adapter.api.engine_calls import EngineCalls
from vllm_rollout.adapter.api.learning import EngineLearning
from vllm_rollout.adapter.core.calls import rollout_call
from vllm_rollout.adapter.core.scheduler import RolloutScheduler
from vllm_rollout.adapter.options import RolloutOptions
from vllm_rollout.adapter.worker.worker import RolloutWorker
from vllm_rollout.group.history import ObservedLength
from vllm_rollout.group.judge import Judge, Scoring
from vllm_rollout.group.ledger import Reward
from vllm_rollout.group.lifecycle import Group, GroupTerms
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.types import Confidence, Observation
from vllm_rollout.tracker.feature_ring import FeatureRing, StateKey
from vllm_rollout.tracker.quality_head import warm_up_training
from vllm_rollout.tracker.quality_heads import QualityHeads
from vllm_rollout.tracker.tracker import CandidateTracker

NUM_RUNNING = 256
NUM_REWARDS = 8192
NUM_FIRST_REWARDS = 1024
"""Posted before, so that training is under way; half of them for a second head."""
NUM_PROMPTS = 131_072
GROUP_SIZE = 16
LENGTHS = (512, 1024)
HIDDEN_SIZE = 4096
CPU = torch.device("cpu")


class Core:
    """An engine core: scheduler, a worker that has heads but no model, and the calls that wait for the step to end."""

    def __init__(self, model: str, hidden_size: int) -> None:
        self.run = DryRun(RolloutScheduler, model, max_num_seqs=NUM_RUNNING, num_blocks=NUM_RUNNING * 300)
        for i in range(NUM_RUNNING):
            self.run.add(f"r{i}", 10**6, max_tokens=4000)
        self.scheduler = self.run.scheduler
        self.ring = FeatureRing(hidden_size, torch.bfloat16, 2**28)
        heads = QualityHeads(CandidateTracker(CPU), self.ring, hidden_size=hidden_size, model="m", device=CPU)
        self._worker = SimpleNamespace(quality_heads=heads)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="m"), parallel_config=ParallelConfig()
        )
        self.waiting: list[tuple[asyncio.Future, str, Any]] = []
        warm_up_training()  # as a worker does
        self.calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Seconds of each call, on the clock and of this thread, by operation."""
        self.pauses: list[tuple[float, float]] = []
        """The same between two steps in which there was a call."""

    def collective_rpc(self, method: str, args: tuple) -> list[Any]:
        return [getattr(RolloutWorker, method)(self._worker, *args)]

    def carry_out(self) -> None:
        waiting, self.waiting = self.waiting, []
        began = _now()
        for future, operation, payload in waiting:
            started = _now()
            future.set_result(rollout_call(self, operation, payload))
            self.calls[operation].append(_since(started))
        if waiting:
            self.pauses.append(_since(began))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    now = _now()
    return now[0] - began[0], now[1] - began[1]


class Client:
    """The engine client of an API process."""

    num_ranks = 1
    vllm_config = SimpleNamespace(speculative_config=None)

    def __init__(self, core: Core) -> None:
        self.engine_core = self
        self.core_engines = [core]

    async def _call_utility_async(self, method: str, operation: str, payload: Any, *, engine: Core) -> Any:
        future = asyncio.get_running_loop().create_future()
        engine.waiting.append((future, operation, payload))
        return await future

    async def call_utility_all_async(self, method: str, operation: str, payload: Any) -> list[Any]:
        return [await self._call_utility_async(method, operation, payload, engine=core) for core in self.core_engines]


def finish_rollout(core: Core, rollout_id: str, num: int, detection_length: int, rng: random.Random) -> list[Reward]:
    """Candidates that were scored and ended, in groups; returns their rewards."""
    judge: Judge = core.scheduler.judge
    plan, rewards, names = PruningPlan(detection_length, mode="shadow"), [], []
    for number in range(num // GROUP_SIZE):
        prompt_id, group, due = f"q{number}", Group(GroupTerms(GROUP_SIZE, GROUP_SIZE)), {}
        for index in range(GROUP_SIZE):
            group.launch()
            name = f"{rollout_id}-{number}-{index}"
            entry = judge.ledger.open(rollout_id, prompt_id, index, name, plan)
            due[index] = entry, Observation(Confidence(1.0, 1.0, rng.gauss(0, 1)), rng.gauss(0, 1), 1)
            good = rng.random() < 0.5
            rewards.append(Reward(prompt_id, index, float(good), good))
            names.append(StateKey(name, detection_length))
        judge.judge(group, Scoring(rollout_id, prompt_id, 7, plan), due)
        for entry, _ in due.values():
            entry.state, entry.num_tokens = "finished", 2 * detection_length
    states = torch.randn(num, core.ring._states.shape[1], generator=torch.Generator().manual_seed(num))
    core.ring.put(names, states.bfloat16())
    return rewards


async def under_way(core: Core, rng: random.Random) -> None:
    """All of it, with engine steps in between."""
    lengths = core.scheduler.judge.memory.lengths
    for number in range(NUM_PROMPTS):
        lengths.observe(f"id:{number}", [ObservedLength(100, False), ObservedLength(150 + number % 50, False)])
    options = RolloutOptions()
    poster = EngineLearning(EngineCalls(Client(core)), options)
    first = [finish_rollout(core, f"first{length}", NUM_FIRST_REWARDS // 2, length, rng) for length in LENGTHS]
    rewards = finish_rollout(core, "rollout", NUM_REWARDS, LENGTHS[0], rng)

    async def post_first() -> None:
        for length, posted in zip(LENGTHS, first, strict=True):
            await poster.post_rewards(f"first{length}", posted)

    poster._training_done = _at_once  # a save while training runs, as of another API process
    await _with_steps(core, post_first())
    core.calls.clear()
    core.pauses.clear()

    async def everything() -> None:
        receipt, state = await asyncio.gather(poster.post_rewards("rollout", rewards), poster.learning_state())
        assert list(receipt.statuses) == ["accepted"] * NUM_REWARDS
        assert len(state) > NUM_PROMPTS

    await _with_steps(core, everything())
    poster._training.cancel()


async def _at_once() -> None:
    """Nothing is waited for."""


async def _with_steps(core: Core, work: Any) -> None:
    task = asyncio.create_task(work)
    while not task.done():
        core.run.step()
        for _ in range(8):  # what the API processes do meanwhile
            await asyncio.sleep(0)
        core.carry_out()
    await task


def pauses(model: str, hidden_size: int = HIDDEN_SIZE, seed: int = 0) -> dict[str, Any]:
    """One run; times in milliseconds."""
    torch.set_num_threads(1)
    core = Core(model, hidden_size)
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    try:
        asyncio.run(under_way(core, random.Random(seed)))
    finally:
        gc.enable()
    return {
        "seconds": time.perf_counter() - started,
        "hidden_size": hidden_size,
        "pauses": _summary(core.pauses),
        "calls": {operation: _summary(times) for operation, times in sorted(core.calls.items())},
    }


def _summary(times: list[tuple[float, float]]) -> dict[str, float]:
    """`cpu_ms` is the time of the thread, which other processes of a busy machine do not lengthen."""
    clock, cpu = (sorted(column) for column in zip(*times, strict=True))
    return {
        "num": len(times),
        "longest_ms": clock[-1] * 1e3,
        "longest_cpu_ms": cpu[-1] * 1e3,
        "median_cpu_ms": statistics.median(cpu) * 1e3,
        "total_cpu_ms": sum(cpu) * 1e3,
    }
