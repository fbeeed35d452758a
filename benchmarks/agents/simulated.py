"""Replay of the conversations by `vllm-rollout simulate`, with the device's step costs and no server."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.agents.ways import GROUP_SIZE, Way
from benchmarks.agents.world import PROMPT_TOKENS, TERMS, course_of
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.emulation.device import cost_of
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.sessions.with_shaping.simulated import MORE_SESSIONS, SessionGroup, run_sessions
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate

WAYS: dict[Way, int] = {"wait 8": 8, "wait 16": 16, "race": 16, "race 10": 10, "refill 10": 10}
"""Way -> conversations that a group begins with."""


class Simulated(NamedTuple):
    seconds: float
    generated_tokens: int


def simulate(device: dict[str, Any], way: Way, seed: int, num_groups: int) -> Simulated:
    settings = Settings.model_validate(device)
    machine = Machine(cost_of(settings), kv_capacity_tokens=settings.kv_tokens)
    num_candidates = WAYS[way]
    plan = GroupPlan(GROUP_SIZE, num_candidates - GROUP_SIZE, early_stop=not way.startswith("wait"))
    num_sessions = num_candidates * (1 if way == "race 10" else MORE_SESSIONS)
    races = []
    for group in range(num_groups):
        courses = [course_of(seed, group, number) for number in range(num_sessions)]
        pool = [PoolCandidate(sum(each.turns), "stop", sum(each.turns), False, None, None) for each in courses]
        races.append(SessionGroup(f"{group}", plan, pool, PROMPT_TOKENS, courses=courses))
    ran = run_sessions(machine, races, TERMS)
    return Simulated(ran.seconds, sum(race.result.generated_tokens for race in races))
