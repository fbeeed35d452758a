"""Replays a trace setting by setting, rollout after rollout, as a trainer asks for them.

Invariant: `group/` makes every decision. A replay depends only on the trace, setting, machine and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from vllm_rollout.parts.pruning.rules.audit import AuditTurns, with_audits
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.shaping.rules.history import observed_lengths
from vllm_rollout.parts.shaping.rules.trace import TracedRollout
from vllm_rollout.simulator.machine import FleetRun, Machine
from vllm_rollout.simulator.outcome import SimulationOutcome, Sweep
from vllm_rollout.simulator.planner import Planner
from vllm_rollout.simulator.race import Pools, Race
from vllm_rollout.simulator.rank import run_races
from vllm_rollout.parts.page.simulated import Ran, Recording
from vllm_rollout.parts.sessions.simulated.sessions import MORE_SESSIONS, SessionTerms, group_of, run_sessions
from vllm_rollout.simulator.settings import Setting


def replay(
    pools: Pools,
    setting: Setting,
    machine: Machine,
    *,
    epochs: int = 1,
    seed: int = 0,
    sessions: SessionTerms | None = None,
    on_rollout: Callable[[], None] = lambda: None,
    recording: Recording | None = None,
) -> SimulationOutcome:
    """Run every rollout of the trace, `epochs` times over.

    `sessions`: terms of the sessions that take the candidates' place. `recording` takes each rollout as a row.

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
        sessions: SessionTerms | None,
        recording: Recording | None,
    ) -> None:
        self._pools = pools
        self._setting = setting
        self._machine = machine = machine.with_drafts(setting.drafts)
        self._seed = seed
        self._sessions = sessions
        self._recording = recording
        self._planner = Planner(setting, machine)
        self._judges = [Judge() for _ in range(machine.num_ranks)]
        self._places = machine.new_places()
        self._outcome = SimulationOutcome(setting)
        self._audit_turns = AuditTurns()

    def run(self, epochs: int, on_rollout: Callable[[], None]) -> SimulationOutcome:
        for epoch in range(epochs):
            for number, rollout in enumerate(self._pools.trace.rollouts):
                self._roll_out(epoch, number, rollout)
                on_rollout()
        return self._outcome

    def _roll_out(self, epoch: int, number: int, rollout: TracedRollout) -> None:
        name = f"rollout-{epoch}-{number}"
        contents = [f"{name}/{prompt.id}" for prompt in rollout.prompts]
        planned, ratio = self._planner.plans(rollout.prompts), self._setting.audit_ratio
        if self._setting.audit_unit == "group":
            planned = with_audits(planned, ratio, self._seed, contents)
        elif self._audit_turns.take("", ratio):
            planned = [its.audited() for its in planned]
        self._outcome.num_without_history = self._planner.num_without_history
        races = []
        for position, (prompt, its) in enumerate(zip(rollout.prompts, planned, strict=True)):
            key = (epoch, number, position)
            num_candidates = its.plan.num_candidates * (1 if self._sessions is None else MORE_SESSIONS)
            race = self._planner.race(prompt, its.plan, self._pools.candidates(*key, num_candidates), name, self._seed)
            races.append(
                race if self._sessions is None else group_of(race, self._sessions, self._seed, key, self._machine)
            )
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
            for judge, own in zip(self._judges, ranks, strict=True):
                # the judge of a moved group's target has the candidates that ended there
                reward(judge, self._judges, name, {race: results[race] for race in (races if run.num_moves else own)})

    def _run(self, ranks: Sequence[Sequence[Race]]) -> FleetRun:
        if self._sessions is not None:
            return FleetRun([run_sessions(self._machine, own, self._sessions) for own in ranks])
        if self._machine.moves_groups:
            return simulated("moving", "--migration").run_fleet(self._machine, self._judges, ranks)
        return FleetRun([run_races(self._machine, own, judge) for own, judge in zip(ranks, self._judges, strict=True)])


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
    sessions: SessionTerms | None = None,
    on_rollout: Callable[[Setting], None] = lambda setting: None,
    recording: Recording | None = None,
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
