"""The whole command `vllm-rollout simulate`: read, replay, print, draw.

It replays single rollouts or, with `--rounds`, runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_rollout.kernel.parts import face, has
from vllm_rollout.parts.shaping.rules.trace import Trace
from vllm_rollout.simulator import picture, report
from vllm_rollout.simulator.clock import Clock, clock_of, described
from vllm_rollout.simulator.generate import generate
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
from vllm_rollout.simulator.parts import FlagError, simulated
from vllm_rollout.simulator.race import Pools
from vllm_rollout.simulator.replay import sweep
from vllm_rollout.simulator.settings import Setting, default_sweep, parse_setting

PLAIN_WIDTH = 120
"""Characters in a line of output that goes to a file."""


class Recorded(NamedTuple):
    """Contents of the trace that the flags name."""

    trace: Trace | None = None
    """None: lengths are generated."""
    sessions: Any = None
    """Recorded groups of sessions that are replayed (`parts/sessions/with_page/simulated.py`)."""


def run(options: SimulateOptions) -> None:
    """Run the command. Raises: FlagError, ValueError (trace, profile, setting) or OSError, each with what to do."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    recorded = _recorded(options)
    if options.rounds:
        job = simulated("rounds", "--rounds")(options, recorded.trace)
    else:
        job = _rollouts(options, recorded)
    subtitle = f"{job.origin}: {job.size} {described(job.clock.machine, job.clock.source)}"
    console.print(f"[bold]vllm-rollout simulate[/] {escape(subtitle)}")
    with _progress(console, job) as advance:
        its = job.replay(advance)
    _tell(console, options, job, its, subtitle)


def _recorded(options: SimulateOptions) -> Recorded:
    """Read the trace. Raises: ValueError, OSError."""
    if options.trace is None:
        return Recorded()
    if options.sessions is not None:
        sessions = face("sessions", "recorded")(options.trace)
        if sessions.groups:
            return Recorded(sessions.trace(options.prompts_per_step), sessions)
    traces, skip, size = face("page", "traces"), options.skip_broken, options.prompts_per_step
    return Recorded(traces.read_trace(options.trace, skip_broken=skip, prompts_per_step=size))


def _tell(console: Console, options: SimulateOptions, job: SimulationJob, its: Report, subtitle: str) -> None:
    """Print, draw and write a report."""
    for table in its.tables:
        console.print(table)
    console.print(f"[bold]{escape(its.sentence)}[/]")
    said = job.clock.warnings + its.notes
    for note in said:
        console.print(f"[yellow]Note:[/] {escape(note)}")
    its.draw(subtitle, options.output)
    console.print(f"Picture: [bold]{escape(str(options.output.resolve()))}[/]")
    if options.output_json is not None:
        source = {"trace": job.origin, "epochs": options.epochs, "seed": options.seed, **job.clock.source}
        options.output_json.write_text(json.dumps({**source, **its.numbers, "notes": said}, indent=1) + "\n")
        console.print(f"Numbers: [bold]{escape(str(options.output_json.resolve()))}[/]")
    if options.output_trace is not None:
        beside = f"{options.trace} " if options.trace is not None else ""
        console.print(f"Rollouts: [bold]vllm-rollout watch {escape(f'{beside}{options.output_trace}')}[/]")


@contextmanager
def _progress(console: Console, job: SimulationJob) -> Iterator[Advance]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {job.unit}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        row = progress.add_task("", total=job.total)
        yield lambda name, count: progress.update(row, advance=count, description=escape(name))


def _rollouts(options: SimulateOptions, recorded: Recorded) -> SimulationJob:
    trace = recorded.trace
    if trace is None:
        distribution = distribution_of(options)
        trace, origin = generate(distribution, options.seed), told(distribution)
    else:
        assert options.trace is not None, "it was read"
        origin = options.trace.name
    clock = clock_of(options, trace.models, trace.longest_context)
    group_size = options.group_size or trace.group_size or DEFAULT_GROUP_SIZE
    sessions = _sessions(options, recorded, in_steps=clock.machine.is_ideal)
    settings = _settings(options, trace, group_size, clock.machine.max_candidates)
    settings = with_drafted(options, settings, lambda setting: setting)
    num_rollouts = len(trace.rollouts) * options.epochs
    rollouts = "1 rollout" if num_rollouts == 1 else f"{num_rollouts:,} rollouts"
    groups = f"{len(trace.prompts) * options.epochs:,} groups of {group_size}"
    size = f"{groups} in {rollouts}, at most {trace.max_tokens:,} tokens."
    if sessions is not None:
        unit = "steps" if clock.machine.is_ideal else "s"
        size += f" Sessions of {sessions.turns:.3g} turns on average, tools of {sessions.tool_seconds:.3g} {unit}."

    def replay(advance: Advance) -> Report:
        return _replay(options, trace, clock, settings, group_size, sessions, advance)

    return SimulationJob(origin, size, clock, "rollouts", len(settings) * num_rollouts, replay)


def _replay(
    options: SimulateOptions,
    trace: Trace,
    clock: Clock,
    settings: Sequence[Setting],
    group_size: int,
    sessions: Any,
    advance: Advance,
) -> Report:
    machine, recording = clock.machine, None
    if options.output_trace is not None:
        recording = simulated("page", "--output-trace")(trace, in_steps=machine.is_ideal)
    its = sweep(
        Pools(trace, options.seed),
        settings,
        machine,
        epochs=options.epochs,
        seed=options.seed,
        sessions=sessions,
        on_rollout=lambda setting: advance(setting.name, 1),
        recording=recording,
    )
    contexts = (prompt.prompt_tokens + c.num_tokens / 2 for prompt in trace.prompts for c in prompt.candidates)
    gained = gained_of(machine, settings, group_size, contexts)
    notes = report.notes(its, trace)
    if recording is not None:
        recording.write(options.output_trace)
        if machine.is_ideal:
            notes.append(f"{options.output_trace} has no times, since steps have none without a --profile.")
    told_sessions = None if sessions is None else asdict(sessions)
    return Report(
        [*report.tables(its), *gained.tables],
        report.recommendation(its),
        notes,
        lambda subtitle, path: picture.draw(its, subtitle, path),
        {"sessions": told_sessions, **report.to_json(its, trace), **gained.numbers},
    )


def _sessions(options: SimulateOptions, recorded: Recorded, *, in_steps: bool) -> Any:
    """Terms from `--sessions`. Raises: FlagError."""
    if options.sessions is None:
        return None
    learned = None if recorded.sessions is None else recorded.sessions.terms(in_steps=in_steps)
    return simulated("sessions", "--sessions")(options.sessions, learned)


def _settings(options: SimulateOptions, trace: Trace, group_size: int, max_candidates: int) -> list[Setting]:
    pruning = pruning_defaults(options, trace)
    if not options.setting:
        plan = None
        if trace.has_scores and trace.has_rewards and pruning and has("pruning"):
            plan = simulated("pruning", "detection_length").plan_of(pruning)
        swept = default_sweep(group_size, max_candidates, plan)
        return swept if options.sessions is None else [setting for setting in swept if setting.is_for_sessions]
    settings = [Setting(group_size)]
    for text in options.setting:
        for alternative in alternatives(text):
            try:
                setting = parse_setting(alternative, group_size, pruning)
                setting.plan(max_candidates)
                if options.sessions is not None and not setting.is_for_sessions:
                    raise ValueError(
                        "groups of sessions take redundancy (a number), early_stop, group_size, and selection first or "
                        "shortest. Leave out the rest, or --sessions."
                    )
            except ValueError as error:
                raise FlagError(f"--setting {text!r}: {error}") from error
            if setting.redundancy and setting.group_size != group_size and not setting.label:
                setting = replace(setting, label=f"{setting.name} of {setting.group_size}")
            settings.append(setting)
    return list(dict.fromkeys(settings))
