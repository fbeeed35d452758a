"""The whole of `vllm-rollout profile`: engines one after the other, points with a progress bar, file, table, picture.

Invariant: the file is written after every point. If the program ends early, it leaves a profile that can be used and
continued.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_rollout.models import resolve
from vllm_rollout.parts.shaping.profile_file import EngineFacts, Profile
from vllm_rollout.process import exit_on_sigterm, log_folder, runs_on_cpu, server_environment
from vllm_rollout.profiling.engine_process import EngineProcess, OnWait, engine_command
from vllm_rollout.profiling.grid import GridPoint, Plan, Wanted, make_plan
from vllm_rollout.profiling.measure import (
    TooFewSteps,
    add_point,
    add_prefill,
    finished,
    missing_chunks,
    missing_points,
    now,
    with_engine,
)
from vllm_rollout.profiling.options import QUICK_CPU_FLAGS, ProfileOptions
from vllm_rollout.profiling.picture import draw

WANTED_R_SQUARED = 0.98
WANTED_LEFT_OUT_ERROR = 0.05
"""Largest accepted median error on batch sizes left out of the fit."""


class ProfileJob(NamedTuple):
    """One measurement of a profile."""

    description: str
    measure_into: Callable[[Profile], tuple[Profile, str]]
    """Returns the profile with the measurement, and the result in words."""


StartEngine = Callable[[int, Sequence[str], OnWait], AbstractContextManager[EngineProcess]]
"""Takes the tensor-parallel size, flags, and a function to call while waiting."""


def run(options: ProfileOptions, console: Console | None = None, start_engine: StartEngine | None = None) -> Profile:
    """Measure a profile. Raises: ValueError (options, another profile in the file), RuntimeError (engine),
    KeyboardInterrupt."""
    console = console or Console()
    before = _existing(options)
    if start_engine is not None:
        return _measure_all(options, before, start_engine, console)
    exit_on_sigterm()
    environment = server_environment(resolve(options.model))
    with log_folder() as folder:

        def start(tensor_parallel_size: int, flags: Sequence[str], on_wait: OnWait) -> EngineProcess:
            # By its name an embedded model gets what a server gives it.
            command = engine_command(options.model, tensor_parallel_size, flags, logprobs=options.logprobs)
            log = folder / f"engine-tp{tensor_parallel_size}.log"
            return EngineProcess(command, environment, log, on_wait)

        return _measure_all(options, before, start, console)


def _write(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.write(path)


def _existing(options: ProfileOptions) -> Profile | None:
    """The profile to continue, if any. Raises: ValueError if its model, flags or logprobs differ, or if --refresh finds
    none."""
    if options.restart or not options.output.exists():
        if options.refresh:
            raise ValueError(f"--refresh needs a profile: {options.output} does not exist")
        return None
    profile = Profile.read(options.output)
    for what, there, here in (
        ("model", profile.model_name, options.model),
        ("flags", " ".join(profile.serve_flags), " ".join(options.serve_flags) or " ".join(profile.serve_flags)),
        ("logprobs", profile.logprobs, options.logprobs),
    ):
        if there != here:
            raise ValueError(
                f"{options.output} is a profile with {what} {there!r}, this would be one with {here!r}. Choose another "
                "--output, or --restart to forget it."
            )
    return profile


def _measure_all(options: ProfileOptions, profile: Profile | None, start: StartEngine, console: Console) -> Profile:
    flags = options.serve_flags or (() if profile is None else profile.serve_flags)
    if not flags and profile is None and options.wanted.quick and runs_on_cpu():
        flags = QUICK_CPU_FLAGS
        console.print(f"[dim]quick, on a CPU: the engine runs with {' '.join(flags)}; give them to serve, too[/]")
    for size in options.tensor_parallel_sizes:
        if profile is not None and (facts := profile.engine(size)) is not None and not options.refresh:
            plan = make_plan(options.wanted, facts)
            if not missing_points(profile, plan, size) and not missing_chunks(profile, plan, size):
                console.print(f"[dim]tensor-parallel size {size}: all {len(plan.points)} points are in the file[/]")
                continue
        profile = _measure_size(options, profile, size, flags, start, console)
    assert profile is not None
    if not profile.fits:
        raise RuntimeError(
            "no point was measured: candidates never ran all together. Ask for smaller --batch-sizes and shorter "
            "--contexts, or give the engine more memory."
        )
    with console.status("the curves are tried on points left out of the fit"):
        profile = finished(profile)
    _write(profile, options.output)
    picture = options.output.with_suffix(".png")
    draw(profile, picture)
    console.print(results_table(profile))
    for remark in remarks(profile):
        console.print(f"[yellow]{remark}[/]")
    console.print(f"Profile: [bold]{options.output}[/]   picture: [bold]{picture}[/]")
    return profile


def _measure_size(
    options: ProfileOptions,
    profile: Profile | None,
    size: int,
    flags: Sequence[str],
    start: StartEngine,
    console: Console,
) -> Profile:
    """Measure all points of one tensor-parallel size."""
    with console.status(f"the engine starts (tensor-parallel size {size})") as status:

        def on_wait(seconds: float, line: str) -> None:
            said = textwrap.shorten(line, 90).replace("[", "(")
            status.update(f"the engine starts (tensor-parallel size {size}), {seconds:.0f} s: [dim]{said}[/]")

        with start(size, flags, on_wait) as engine:
            info = engine.info()
            profile = _profile_of(options, profile, info, flags)
            profile = with_engine(profile, _facts_of(profile, info, size))
            wanted = _refreshed(options.wanted, profile, size) if options.refresh else options.wanted
            facts = profile.engine(size)
            assert facts is not None
            plan = make_plan(wanted, facts)
            if not options.refresh:  # a refresh measures some points: the points left out are known from before
                facts = facts.model_copy(update={"left_out": plan.left_out})
                profile = with_engine(profile, facts)
            if plan.left_out:
                console.print(f"[yellow]{_left_out(plan, facts)}[/]")
            if options.refresh:
                points = list(plan.points)
                chunks = list(plan.chunks) if options.wanted == Wanted() else []
            else:
                points, chunks = missing_points(profile, plan, size), missing_chunks(profile, plan, size)
            status.update("the engine warms up")
            engine.warm_up()
            status.stop()
            return _measure_points(options, profile, engine, size, points, chunks, console)


def _measure_points(
    options: ProfileOptions,
    profile: Profile,
    engine: EngineProcess,
    size: int,
    points: Sequence[GridPoint],
    chunks: Sequence[int],
    console: Console,
) -> Profile:
    progress = Progress(
        SpinnerColumn(finished_text="[green]✔[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} points"),
        TextColumn("[cyan]{task.fields[last]}[/]"),
        TimeElapsedColumn(),
        console=console,
    )
    jobs = [ProfileJob(f"prefill of {chunk} tokens", partial(add_prefill, engine, chunk, size)) for chunk in chunks]
    for point in points:
        description = f"context {point.context_tokens}, batch {point.batch_size}"
        jobs.append(ProfileJob(description, partial(add_point, engine, point, size, options.wanted.steps)))
    row = progress.add_task(f"tensor-parallel size {size}", total=len(jobs), last="")
    num_kept = 0
    try:
        with progress:
            for job in jobs:
                progress.update(row, description=job.description)
                try:
                    profile, result = job.measure_into(profile)
                except TooFewSteps as error:
                    progress.console.print(f"[yellow]left out: {error}[/]")
                else:
                    _write(profile, options.output)
                    num_kept += 1
                    progress.update(row, last=result)
                progress.advance(row)
    except KeyboardInterrupt:
        console.print(
            f"interrupted: {num_kept} of {len(jobs)} points are in {options.output}; the same command goes on from "
            "there"
        )
        raise
    return profile


def _profile_of(
    options: ProfileOptions, profile: Profile | None, info: dict[str, Any], flags: Sequence[str]
) -> Profile:
    """The profile to fill. Raises: ValueError if the file's profile is of another model, machine or engine."""
    if info["flags"].get("speculative_decoding"):
        raise ValueError(
            "steps with speculative decoding make a varying number of tokens, which a PTL curve does not know. Profile "
            "and predict without --speculative-config."
        )
    if profile is None:
        return Profile(
            created=now(),
            updated=now(),
            command=options.command,
            model_name=options.model,
            model=info["model"],
            hardware=info["hardware"],
            versions=info["versions"],
            serve_flags=tuple(flags),
            flags=info["flags"],
            logprobs=options.logprobs,
        )
    mismatch = profile.mismatch(info["model"], info["hardware"], info["flags"])
    if mismatch.error or mismatch.warning:
        raise ValueError(
            f"{options.output} cannot be gone on with: {mismatch.error or mismatch.warning} Choose another --output, "
            "or --restart to forget it."
        )
    return profile


def _facts_of(profile: Profile, info: dict[str, Any], size: int) -> EngineFacts:
    """Facts of this start of the engine. Facts measured earlier stay."""
    known = {name: info[name] for name in EngineFacts.model_fields if name in info}
    if (before := profile.engine(size)) is not None:
        return before.model_copy(update=known)
    return EngineFacts(tensor_parallel_size=size, **known)


def _refreshed(wanted: Wanted, profile: Profile, size: int) -> Wanted:
    """The named batch sizes and contexts. If none are named, those of the profile."""
    contexts = {p.context_tokens for p in profile.points if p.tensor_parallel_size == size}
    return Wanted(
        batch_sizes=wanted.batch_sizes or tuple(profile.batch_sizes(size)) or None,
        contexts=wanted.contexts or tuple(sorted(contexts)) or None,
        quick=wanted.quick,
        num_steps=wanted.num_steps,
    )


def _left_out(plan: Plan, facts: EngineFacts) -> str:
    by_context: dict[int, list[int]] = {}
    for point in plan.left_out:
        by_context.setdefault(point.context_tokens, []).append(point.batch_size)
    named = "; ".join(
        f"context {context}: batch sizes {', '.join(map(str, sorted(sizes)))}" for context, sizes in by_context.items()
    )
    return f"left out, because the KV cache holds {facts.kv_capacity_tokens:,} tokens: {named}"


def results_table(profile: Profile) -> Table:
    title = f"{profile.model_name} on {profile.hardware['device']}: time of a decode step"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("TP", "context", "batch 1", "batch", "takes", "tokens/s", "bends at", "R²", "left out"):
        table.add_column(column, justify="right", no_wrap=True)
    for fit in profile.fits:
        largest = fit.batch_sizes[-1]
        error = fit.median_left_out_error
        table.add_row(
            str(fit.tensor_parallel_size),
            f"{fit.mean_context_tokens:.0f}",
            f"{fit.curve(1) * 1e3:.1f} ms",
            f"{largest:.0f}",
            f"{fit.curve(largest) * 1e3:.1f} ms",
            f"{largest / fit.curve(largest):,.0f}",
            ", ".join(f"{size:.0f}" for size in fit.batch_sizes[1:-1]) or "-",
            f"{fit.r_squared:.4f}",
            "-" if error is None else f"{error:.1%}",
        )
    for facts in profile.engines:
        speed = f"{1 / facts.prefill_s_per_token:,.0f} tokens/s" if facts.prefill_s_per_token else "not measured"
        table.caption = (
            "left out: median error on batch sizes that the fit has not seen\n"
            f"prefill {speed}; KV cache {facts.kv_bytes_per_token / 1024:,.1f} KiB per token, "
            f"{facts.kv_capacity_tokens:,} tokens"
        )
    return table


def remarks(profile: Profile) -> list[str]:
    """Remarks on curves that fit badly, with what to do."""
    said = []
    for fit in profile.fits:
        error = fit.median_left_out_error
        if fit.r_squared < WANTED_R_SQUARED or (error is not None and error > WANTED_LEFT_OUT_ERROR):
            said.append(
                f"context {fit.context_tokens}, tensor-parallel size {fit.tensor_parallel_size}: R² "
                f"{fit.r_squared:.3f} (wanted {WANTED_R_SQUARED}), error on points left out "
                f"{'-' if error is None else f'{error:.1%}'} (wanted {WANTED_LEFT_OUT_ERROR:.0%}). If the machine was "
                f"busy, measure again: --refresh --contexts {fit.context_tokens}, with more --steps."
            )
    return said
