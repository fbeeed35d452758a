"""Simulated times of the ways of `benchmarks.shaping`, from the full lengths of a repeat's pool.

`simulator.replay` starts without a history of lengths, but redundancy "auto" was measured with one. So this module puts
the parts of a replay together: allocation from the server's own history, and the race of `simulator.rank`. For ways
without history it gives the numbers of `replay`, which a test checks.

Invariant: no measured time goes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.shaping.records import GroupRecord, Run
from benchmarks.shaping.setup import BASELINE, WAYS, Sizes, Way, WayName
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.prompt_key import history_key
from vllm_rollout.parts.memories.rules import Memories
from vllm_rollout.parts.pruning.saved_state import parse_state
from vllm_rollout.parts.rounds.http.saved import parse_saved
from vllm_rollout.parts.shaping.rules.allocation import BatchAllocation, BatchPrompt, allocate_batch, allocated
from vllm_rollout.parts.shaping.rules.history import LENGTHS, LengthHistory
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate, Race
from vllm_rollout.simulator.rank import run_races


class Simulated(NamedTuple):
    seconds: float
    """Seconds, or steps on a machine without a profile."""
    generated_tokens: int
    shares: list[int]
    """Number of candidates of each prompt."""


def history_of(state: bytes) -> LengthHistory:
    """The server's history of lengths, from GET /v1/rollouts/state."""
    memories = Memories(dict(faces("memory"))).restored(parse_state(parse_saved(state).learned).rows)
    lengths = LENGTHS.of(memories.base)
    assert lengths is not None, "shaping is there"
    return lengths


def simulate(sizes: Sizes, pool: Run, machine: Machine, history: LengthHistory) -> dict[WayName, Simulated]:
    """Simulate every way on the candidates of one repeat's pool. Raises: ValueError if a full length is not known."""
    shares = allocation(sizes, pool.groups, machine, history)
    return {name: _simulated(sizes, way, pool.groups, machine, shares) for name, way in WAYS.items()}


def allocation(
    sizes: Sizes, groups: Sequence[GroupRecord], machine: Machine, history: LengthHistory
) -> BatchAllocation:
    """Allocate candidates to prompts as the server does."""
    return allocate_batch(
        [
            BatchPrompt(history.of(history_key(group.prompt_id, ())), group.prompt_tokens, sizes.max_tokens)
            for group in groups
        ],
        history.dataset(),
        machine.cost,
        group_size=sizes.group_size,
        max_candidates=sizes.max_num_seqs,
        tradeoff=sizes.tradeoff,
    )


def _simulated(
    sizes: Sizes, way: Way, groups: Sequence[GroupRecord], machine: Machine, shares: BatchAllocation
) -> Simulated:
    plans = _plans(sizes, way, len(groups), shares)
    races = [
        Race(group.prompt_id, plan, _candidates(group, plan.num_candidates), group.prompt_tokens)
        for group, plan in zip(groups, plans, strict=True)
    ]
    run = run_races(machine, races)
    generated = sum(ending.num_tokens for race in races for ending in race.endings)
    return Simulated(run.seconds, generated, [plan.num_candidates for plan in plans])


def _plans(sizes: Sizes, way: Way, num_prompts: int, shares: BatchAllocation) -> list[GroupPlan]:
    if not isinstance(way.redundancy, str):
        return [sizes.plan(way, sizes.spare(way))] * num_prompts
    plan = sizes.plan(way, sizes.group_size)
    if way.redundancy == "auto":
        return shares.plans(plan)
    return [allocated(plan, its.num_candidates, extreme=False) for its in shares.prompts]


def _candidates(group: GroupRecord, count: int) -> list[PoolCandidate]:
    return [
        PoolCandidate(e.num_tokens, "length" if e.truncated else "stop", e.num_tokens, False, None, None)
        for e in group.endings(count)
    ]


def speed_ups(seconds: Mapping[WayName, float]) -> dict[WayName, float]:
    """Speed-up of each way over the baseline."""
    return {name: seconds[BASELINE] / value for name, value in seconds.items()}
