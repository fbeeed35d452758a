"""A trace replayed under one setting: rollout after rollout, as a trainer would ask for them.

Invariant: what is decided is decided by `group/`; a replay depends on trace, setting, machine and seed only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vllm_rollout.config import REWARD_THRESHOLD
from vllm_rollout.group.judging.audit import AuditTurns, with_audits
from vllm_rollout.group.judging.judge import Judge
from vllm_rollout.group.judging.ledger import Scoring
from vllm_rollout.group.lengths.history import observed_lengths
from vllm_rollout.group.racing.selection import conclude
from vllm_rollout.group.ranks.placement import Placement
from vllm_rollout.group.ranks.work import TokenCost
from vllm_rollout.group.types import GroupResult
from vllm_rollout.simulator.fleet import FleetRun, run_fleet
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.outcome import Outcome, Tally
from vllm_rollout.simulator.planner import Planner
from vllm_rollout.simulator.pool import Pools
from vllm_rollout.simulator.race import Race
from vllm_rollout.simulator.rank import run_races
from vllm_rollout.simulator.settings import Setting
from vllm_rollout.trace.rows import TracedRollout


def replay(
    pools: Pools,
    setting: Setting,
    machine: Machine,
    *,
    epochs: int = 1,
    seed: int = 0,
    on_rollout: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run every rollout of the trace, `epochs` times over.

    Raises: PlanError for a setting that no engine would take; ValueError for a candidate the KV cache cannot hold.
    """
    return _Replay(pools, setting, machine, seed).run(epochs, on_rollout)


class _Replay:
    def __init__(self, pools: Pools, setting: Setting, machine: Machine, seed: int) -> None:
        self._pools = pools
        self._setting = setting
        self._machine = machine
        self._seed = seed
        self._planner = Planner(setting, machine)
        self._judges = [Judge() for _ in range(machine.num_ranks)]
        self._placement = placement_on(machine)
        self._tally = Tally(setting)
        self._audit_turns = AuditTurns()

    def run(self, epochs: int, on_rollout: Callable[[], None]) -> Outcome:
        for epoch in range(epochs):
            for number, rollout in enumerate(self._pools.trace.rollouts):
                self._roll_out(epoch, number, rollout)
                on_rollout()
        return self._tally.outcome()

    def _roll_out(self, epoch: int, number: int, rollout: TracedRollout) -> None:
        name = f"rollout-{epoch}-{number}"
        contents = [f"{name}/{prompt.id}" for prompt in rollout.prompts]
        planned, ratio = self._planner.plans(rollout.prompts), self._setting.audit_ratio
        if self._setting.audit_unit == "group":
            planned = with_audits(planned, ratio, self._seed, contents)
        elif self._audit_turns.take("", ratio):
            planned = [its.audited() for its in planned]
        self._tally.num_without_history = self._planner.num_without_history
        races = []
        for position, (prompt, its) in enumerate(zip(rollout.prompts, planned, strict=True)):
            pool = self._pools.candidates(epoch, number, position, its.plan.num_candidates)
            check_fits(self._machine, prompt.id, prompt.prompt_tokens + max(c.num_tokens for c in pool))
            scoring = its.plan.pruning and Scoring(name, prompt.id, self._seed)
            lengths = self._planner.known(prompt)
            races.append(
                Race(prompt.id, its.plan, pool, prompt.prompt_tokens, scoring, None, lengths, prompt.max_tokens)
            )
        ranks = assigned(races, self._placement)
        run = self._run(ranks)
        results = {race: conclude(race.plan, race.endings) for race in races}
        for prompt, its, race in zip(rollout.prompts, planned, races, strict=True):
            self._tally.add_group(results[race], race.pool, its.at_upper_bound)
            self._planner.history.observe(prompt.history_key, observed_lengths(results[race].endings))
        self._tally.add_rollout(run, min(race.over_s for race in races))
        if self._setting.pruning is not None:
            for judge, own in zip(self._judges, ranks, strict=True):
                # of a group that moved, the target knows the candidates that ended there
                reward(judge, self._judges, name, {race: results[race] for race in (races if run.num_moves else own)})

    def _run(self, ranks: Sequence[Sequence[Race]]) -> FleetRun:
        if self._machine.moves_groups:
            return run_fleet(self._machine, self._judges, ranks)
        return FleetRun([run_races(self._machine, own, judge) for own, judge in zip(ranks, self._judges, strict=True)])


def reward(judge: Judge, judges: Sequence[Judge], rollout_id: str, results: Mapping[Race, GroupResult]) -> None:
    """Returned trajectories are rewarded after the rollout; every rank learns of them."""
    rewards = []
    for race, result in results.items():
        for index in result.selected:
            value = race.pool[index].reward
            if value is not None:
                rewards.append((race.prompt_id, index, value, value > REWARD_THRESHOLD))
    if not rewards or (learned := judge.reward(rollout_id, rewards)) is None:
        return
    for other in judges:
        if other is not judge:
            other.learn(learned[2])


def placement_on(machine: Machine) -> Placement:
    """As a server has it that knows what its steps cost; on an ideal machine all tokens weigh the same."""
    placement = Placement(machine.num_ranks)
    if not machine.is_ideal:
        placement.token_cost = TokenCost.of(replace(machine.step_cost, max_num_seqs=machine.num_slots))
    return placement


def check_fits(machine: Machine, prompt_id: str, num_tokens: int) -> None:
    """Raises: ValueError for a candidate that one rank's KV cache cannot hold."""
    capacity = machine.kv_capacity_tokens
    if capacity is not None and num_tokens > capacity:
        raise ValueError(
            f"a candidate of prompt {prompt_id!r} needs {num_tokens:,} tokens of KV cache, but one rank has "
            f"{capacity:,}. Give it more with --kv-capacity-tokens."
        )


def assigned(races: Sequence[Race], placement: Placement) -> list[list[Race]]:
    """Each group to a rank, as a server places groups that it starts all at once."""
    ranks: list[list[Race]] = [[] for _ in range(placement.num_ranks)]
    works = [race.work for race in races]
    for race, work in zip(races, works, strict=True):
        ranks[placement.place(work)].append(race)
    work_of = dict(zip(races, works, strict=True))
    for rank, own in enumerate(ranks):
        for race in own:
            placement.leave(rank, work_of[race])
    return ranks
