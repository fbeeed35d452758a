"""Replays a trace setting by setting, rollout after rollout, as a trainer asks for them.

Invariant: a server's own rules make every decision. A replay depends only on the trace, setting, machine and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from vllm_rollout.kernel.rules.types import GroupResult
from vllm_rollout.parts.shaping.rules.history import observed_lengths
from vllm_rollout.parts.shaping.rules.trace import TracedRollout
from vllm_rollout.simulator.machine import FleetRun, Machine
from vllm_rollout.simulator.outcome import SimulationOutcome, Sweep
from vllm_rollout.simulator.parts import simulated
from vllm_rollout.simulator.planner import PlannedRollout, Planner
from vllm_rollout.simulator.race import Pools, Race
from vllm_rollout.simulator.rank import new_steps, run_races
from vllm_rollout.simulator.settings import Setting


class Ran(NamedTuple):
    """A replayed rollout."""

    setting: Setting
    epoch: int
    number: int
    rollout: TracedRollout
    ranks: Sequence[Sequence[Race]]
    """Groups by rank, as they began."""
    results: Sequence[GroupResult]
    """Results in the order of the rollout's prompts."""
    races: Sequence[Race]
    """Groups in the order of the rollout's prompts."""
    run: FleetRun


def replay(
    pools: Pools,
    setting: Setting,
    machine: Machine,
    *,
    epochs: int = 1,
    seed: int = 0,
    sessions: Any = None,
    on_rollout: Callable[[], None] = lambda: None,
    recording: Any = None,
) -> SimulationOutcome:
    """Run every rollout of the trace, `epochs` times over.

    `sessions`: terms of the sessions that take the candidates' place (`parts/sessions/with_shaping/simulated.py`).
    `recording` takes each rollout as a row (`parts/page/simulated.py`).

    Raises: PlanError for a setting that no engine would take. ValueError for a candidate that the KV cache cannot hold.
    """
    return _Replay(pools, setting, machine, seed, sessions, recording).run(epochs, on_rollout)


class _Replay:
    def __init__(
        self,
        pools: Pools,
        setting: Setting,
        machine: Machine,
        seed: int,
        sessions: Any,
        recording: Any,
    ) -> None:
        self._pools = pools
        self._setting = setting
        self._machine = machine = machine.with_drafts(setting.drafts)
        self._seed = seed
        self._sessions = sessions
        self._recording = recording
        self._planner = Planner(setting, machine)
        self._engines = [new_steps() for _ in range(machine.num_ranks)]
        """The steps of each rank's engine, for what they have learned."""
        self._places = machine.new_places()
        self._outcome = SimulationOutcome(setting)
        self._pruning = simulated("pruning", "pruning") if setting.pruning or setting.audit_ratio else None
        self._audits = self._pruning.Audits(setting, seed) if setting.audit_ratio else None

    def run(self, epochs: int, on_rollout: Callable[[], None]) -> SimulationOutcome:
        for epoch in range(epochs):
            for number, rollout in enumerate(self._pools.trace.rollouts):
                self._roll_out(epoch, number, rollout)
                on_rollout()
        return self._outcome

    def _roll_out(self, epoch: int, number: int, rollout: TracedRollout) -> None:
        name = f"rollout-{epoch}-{number}"
        planned: Sequence[PlannedRollout] = self._planner.plans(rollout.prompts)
        if self._audits is not None:
            planned = self._audits.planned(planned, [f"{name}/{prompt.id}" for prompt in rollout.prompts])
        self._outcome.num_without_history = self._planner.num_without_history
        races = []
        for position, (prompt, its) in enumerate(zip(rollout.prompts, planned, strict=True)):
            key = (epoch, number, position)
            num_candidates = its.plan.num_candidates * (1 if self._sessions is None else self._sessions.max_factor)
            race = self._planner.race(prompt, its.plan, self._pools.candidates(*key, num_candidates), name, self._seed)
            if self._sessions is not None:
                race = self._sessions.group_of(race, self._seed, key, self._machine)
            races.append(race)
        positions: Sequence[int] = range(len(races))
        if self._sessions is None:
            positions = self._planner.launch_order(rollout.prompts, planned)
        ranks = assigned([races[position] for position in positions], self._places)
        run = self._run(ranks)
        results = {race: race.result for race in races}
        for prompt, its, race in zip(rollout.prompts, planned, races, strict=True):
            self._outcome.add_group(results[race], race.pool, its.at_upper_bound)
            if self._sessions is not None:
                self._outcome.add_sessions(race.sessions.sessions.values())
            self._planner.history.observe(prompt.history_key, observed_lengths(results[race].endings))
            self._planner.has_run(prompt.history_key, results[race].endings)
        self._outcome.add_rollout(run, min(race.over_s for race in races))
        if self._recording is not None:
            self._recording.add(Ran(self._setting, epoch, number, rollout, ranks, list(results.values()), races, run))
        if self._setting.pruning is not None:
            for engine, own in zip(self._engines, ranks, strict=True):
                # the target of a moved group has the candidates that ended there
                ended = {race: results[race] for race in (races if run.num_moves else own)}
                self._pruning.reward(engine, self._engines, name, ended)

    def _run(self, ranks: Sequence[Sequence[Race]]) -> FleetRun:
        if self._sessions is not None:
            return FleetRun([self._sessions.run(self._machine, own) for own in ranks])
        if self._machine.moves_groups:
            return simulated("moving", "--migration").run_fleet(self._machine, self._engines, ranks)
        return FleetRun([run_races(self._machine, *each) for each in zip(ranks, self._engines, strict=True)])


def assigned(races: Sequence[Race], places: Any) -> list[list[Race]]:
    """Assign each group to a rank, as a server places groups that start at the same time."""
    ranks: list[list[Race]] = [[] for _ in range(places.num_ranks)]
    for race in races:
        ranks[places.place(race)].append(race)
    for own in ranks:
        for race in own:
            places.leave(race)
    return ranks


def sweep(
    pools: Pools,
    settings: Sequence[Setting],
    machine: Machine,
    *,
    epochs: int = 1,
    seed: int = 0,
    sessions: Any = None,
    on_rollout: Callable[[Setting], None] = lambda setting: None,
    recording: Any = None,
) -> Sweep:
    """Replay every setting. The first is the baseline of the comparison. `recording` takes every rollout as a row.

    Raises: PlanError that names the setting's field, or another ValueError. Plans are checked before the first replay.
    """
    for setting in settings:
        setting.plan(machine.max_candidates)
    outcomes = tuple(
        replay(
            pools,
            setting,
            machine,
            epochs=epochs,
            seed=seed,
            sessions=sessions,
            on_rollout=partial(on_rollout, setting),
            recording=recording,
        )
        for setting in settings
    )
    if not machine.moves_groups:
        return Sweep(outcomes, machine)
    return Sweep(outcomes, machine, replay(pools, settings[0], machine.without_moves, epochs=epochs, seed=seed))
