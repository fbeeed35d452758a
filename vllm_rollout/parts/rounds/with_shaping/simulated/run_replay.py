"""Replays a run under one setting: epochs over a data set, until every prompt that was handed in is back.

Invariant: a server's own rules make every decision. A run depends only on the data set, setting, machine and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from vllm_rollout.kernel.rules.types import GroupResult
from vllm_rollout.parts.rounds.rules.rounds import Entry, OpenRound, Run
from vllm_rollout.parts.rounds.with_shaping.simulated.data import DataPrompt, HandIn, RunConditions, Trainer
from vllm_rollout.parts.rounds.with_shaping.simulated.outcome import (
    ReturnedPrompt,
    RoundOutcome,
    RoundSweep,
    RunOutcome,
)
from vllm_rollout.parts.rounds.with_shaping.simulated.race import RoundRace
from vllm_rollout.parts.rounds.with_shaping.simulated.settings import RoundSetting
from vllm_rollout.parts.shaping.rules.history import observed_lengths
from vllm_rollout.simulator.parts import simulated
from vllm_rollout.simulator.planner import PlannedRollout, Planner
from vllm_rollout.simulator.race import Race
from vllm_rollout.simulator.rank import new_steps


def replay_run(
    its: RunConditions, setting: RoundSetting, on_round: Callable[[RoundOutcome], None] = lambda done: None
) -> RunOutcome:
    """Replay a run. `on_round` is called after each round.

    Raises: PlanError for a setting that no engine would take. ValueError for a data set that is too small.
    """
    return _RunReplay(its, setting).run(on_round)


class _RunReplay:
    def __init__(self, its: RunConditions, setting: RoundSetting) -> None:
        wanted = setting.terms.num_prompts
        if len(its.data.prompts) < wanted:
            raise ValueError(
                f"{setting.name}: a short round runs {wanted:,} different prompts, and there are "
                f"{len(its.data.prompts):,}. Take more prompts, or fewer per round."
            )
        self._its = its = replace(its, machine=its.machine.with_drafts(setting.group.drafts))
        self._setting = setting
        self._prompts = {prompt.id: prompt for prompt in its.data.prompts}
        self._planner = Planner(setting.group, its.machine)
        self._engines = [new_steps() for _ in range(its.machine.num_ranks)]
        """The steps of each rank's engine, for what they have learned."""
        self._places = its.machine.new_places()
        self._run = Run(setting.terms)
        self._trainer = Trainer(its.data.prompts, its.epochs, its.seed, whole_epochs=its.whole_epochs)
        self._handed_in: dict[int, int] = {}
        """Round for which each entry was handed in, by entry number."""
        self._num_preemptions = 0

    def run(self, on_round: Callable[[RoundOutcome], None]) -> RunOutcome:
        rounds = []
        while self._trainer.num_left or self._run.num_waiting:
            rounds.append(self._round())
            on_round(rounds[-1])
        return RunOutcome(self._setting, tuple(rounds), self._num_preemptions, self._its.whole_epochs)

    def _round(self) -> RoundOutcome:
        hand_in = self._trainer.hand_in(self._run)
        known = {id: self._planner.history.of(id) for id in {entry.prompt_id for entry in self._run.queue}}
        predicted = {id: moments.mean for id, moments in known.items() if moments is not None}
        key = str(self._run.num_rounds)
        opened = self._run.plan(key, hand_in.prompts, kind=hand_in.kind, predicted=predicted)
        self._run.begin(opened)
        for entry in opened.all_entries:
            self._handed_in.setdefault(entry.number, opened.number)
        prompts = [self._prompts[entry.prompt_id] for entry in opened.all_entries]
        planned = self._planned(opened, prompts)
        races = [self._race(opened, *each) for each in zip(opened.all_entries, planned, strict=True)]
        race = RoundRace(self._its.machine, self._engines, self._places, opened, races, self._its.message_s)
        if opened.wants_all:
            race.progress.start_in(self._planner.launch_order(prompts, planned))
        seconds = race.run()
        self._learn(key, races, race)
        for position, result in race.results.items():
            self._planner.has_run(races[position].prompt_id, result.endings)
        return self._close(opened, hand_in, race, seconds)

    def _planned(self, opened: OpenRound, prompts: Sequence[DataPrompt]) -> list[PlannedRollout]:
        if opened.kind == "short":
            return self._planner.plans(prompts)
        return [PlannedRollout(self._setting.long_plan)] * len(prompts)

    def _race(self, opened: OpenRound, entry: Entry, planned: PlannedRollout) -> Race:
        prompt, plan = self._prompts[entry.prompt_id], planned.plan
        pool = self._its.data.candidates(prompt, entry.prompt.epoch, entry.num_deferred, plan.num_candidates)
        return self._planner.race(prompt, plan, pool, opened.key, self._its.seed)

    def _learn(self, key: str, races: Sequence[Race], race: RoundRace) -> None:
        machine = self._its.machine
        if self._setting.asks_history or machine.num_ranks > 1 or machine.num_slots is not None:
            for position, result in race.results.items():
                self._planner.history.observe(races[position].prompt_id, observed_lengths(result.endings))
        if self._setting.group.pruning is None:
            return
        pruning = simulated("pruning", "detection_length")
        for rank, engine in enumerate(self._engines):
            own = {
                races[position]: result
                for position, result in race.results.items()
                if (race.rank_of[position] == rank or race.num_moves) and race.progress.fates[position] == "returned"
            }
            pruning.reward(engine, self._engines, key, own)

    def _close(self, opened: OpenRound, hand_in: HandIn, race: RoundRace, seconds: float) -> RoundOutcome:
        returned = tuple(
            self._returned(entry, opened, race.results[position])
            for position, entry in enumerate(opened.all_entries)
            if race.progress.fates.get(position) == "returned"
        )
        generated = sum(result.generated_tokens for result in race.results.values())
        record = self._run.close(
            race.progress.outcomes(), seconds, generated, sum(sum(prompt.lengths) for prompt in returned)
        )
        self._num_preemptions += race.num_preemptions
        return RoundOutcome(
            record.number,
            record.kind,
            hand_in.kind is not None,
            seconds,
            returned,
            len(race.results),
            record.num_deferred,
            generated,
            race.num_moves,
            race.freed_s(seconds),
        )

    def _returned(self, entry: Entry, opened: OpenRound, result: GroupResult) -> ReturnedPrompt:
        lengths = tuple(result.endings[index].num_tokens for index in result.selected)
        return ReturnedPrompt(
            entry.prompt_id, entry.prompt.epoch, self._handed_in[entry.number], opened.number, lengths
        )


def sweep_rounds(
    conditions: RunConditions,
    settings: Sequence[RoundSetting],
    on_round: Callable[[RoundSetting, RoundOutcome], None] = lambda setting, done: None,
) -> RoundSweep:
    """Replay several settings on one data set. The first is the baseline of the comparison.

    Raises: ValueError, or PlanError that names the setting's field.
    """
    outcomes = [replay_run(conditions, setting, partial(on_round, setting)) for setting in settings]
    return RoundSweep(tuple(outcomes), conditions)
