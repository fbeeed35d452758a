"""The whole of `vllm-rollout simulate`: read, replay, print, draw."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_rollout.group.pruning_plan import PruningPlan, make_pruning_plan
from vllm_rollout.simulator.generate import LengthDistribution, generate, parse_distribution
from vllm_rollout.simulator.machine import Machine
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


class FlagError(ValueError):
    """Flags that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class Options:
    trace: Path | None = None
    generate: str | None = None
    profile: Path | None = None
    tensor_parallel_size: int | None = None
    data_parallel_size: int = 1
    group_size: int | None = None
    max_num_seqs: int | None = None
    kv_capacity_tokens: int | None = None
    settings: tuple[str, ...] = ()
    detection_length: int | None = None
    prompts_per_step: int | None = None
    epochs: int = 1
    skip_broken: bool = False
    seed: int = 0
    output: Path = Path("simulation.png")
    output_json: Path | None = None

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.generate is None):
            got = "neither" if self.trace is None else "both"
            raise FlagError(f"give either a trace file or --generate, got {got}. See vllm-rollout simulate --help.")
        if self.tensor_parallel_size is not None and self.profile is None:
            raise FlagError("--tensor-parallel-size chooses among the curves of a --profile, and none is given")
        if self.output.suffix != ".png":
            raise FlagError(f"--output must end in .png, got {self.output}")
        for flag, path in (("--output", self.output), ("--output-json", self.output_json)):
            if path is not None and not path.parent.is_dir():
                raise FlagError(f"{flag} {path}: there is no folder {path.parent}")


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the machine's times come from."""

    machine: Machine
    source: dict[str, Any]
    warnings: list[str]


def run(options: Options) -> None:
    """Raises: FlagError; ValueError (trace, profile, setting) and OSError with what to do."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    trace, origin = _trace(options)
    clock = _clock(options, trace)
    group_size = options.group_size or trace.group_size or DEFAULT_GROUP_SIZE
    settings = _settings(options, trace, group_size, clock.machine.max_candidates)
    machine = clock.machine
    subtitle = f"{origin}: {_size(trace, group_size, options.epochs)}. {_described(machine, clock.source)}"
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
    try:
        distribution = parse_distribution(options.generate or "")
    except ValueError as error:
        raise FlagError(f"--generate {options.generate!r}: {error}") from error
    return generate(distribution, options.seed), _told(distribution)


def _told(its: LengthDistribution) -> str:
    return (
        f"generated, median {its.median:g} tokens, sigma {its.sigma:g} within and {its.prompt_sigma:g} between prompts"
    )


def _clock(options: Options, trace: Trace) -> Clock:
    if options.profile is None:
        machine = Machine(None, options.data_parallel_size, options.max_num_seqs, options.kv_capacity_tokens)
        return Clock(machine, {"profile": None}, [])
    from vllm_rollout.profiling.profile_file import Profile, describe_hardware

    profile = Profile.read(options.profile)
    size = _tensor_parallel_size(options, profile.tensor_parallel_sizes)
    cost = profile.cost(size)
    engine = profile.engine(size)
    machine = Machine(
        cost,
        options.data_parallel_size,
        options.max_num_seqs,
        options.kv_capacity_tokens or engine.kv_capacity_tokens,
        engine.block_size,
    )
    warnings = []
    others = [model for model in trace.models if _last_part(model) != _last_part(profile.model_name)]
    if others:
        warnings.append(
            f"the trace was recorded with {', '.join(others)}, but {options.profile} is a profile of "
            f"{profile.model_name}: lengths and times belong to different models."
        )
    longest = max(p.prompt_tokens + max(c.num_tokens for c in p.candidates) for p in trace.prompts)
    if longest > (known := cost.curves[-1][0]):
        warnings.append(
            f"contexts go up to {longest:,} tokens, the profile's to {known:,.0f}: times beyond are extrapolated."
        )
    if machine.num_slots > (known := profile.batch_sizes(size)[-1]):
        warnings.append(
            f"up to {machine.num_slots:,} candidates run at once, the profile was measured up to {known:,}: times "
            "beyond are extrapolated."
        )
    source = {
        "profile": str(options.profile),
        "model": profile.model_name,
        "hardware": describe_hardware(profile.hardware),
        "tensor_parallel_size": size,
    }
    return Clock(machine, source, warnings)


def _last_part(model: str) -> str:
    """The same model has a path, a hub name or a name of our catalogue."""
    return Path(model).name.casefold()


def _tensor_parallel_size(options: Options, known: list[int]) -> int:
    """The wanted one, or the only one there is."""
    if options.tensor_parallel_size is not None or not known:
        return options.tensor_parallel_size or 1
    if len(known) > 1:
        raise FlagError(f"--tensor-parallel-size must say which: {options.profile} has {', '.join(map(str, known))}")
    return known[0]


def _settings(options: Options, trace: Trace, group_size: int, max_candidates: int) -> list[Setting]:
    detection_length = options.detection_length or trace.detection_length
    pruning = {} if detection_length is None else {"detection_length": detection_length}
    if not options.settings:
        can_prune = trace.has_scores and trace.has_rewards and detection_length is not None
        plan: PruningPlan | None = make_pruning_plan(pruning) if can_prune else None
        return default_sweep(group_size, max_candidates, plan)
    settings = [Setting(group_size)]
    for text in options.settings:
        for alternative in _alternatives(text):
            try:
                setting = parse_setting(alternative, group_size, pruning)
                setting.plan(max_candidates)
            except ValueError as error:
                raise FlagError(f"--setting {text!r}: {error}") from error
            settings.append(setting)
    return list(dict.fromkeys(settings))


def _alternatives(text: str) -> list[str]:
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


def _described(machine: Machine, source: dict[str, Any]) -> str:
    where = "An ideal machine without a profile" if machine.is_ideal else f"{source['model']} on {source['hardware']}"
    ranks = f", {machine.num_ranks} engines" if machine.num_ranks > 1 else ""
    slots = "all candidates at once" if machine.num_slots is None else f"{machine.num_slots:,} candidates at once"
    return f"{where}{ranks}, {slots}."


def _title(outcome: Sweep) -> str:
    fastest = outcome.fastest
    if fastest is outcome.baseline:
        return f"Nothing beats {fastest.setting.name} here"
    return f"{fastest.setting.name}: {outcome.speed_up(fastest):.2f} times as fast as {outcome.baseline.setting.name}"
