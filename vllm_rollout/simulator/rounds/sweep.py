"""Many ways of running a run on one data set. Invariant: all see the same candidates, and return as many prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_rollout.simulator.rounds.outcome import RoundOutcome, RunOutcome
from vllm_rollout.simulator.rounds.replay import RunConditions, replay_run
from vllm_rollout.simulator.rounds.settings import RoundSetting, responses_only, synchronous


@dataclass(frozen=True, slots=True)
class RoundSweep:
    outcomes: tuple[RunOutcome, ...]
    """The synchronous one first."""
    conditions: RunConditions

    @property
    def baseline(self) -> RunOutcome:
        return self.outcomes[0]

    @property
    def fastest(self) -> RunOutcome:
        return min(self.outcomes, key=lambda outcome: outcome.prompt_s)

    @property
    def span(self) -> str:
        """What a mean round is a mean over."""
        return "whole epochs" if self.conditions.whole_epochs else "whole periods of short and long rounds"

    def speed_up(self, outcome: RunOutcome) -> float:
        """Over synchronous rounds, per returned prompt, in whole periods."""
        return self.baseline.prompt_s / outcome.prompt_s

    def speed_up_of_run(self, outcome: RunOutcome) -> float:
        """The same from the first round to the last."""
        return self.baseline.seconds / outcome.seconds

    def responses_only_of(self, outcome: RunOutcome) -> RunOutcome | None:
        """The same groups in rounds that wait for all their prompts."""
        wanted = responses_only(outcome.setting)
        return next((its for its in self.outcomes if its.setting == wanted and its is not self.baseline), None)

    def length_bias(self, outcome: RunOutcome) -> float:
        """By what share returned trajectories are longer on average than those of synchronous rounds."""
        mean = outcome.returned_tokens / sum(len(prompt.lengths) for prompt in outcome.returned)
        baseline = self.baseline
        return mean / (baseline.returned_tokens / sum(len(prompt.lengths) for prompt in baseline.returned)) - 1


def with_baselines(settings: Sequence[RoundSetting]) -> list[RoundSetting]:
    """Each of them once, behind what it is compared with.

    Raises: ValueError when they return different numbers of prompts.
    """
    sizes = sorted({setting.terms.prompts_per_round for setting in settings})
    if len(sizes) > 1:
        raise ValueError(
            f"prompts_per_round must be the same in all settings, got {', '.join(map(str, sizes))}: rounds that return "
            "different numbers of prompts cannot be compared"
        )
    baselines = [synchronous(settings[0].terms), *map(responses_only, settings)]
    return list(dict.fromkeys([*baselines, *settings]))


def sweep_rounds(
    conditions: RunConditions,
    settings: Sequence[RoundSetting],
    on_round: Callable[[RoundSetting, RoundOutcome], None] = lambda setting, done: None,
) -> RoundSweep:
    """The first setting is the baseline of the comparison.

    Raises: ValueError, or PlanError, which names the setting's field.
    """
    outcomes = []
    for setting in settings:

        def done(its: RoundOutcome, setting: RoundSetting = setting) -> None:
            on_round(setting, its)

        outcomes.append(replay_run(conditions, setting, done))
    return RoundSweep(tuple(outcomes), conditions)
