"""The whole of `vllm-rollout simulate --rounds`: read, run, print, draw."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_rollout.simulator.clock import clock_of, described
from vllm_rollout.simulator.options import FlagError, Options
from vllm_rollout.simulator.rounds.outcome import RoundOutcome
from vllm_rollout.simulator.rounds.picture import draw
from vllm_rollout.simulator.rounds.prompts import DataSet, GeneratedDataSet, TracedDataSet
from vllm_rollout.simulator.rounds.replay import RunConditions
from vllm_rollout.simulator.rounds.report import notes, summary, tables, to_json
from vllm_rollout.simulator.rounds.settings import RoundSetting, default_rounds, parse_rounds
from vllm_rollout.simulator.rounds.sweep import RoundSweep, sweep_rounds, with_baselines
from vllm_rollout.simulator.simulation import (
    DEFAULT_GROUP_SIZE,
    alternatives,
    distribution_of,
    plain_console,
    told,
)
from vllm_rollout.trace.file import read_trace
from vllm_rollout.trace.rows import Trace


def run_rounds(options: Options) -> None:
    """Raises: FlagError; ValueError (trace, profile, setting) and OSError with what to do."""
    console = plain_console()
    trace = None
    if options.trace is not None:
        trace = read_trace(options.trace, skip_broken=options.skip_broken)
        data: DataSet = TracedDataSet(trace, options.seed)
        origin, models, longest = options.trace.name, trace.models, _longest_context(trace)
        group_size = options.group_size or trace.group_size or DEFAULT_GROUP_SIZE
    else:
        distribution = distribution_of(options)
        data = GeneratedDataSet(distribution, options.seed)
        origin, models, longest = told(distribution), (), distribution.prompt_tokens + distribution.max_tokens
        group_size = options.group_size or DEFAULT_GROUP_SIZE
    clock = clock_of(options, models, longest)
    settings = _settings(options, group_size)
    conditions = RunConditions(
        data, clock.machine, options.epochs, options.seed, options.message_delay_s, options.whole_epochs
    )
    per_round = settings[0].terms.prompts_per_round
    epochs = "1 epoch" if options.epochs == 1 else f"{options.epochs:,} epochs"
    subtitle = (
        f"{origin}: {epochs} of {len(data.prompts):,} prompts, {per_round:,} of {group_size} answers a round. "
        f"{described(clock.machine, clock.source)}"
    )
    console.print(f"[bold]vllm-rollout simulate[/] {escape(subtitle)}")
    sweep = _sweep(conditions, settings, console)
    for table in tables(sweep):
        console.print(table)
    console.print(f"[bold]{escape(summary(sweep))}[/]")
    said = clock.warnings + notes(sweep, trace)
    for note in said:
        console.print(f"[yellow]Note:[/] {escape(note)}")
    draw(sweep, _title(sweep), subtitle, options.output)
    console.print(f"Picture: [bold]{escape(str(options.output.resolve()))}[/]")
    if options.output_json is not None:
        source = {"trace": origin, **clock.source}
        options.output_json.write_text(json.dumps(to_json(sweep, source, said), indent=1) + "\n")
        console.print(f"Numbers: [bold]{escape(str(options.output_json.resolve()))}[/]")


def _longest_context(trace: Trace) -> int:
    return max(p.prompt_tokens + max(c.num_tokens for c in p.candidates) for p in trace.prompts)


def _settings(options: Options, group_size: int) -> list[RoundSetting]:
    settings: list[RoundSetting] = []
    for text in options.rounds:
        try:
            if text.strip().isdecimal():
                settings += default_rounds(int(text), group_size)
            else:
                settings += [parse_rounds(alternative, group_size) for alternative in alternatives(text)]
        except ValueError as error:
            raise FlagError(f"--rounds {text!r}: {error}") from error
    try:
        return with_baselines(settings)
    except ValueError as error:
        raise FlagError(f"--rounds: {error}") from error


def _sweep(conditions: RunConditions, settings: list[RoundSetting], console: Console) -> RoundSweep:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} prompts returned"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        row = progress.add_task("", total=len(settings) * len(conditions.data.prompts) * conditions.epochs)

        def advance(setting: RoundSetting, done: RoundOutcome) -> None:
            progress.update(row, advance=len(done.returned), description=escape(setting.name))

        return sweep_rounds(conditions, settings, advance)


def _title(sweep: RoundSweep) -> str:
    fastest = sweep.fastest
    if fastest is sweep.baseline:
        return "Nothing beats synchronous rounds here"
    return f"{fastest.setting.name}: {sweep.speed_up(fastest):.2f} times as fast as synchronous rounds"
