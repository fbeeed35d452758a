"""The demo of training: pretrain, train each way, then a table and a picture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from vllm_rollout.demo.training.curve import Curve, read, seconds_to, shown_answers
from vllm_rollout.demo.training.options import STYLE, TERMS, WAYS, TrainingOptions
from vllm_rollout.demo.training.picture import draw
from vllm_rollout.models import cache_dir
from vllm_rollout.process import exit_on_sigterm


def run(options: TrainingOptions) -> None:
    """Run the whole demo. Raises: RuntimeError for a step that fails. KeyboardInterrupt."""
    exit_on_sigterm()
    console = Console()
    models = cache_dir().with_name("grpo")
    console.print(f"[bold]vllm-rollout demo --train[/]: {options.steps} steps of GRPO, {len(WAYS)} times over")
    if not (models / STYLE).is_dir():
        console.print("A policy learns to think, from nothing: some five minutes of one core, once.")
    _module("pretrain", str(models), "--style", STYLE)
    if options.runs.is_dir():
        console.print(f"It goes on with what is in {options.runs.resolve()}; delete that to begin anew.")
    for title, (folder, flags) in WAYS.items():
        console.print(f"\n[bold]{title}[/]")
        _module("train", str(models / STYLE), str(options.runs / folder), "--steps", str(options.steps), *TERMS, *flags)
    curves = [read(title, options.runs / folder / "record.jsonl") for title, (folder, _) in WAYS.items()]
    console.print(table(curves))
    draw(curves, shown_answers(curves[-1]), options.output)
    console.print(f"Picture: [bold]{options.output.resolve()}[/], records: {options.runs.resolve()}")


def _module(name: str, *arguments: str) -> None:
    """Run one of the trainer's programs, which prints its own progress."""
    done = subprocess.run([sys.executable, "-m", f"examples.grpo.{name}", *arguments])
    if done.returncode:
        raise RuntimeError(f"examples.grpo.{name} ended with {done.returncode}; its last lines say why")


def table(curves: Sequence[Curve]) -> Table:
    goal = min(max(curve.success) for curve in curves)
    shown = Table(title="The same problems in the same order, a fresh server each", title_justify="left")
    shown.add_column("")
    for curve in curves:
        shown.add_column(curve.title, justify="right")

    def add(name: str, values: Sequence[str]) -> None:
        shown.add_row(name, *values)

    add("held-out success, at first", [f"{curve.success[0]:.2f}" for curve in curves])
    add("at the end", [f"{curve.success[-1]:.2f}" for curve in curves])
    add("seconds", [f"{curve.seconds[-1]:.0f}" for curve in curves])
    times = [seconds_to(curve, goal) for curve in curves]
    add(f"seconds to {goal:.2f}", ["-" if seconds is None else f"{seconds:.0f}" for seconds in times])
    add("generated tokens", [f"{curve.num_generated:,}" for curve in curves])
    add("P99 length at the end", [f"{curve.p99:.0f}" for curve in curves])
    return shown
