"""The whole of `vllm-rollout simulate`: read, replay, print, draw."""

from __future__ import annotations

import json
from itertools import product

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_rollout.group.plans.pruning_plan import PruningPlan, make_pruning_plan
from vllm_rollout.simulator.clock import clock_of, described
from vllm_rollout.simulator.generate import LengthDistribution, generate, parse_distribution
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.options import FlagError, Options
from vllm_rollout.simulator.picture import draw
from vllm_rollout.simulator.pool import Pools
from vllm_rollout.simulator.report import notes, recommendation, tables, to_json
from vllm_rollout.simulator.settings import Setting, default_sweep, parse_setting
from vllm_rollout.simulator.sweep import Sweep, sweep
from vllm_rollout.trace.file import read_trace
from vllm_rollout.trace.rows import Trace

PLAIN_WIDTH = 120
"""Of output that goes to a file."""

DEFAULT_GROUP_SIZE = 8
"""That of DARTS, where neither flag nor trace says one."""


def run(options: Options) -> None:
    """Raises: FlagError; ValueError (trace, profile, setting) and OSError with what to do."""
    console = plain_console()
    trace, origin = _trace(options)
    longest = max(p.prompt_tokens + max(c.num_tokens for c in p.candidates) for p in trace.prompts)
    clock = clock_of(options, trace.models, longest)
    group_size = options.group_size or trace.group_size or DEFAULT_GROUP_SIZE
    settings = _settings(options, trace, group_size, clock.machine.max_candidates)
    machine = clock.machine
    subtitle = f"{origin}: {_size(trace, group_size, options.epochs)}. {described(machine, clock.source)}"
    console.print(f"[bold]vllm-rollout simulate[/] {escape(subtitle)}")
    outcome = _sweep(options, trace, settings, machine, console)
    for table in tables(outcome):
        console.print(table)
    console.print(f"[bold]{escape(recommendation(outcome))}[/]")
    said = clock.warnings + notes(outcome, trace)
    for note in said:
        console.print(f"[yellow]Note:[/] {escape(note)}")
    draw(outcome, _title(outcome), subtitle, options.output)
    console.print(f"Picture: [bold]{escape(str(options.output.resolve()))}[/]")
    if options.output_json is not None:
        source = {"trace": origin, "epochs": options.epochs, "seed": options.seed, **clock.source}
        options.output_json.write_text(json.dumps(to_json(outcome, trace, source, said), indent=1) + "\n")
        console.print(f"Numbers: [bold]{escape(str(options.output_json.resolve()))}[/]")


def _trace(options: Options) -> tuple[Trace, str]:
    if options.trace is not None:
        trace = read_trace(options.trace, skip_broken=options.skip_broken, prompts_per_step=options.prompts_per_step)
        return trace, options.trace.name
    distribution = distribution_of(options)
    return generate(distribution, options.seed), told(distribution)


def plain_console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def distribution_of(options: Options) -> LengthDistribution:
    """Of --generate.

    Raises: FlagError.
    """
    try:
        return parse_distribution(options.generate or "")
    except ValueError as error:
        raise FlagError(f"--generate {options.generate!r}: {error}") from error


def told(its: LengthDistribution) -> str:
    """A phrase for people."""
    return (
        f"generated, median {its.median:g} tokens, sigma {its.sigma:g} within and {its.prompt_sigma:g} between prompts"
    )


def _settings(options: Options, trace: Trace, group_size: int, max_candidates: int) -> list[Setting]:
    detection_length = options.detection_length or trace.detection_length
    pruning = {} if detection_length is None else {"detection_length": detection_length}
    if not options.settings:
        can_prune = trace.has_scores and trace.has_rewards and detection_length is not None
        plan: PruningPlan | None = make_pruning_plan(pruning) if can_prune else None
        return default_sweep(group_size, max_candidates, plan)
    settings = [Setting(group_size)]
    for text in options.settings:
        for alternative in alternatives(text):
            try:
                setting = parse_setting(alternative, group_size, pruning)
                setting.plan(max_candidates)
            except ValueError as error:
                raise FlagError(f"--setting {text!r}: {error}") from error
            settings.append(setting)
    return list(dict.fromkeys(settings))


def alternatives(text: str) -> list[str]:
    """ "a=1|2,b=3" -> "a=1,b=3" and "a=2,b=3"."""
    parts = []
    for part in text.split(","):
        key, equals, values = part.partition("=")
        parts.append([f"{key}{equals}{value}" for value in values.split("|")])
    return [",".join(chosen) for chosen in product(*parts)]


def _sweep(options: Options, trace: Trace, settings: list[Setting], machine: Machine, console: Console) -> Sweep:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} rollouts"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        row = progress.add_task("", total=len(settings) * len(trace.rollouts) * options.epochs)

        def advance(setting: Setting) -> None:
            progress.update(row, advance=1, description=escape(setting.name))

        return sweep(
            Pools(trace, options.seed), settings, machine, epochs=options.epochs, seed=options.seed, on_rollout=advance
        )


def _size(trace: Trace, group_size: int, epochs: int) -> str:
    num_rollouts = len(trace.rollouts) * epochs
    rollouts = "1 rollout" if num_rollouts == 1 else f"{num_rollouts:,} rollouts"
    groups = f"{len(trace.prompts) * epochs:,} groups of {group_size}"
    return f"{groups} in {rollouts}, at most {trace.max_tokens:,} tokens"


def _title(outcome: Sweep) -> str:
    fastest = outcome.fastest
    if fastest is outcome.baseline:
        return f"Nothing beats {fastest.setting.name} here"
    return f"{fastest.setting.name}: {outcome.speed_up(fastest):.2f} times as fast as {outcome.baseline.setting.name}"
