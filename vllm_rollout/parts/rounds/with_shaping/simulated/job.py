"""Runs of rounds as a job of `vllm-rollout simulate --rounds`."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_rollout.parts.rounds.with_shaping.simulated import picture, report
from vllm_rollout.parts.rounds.with_shaping.simulated.data import (
    DataSet,
    GeneratedDataSet,
    RunConditions,
    TracedDataSet,
)
from vllm_rollout.parts.rounds.with_shaping.simulated.outcome import RoundOutcome
from vllm_rollout.parts.rounds.with_shaping.simulated.run_replay import sweep_rounds
from vllm_rollout.parts.rounds.with_shaping.simulated.settings import (
    RoundSetting,
    default_rounds,
    parse_rounds,
    with_baselines,
)
from vllm_rollout.parts.shaping.rules.trace import Trace
from vllm_rollout.simulator.clock import clock_of
from vllm_rollout.simulator.job import (
    DEFAULT_GROUP_SIZE,
    Advance,
    Report,
    SimulationJob,
    alternatives,
    distribution_of,
    gained_of,
    pruning_defaults,
    told,
    with_drafted,
)
from vllm_rollout.simulator.options import SimulateOptions
from vllm_rollout.simulator.parts import FlagError


def job(options: SimulateOptions, trace: Trace | None) -> SimulationJob:
    """Face `simulated`: a sweep of runs. Raises: FlagError."""
    if trace is None:
        its = distribution_of(options)
        data: DataSet = GeneratedDataSet(its, options.seed)
        origin, models, longest = told(its), (), its.prompt_tokens + its.max_tokens
    else:
        data = TracedDataSet(trace, options.seed)
        origin, models, longest = options.trace.name, trace.models, trace.longest_context
    group_size = options.group_size or (trace and trace.group_size) or DEFAULT_GROUP_SIZE
    clock = clock_of(options, models, longest)
    settings = with_drafted(
        options, _settings(options, group_size, pruning_defaults(options, trace)), lambda setting: setting.group
    )
    conditions = RunConditions(
        data, clock.machine, options.epochs, options.seed, options.message_delay, options.whole_epochs
    )
    epochs = "1 epoch" if options.epochs == 1 else f"{options.epochs:,} epochs"
    per_round = settings[0].terms.prompts_per_round

    def replay(advance: Advance) -> Report:
        def on_round(setting: RoundSetting, done: RoundOutcome) -> None:
            advance(setting.name, len(done.returned))

        its = sweep_rounds(conditions, settings, on_round)
        drafting = [setting.group for setting in settings]
        contexts = (
            prompt.prompt_tokens + candidate.num_tokens / 2
            for prompt in data.prompts
            for candidate in data.candidates(prompt, 0, 0, group_size)
        )
        gained = gained_of(clock.machine, drafting, group_size, contexts)
        return Report(
            [*report.tables(its), *gained.tables],
            report.summary(its),
            report.notes(its, trace),
            lambda subtitle, path: picture.draw(its, subtitle, path),
            {**report.to_json(its), **gained.numbers},
        )

    size = f"{epochs} of {len(data.prompts):,} prompts, {per_round:,} of {group_size} answers a round."
    return SimulationJob(
        origin, size, clock, "prompts returned", len(settings) * len(data.prompts) * options.epochs, replay
    )


def _settings(options: SimulateOptions, group_size: int, pruning: Mapping[str, int]) -> list[RoundSetting]:
    settings: list[RoundSetting] = []
    for text in options.rounds or ():
        try:
            if text.strip().isdecimal():
                settings += default_rounds(int(text), group_size)
            else:
                settings += [parse_rounds(alternative, group_size, pruning) for alternative in alternatives(text)]
        except ValueError as error:
            raise FlagError(f"--rounds {text!r}: {error}") from error
    try:
        return with_baselines(settings)
    except ValueError as error:
        raise FlagError(f"--rounds: {error}") from error
