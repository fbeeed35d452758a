"""Picture of a sweep: time and returned lengths of every setting, and the running candidates of a few over time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vllm_rollout.drawing import INK, figure_at
from vllm_rollout.simulator.machine import duration
from vllm_rollout.simulator.outcome import SimulationOutcome, Sweep

PALE = "#cbd5e1"
BASELINE, PLAIN, FASTEST, KEEPING = "#94a3b8", "#7dd3c8", "#0f766e", "#f59e0b"
OTHER = "#6366f1"
LINE_CHARS = 175
MAX_NAME = 44
"""Characters of a setting's name that fit beside its bar."""


def draw(sweep: Sweep, subtitle: str, path: Path) -> None:
    """Draw a sweep to a file. Raises: OSError, or ValueError for a file ending that matplotlib does not know."""
    fastest, baseline = sweep.fastest, sweep.baseline
    title = f"Nothing beats {baseline.setting.name} here"
    if fastest is not baseline:
        title = f"{fastest.setting.name}: {sweep.speed_up(fastest):.2f} times as fast as {baseline.setting.name}"
    height = 2.15 + 0.42 * len(sweep.outcomes) + 3.2
    with sheet(path, title, subtitle, height) as figure:
        upper, lower = 1 - 1.4 / height, (3.2 + 0.55) / height
        widest = max(len(outcome.setting.name) for outcome in sweep.outcomes)
        left = 0.03 + 0.0058 * min(widest, MAX_NAME)
        times = figure.add_axes((left, lower, 0.56 - left, upper - lower))
        lengths = figure.add_axes((0.60, lower, 0.38, upper - lower), sharey=times)
        _draw_times(times, sweep)
        _draw_lengths(lengths, sweep)
        _draw_running(figure.add_axes((0.06, 0.55 / height, 0.92, 2.35 / height)), sweep)


@contextmanager
def sheet(path: Path, title: str, subtitle: str, height: float) -> Iterator[Any]:
    """Figure with a title and subtitle, `height` inches high. It is written to `path` at the end of the context."""
    style = {"font.size": 9.5, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with figure_at(path, (14, height), style) as figure:
        figure.text(0.02, 1 - 0.42 / height, title, size=17, weight="bold")
        figure.text(0.02, 1 - 0.62 / height, textwrap.fill(subtitle, LINE_CHARS), size=10, va="top")
        yield figure


def _draw_times(axes, sweep: Sweep) -> None:
    from matplotlib.patheffects import withStroke

    slowest = max(outcome.seconds for outcome in sweep.outcomes)
    for row, outcome in enumerate(sweep.outcomes):
        axes.barh(row, outcome.seconds, height=0.66, color=_color(sweep, outcome))
        text = f"  {duration(outcome.seconds, sweep.machine.is_ideal)}"
        if outcome is not sweep.baseline:
            text += f"  {sweep.speed_up(outcome):.2f}x"
        label = axes.text(outcome.seconds, row, text, va="center", size=9.5, weight="bold")
        label.set_path_effects([withStroke(linewidth=3, foreground="white")])
    axes.set_yticks(range(len(sweep.outcomes)), [_name(outcome) for outcome in sweep.outcomes])
    axes.set_ylim(len(sweep.outcomes) - 0.45, -0.55)
    axes.set_xlim(0, slowest * 1.42)
    axes.set_xticks([])
    axes.set_title("time of all rollouts", loc="left", size=10.5, weight="bold")
    axes.axvline(sweep.baseline.seconds, color=INK, lw=1, ls=(0, (3, 3)), zorder=1.5)
    axes.tick_params(length=0)
    open_axes(axes, "top", "right", "bottom")


def _draw_lengths(axes, sweep: Sweep) -> None:
    for row, outcome in enumerate(sweep.outcomes):
        color = _color(sweep, outcome)
        p1, p25, p50, p75, p99 = np.percentile(outcome.returned_lengths or (0,), (1, 25, 50, 75, 99))
        axes.plot((p1, p99), (row, row), color=color, lw=2, solid_capstyle="round")
        axes.barh(row, p75 - p25, left=p25, height=0.5, color=color)
        axes.plot((p50, p50), (row - 0.25, row + 0.25), color="white", lw=2)
        axes.plot(outcome.lengths.mean, row, "o", color=INK, ms=5)
    axes.axvline(sweep.baseline.lengths.mean, color=INK, lw=1, ls=(0, (3, 3)))
    axes.set_xlim(left=0)
    axes.set_title("tokens per returned answer", loc="left", size=10.5, weight="bold")
    axes.set_title("box: middle half   line: P1 to P99   dot: mean", loc="right", size=9)
    axes.tick_params(length=0, labelleft=False)
    axes.grid(axis="x", color="#e2e8f0", lw=0.8)
    axes.set_axisbelow(True)
    open_axes(axes, "top", "right", "left")


def _draw_running(axes, sweep: Sweep) -> None:
    for outcome in _shown(sweep):
        color = OTHER if (color := _color(sweep, outcome)) == PLAIN else color
        line = {"lw": 2.4, "ls": (0, (2, 1))} if outcome is sweep.baseline else {"lw": 1.6}
        times, running = zip(*outcome.curve, strict=True)
        axes.step(times, running, where="post", color=color, label=_name(outcome), **line)
        axes.fill_between(times, running, step="post", color=color, alpha=0.07)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title("candidates that run in the last rollout", loc="left", size=10.5, weight="bold")
    axes.set_xlabel("steps" if sweep.machine.is_ideal else "seconds")
    axes.legend(frameon=False, loc="upper right")
    open_axes(axes, "top", "right")


def _name(outcome: SimulationOutcome) -> str:
    return textwrap.shorten(outcome.setting.name, MAX_NAME, placeholder=" …")


def _shown(sweep: Sweep) -> list[SimulationOutcome]:
    """At most four different outcomes: the recommended ones, the slowest that keeps long answers, and the baseline on
    top."""
    keeping = [outcome for outcome in sweep.outcomes if outcome.setting.keeps_longest]
    slowest = max(keeping, key=lambda outcome: outcome.seconds, default=None)
    chosen = [slowest, sweep.fastest_with_longest, sweep.fastest]
    others = {id(outcome): outcome for outcome in chosen if outcome not in (None, sweep.baseline)}
    return [*others.values(), sweep.baseline]


def _color(sweep: Sweep, outcome: SimulationOutcome) -> str:
    if outcome is sweep.baseline:
        return BASELINE
    if outcome is sweep.fastest:
        return FASTEST
    return KEEPING if outcome is sweep.fastest_with_longest else PLAIN


def open_axes(axes, *sides: str) -> None:
    """Hide the lines on these sides."""
    for side, spine in axes.spines.items():
        spine.set_visible(side not in sides)
        spine.set_color(PALE)
