"""The whole command `vllm-rollout simulate`: read, replay, print, draw.

It replays single rollouts or, with `--rounds`, runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_rollout.parts.page.recording.file import read_trace
from vllm_rollout.parts.page.recording.session_rows import SessionGroupRow
from vllm_rollout.parts.pruning.rules.pruning_plan import make_pruning_plan
from vllm_rollout.parts.shaping.rules.trace import Trace
from vllm_rollout.simulator import picture, report
from vllm_rollout.simulator.clock import Clock, clock_of, described
from vllm_rollout.simulator.drafts_report import gained_of
from vllm_rollout.simulator.generate import LengthDistribution, generate, parse_distribution
from vllm_rollout.simulator.options import SimulateOptions
from vllm_rollout.simulator.parts import FlagError
from vllm_rollout.simulator.race import Pools
from vllm_rollout.parts.sessions.simulated.recorded import learned_terms, read_session_groups, trace_of_sessions
from vllm_rollout.parts.page.simulated import Recording
from vllm_rollout.simulator.replay import sweep
from vllm_rollout.parts.rounds.simulated import picture as rounds_picture
from vllm_rollout.parts.rounds.simulated import report as rounds_report
from vllm_rollout.parts.rounds.simulated.data import DataSet, GeneratedDataSet, RunConditions, TracedDataSet
from vllm_rollout.parts.rounds.simulated.outcome import RoundOutcome
from vllm_rollout.parts.rounds.simulated.replay import sweep_rounds
from vllm_rollout.parts.rounds.simulated.settings import RoundSetting, default_rounds, parse_rounds, with_baselines
from vllm_rollout.parts.sessions.simulated.sessions import RECORDED, SessionTerms, parse_sessions
from vllm_rollout.simulator.settings import Setting, default_sweep, parse_setting

PLAIN_WIDTH = 120
"""Characters in a line of output that goes to a file."""

DEFAULT_GROUP_SIZE = 8
"""Group size of DARTS, used if neither flag nor trace gives one."""

AnySetting = TypeVar("AnySetting", Setting, RoundSetting)
Advance = Callable[[str, int], None]
"""Takes a setting's name and the number of units that were just done."""


class Report(NamedTuple):
    """Tables, sentence, notes, picture and numbers of a sweep."""

    tables: list[Table]
    sentence: str
    notes: list[str]
    draw: Callable[[str, Path], None]
    """Draws the picture. Takes its subtitle and file."""
    numbers: dict[str, Any]


class SimulationJob(NamedTuple):
    """A sweep that is ready to run."""

    origin: str
    """Source of the lengths, for people."""
    size: str
    """Size of the replay, for people."""
    clock: Clock
    unit: str
    """Unit of progress, for people."""
    total: int
    """Number of units."""
    replay: Callable[[Advance], Report]


def run(options: SimulateOptions) -> None:
    """Run the command. Raises: FlagError, ValueError (trace, profile, setting) or OSError, each with what to do."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    trace = None
    groups: list[SessionGroupRow] = []
    if options.trace is not None and options.sessions is not None:
        groups, num_rollouts, broken = read_session_groups(options.trace)
    if groups:
        trace = trace_of_sessions(groups, options.prompts_per_step, num_rollouts, broken)
    elif options.trace is not None:
        trace = read_trace(options.trace, skip_broken=options.skip_broken, prompts_per_step=options.prompts_per_step)
    job = _rounds(options, trace) if options.rounds else _rollouts(options, trace, groups)
    subtitle = f"{job.origin}: {job.size} {described(job.clock.machine, job.clock.source)}"
    console.print(f"[bold]vllm-rollout simulate[/] {escape(subtitle)}")
    with _progress(console, job) as advance:
        report = job.replay(advance)
    for table in report.tables:
        console.print(table)
    console.print(f"[bold]{escape(report.sentence)}[/]")
    said = job.clock.warnings + report.notes
    for note in said:
        console.print(f"[yellow]Note:[/] {escape(note)}")
    report.draw(subtitle, options.output)
    console.print(f"Picture: [bold]{escape(str(options.output.resolve()))}[/]")
    if options.output_json is not None:
        source = {"trace": job.origin, "epochs": options.epochs, "seed": options.seed, **job.clock.source}
        options.output_json.write_text(json.dumps({**source, **report.numbers, "notes": said}, indent=1) + "\n")
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


def _rollouts(options: SimulateOptions, trace: Trace | None, groups: Sequence[SessionGroupRow]) -> SimulationJob:
    if trace is None:
        distribution = _distribution(options)
        trace, origin = generate(distribution, options.seed), _told(distribution)
    else:
        origin = options.trace.name
    clock = clock_of(options, trace.models, trace.longest_context)
    group_size = options.group_size or trace.group_size or DEFAULT_GROUP_SIZE
    sessions = _sessions(options, groups, is_ideal=clock.machine.is_ideal)
    settings = _with_drafted(options, _settings(options, trace, group_size, clock.machine.max_candidates))
    num_rollouts = len(trace.rollouts) * options.epochs
    rollouts = "1 rollout" if num_rollouts == 1 else f"{num_rollouts:,} rollouts"
    groups = f"{len(trace.prompts) * options.epochs:,} groups of {group_size}"

    def replay(advance: Advance) -> Report:
        pools, seed = Pools(trace, options.seed), options.seed
        is_ideal = clock.machine.is_ideal
        recording = None if options.output_trace is None else Recording(trace, in_steps=is_ideal)
        its = sweep(
            pools,
            settings,
            clock.machine,
            epochs=options.epochs,
            seed=seed,
            sessions=sessions,
            on_rollout=lambda s: advance(s.name, 1),
            recording=recording,
        )
        contexts = (prompt.prompt_tokens + c.num_tokens / 2 for prompt in trace.prompts for c in prompt.candidates)
        gained = gained_of(clock.machine, settings, group_size, contexts)
        notes = report.notes(its, trace)
        if recording is not None:
            recording.write(options.output_trace)
            if is_ideal:
                notes.append(f"{options.output_trace} has no times, since steps have none without a --profile.")
        return Report(
            [*report.tables(its), *gained.tables],
            report.recommendation(its),
            notes,
            lambda subtitle, path: picture.draw(its, subtitle, path),
            {
                "sessions": None if sessions is None else asdict(sessions),
                **report.to_json(its, trace),
                **gained.numbers,
            },
        )

    size = f"{groups} in {rollouts}, at most {trace.max_tokens:,} tokens."
    if sessions is not None:
        unit = "steps" if clock.machine.is_ideal else "s"
        size += f" Sessions of {sessions.turns:.3g} turns on average, tools of {sessions.tool_seconds:.3g} {unit}."
    return SimulationJob(origin, size, clock, "rollouts", len(settings) * num_rollouts, replay)


def _rounds(options: SimulateOptions, trace: Trace | None) -> SimulationJob:
    if trace is None:
        its = _distribution(options)
        data: DataSet = GeneratedDataSet(its, options.seed)
        origin, models, longest = _told(its), (), its.prompt_tokens + its.max_tokens
    else:
        data = TracedDataSet(trace, options.seed)
        origin, models, longest = options.trace.name, trace.models, trace.longest_context
    group_size = options.group_size or (trace and trace.group_size) or DEFAULT_GROUP_SIZE
    clock = clock_of(options, models, longest)
    settings = _with_drafted(options, _round_settings(options, group_size, _pruning(options, trace)))
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
            [*rounds_report.tables(its), *gained.tables],
            rounds_report.summary(its),
            rounds_report.notes(its, trace),
            lambda subtitle, path: rounds_picture.draw(its, subtitle, path),
            {**rounds_report.to_json(its), **gained.numbers},
        )

    size = f"{epochs} of {len(data.prompts):,} prompts, {per_round:,} of {group_size} answers a round."
    return SimulationJob(
        origin, size, clock, "prompts returned", len(settings) * len(data.prompts) * options.epochs, replay
    )


def _distribution(options: SimulateOptions) -> LengthDistribution:
    """The distribution that `--generate` describes. Raises: FlagError."""
    try:
        return parse_distribution(options.generate or "")
    except ValueError as error:
        raise FlagError(f"--generate {options.generate!r}: {error}") from error


def _sessions(options: SimulateOptions, groups: Sequence[SessionGroupRow], *, is_ideal: bool) -> SessionTerms | None:
    """Terms from `--sessions`. Fields that it leaves out are learned from recorded groups. Raises: FlagError."""
    if options.sessions is None:
        return None
    if options.sessions == RECORDED and not groups:
        raise FlagError(f"--sessions {RECORDED}: no group of sessions was recorded. Say what they do, as in turns=4.")
    try:
        return parse_sessions(options.sessions, learned_terms(groups, in_steps=is_ideal) if groups else None)
    except ValueError as error:
        raise FlagError(f"--sessions {options.sessions!r}: {error}") from error


def _told(its: LengthDistribution) -> str:
    """Description of a distribution, for people."""
    return (
        f"generated, median {its.median:g} tokens, sigma {its.sigma:g} within and {its.prompt_sigma:g} between prompts"
    )


def _settings(options: SimulateOptions, trace: Trace, group_size: int, max_candidates: int) -> list[Setting]:
    pruning = _pruning(options, trace)
    if not options.setting:
        can_prune = trace.has_scores and trace.has_rewards and bool(pruning)
        sweep = default_sweep(group_size, max_candidates, make_pruning_plan(pruning) if can_prune else None)
        return sweep if options.sessions is None else [setting for setting in sweep if setting.is_for_sessions]
    settings = [Setting(group_size)]
    for text in options.setting:
        for alternative in _alternatives(text):
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


def _pruning(options: SimulateOptions, trace: Trace | None) -> dict[str, int]:
    """Defaults for settings that prune."""
    length = options.detection_length or (None if trace is None else trace.detection_length)
    return {} if length is None else {"detection_length": length}


def _round_settings(options: SimulateOptions, group_size: int, pruning: Mapping[str, int]) -> list[RoundSetting]:
    settings: list[RoundSetting] = []
    for text in options.rounds:
        try:
            if text.strip().isdecimal():
                settings += default_rounds(int(text), group_size)
            else:
                settings += [parse_rounds(alternative, group_size, pruning) for alternative in _alternatives(text)]
        except ValueError as error:
            raise FlagError(f"--rounds {text!r}: {error}") from error
    try:
        return with_baselines(settings)
    except ValueError as error:
        raise FlagError(f"--rounds: {error}") from error


def _with_drafted(options: SimulateOptions, settings: list[AnySetting]) -> list[AnySetting]:
    """The settings. With `--drafts` each setting follows once more, with drafts. Raises: FlagError."""
    more = [setting.drafted for setting in settings] if options.drafts else []
    groups = [its.group if isinstance(its, RoundSetting) else its for its in (*settings, *more)]
    if options.draft_acceptance is not None and not any(group.drafts for group in groups):
        raise FlagError("--draft-acceptance is for drafts, and no setting has any: add --drafts, or drafts=true to one")
    return list(dict.fromkeys([*settings, *more]))


def _alternatives(text: str) -> list[str]:
    """Split "a=1|2,b=3" into "a=1,b=3" and "a=2,b=3"."""
    parts = []
    for part in text.split(","):
        key, equals, values = part.partition("=")
        parts.append([f"{key}{equals}{value}" for value in values.split("|")])
    return [",".join(chosen) for chosen in product(*parts)]
