"""Picture of a profile: step time and tokens per second over batch size, a row of panels per tensor-parallel size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vllm_rollout.drawing import INK, figure_at
from vllm_rollout.parts.shaping.profile_file import CurveFit, Point, Profile, describe_hardware

FAINT = "#cbd5e1"
CONTEXT_COLORS = ("#0f766e", "#f59e0b", "#4f46e5", "#be123c", "#0ea5e9", "#65a30d")
ROW_INCHES = 4.6
HEAD_INCHES = 1.15
STYLE = {"font.size": 10, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}


def draw(profile: Profile, path: Path) -> None:
    """Draw points with their 10th and 90th percentile, fitted curves, and breakpoints as diamonds."""
    sizes = profile.tensor_parallel_sizes
    height = HEAD_INCHES + ROW_INCHES * len(sizes)
    with figure_at(path, (13, height), STYLE) as figure:
        rows = figure.subplots(len(sizes), 2, squeeze=False)
        top = 1 - HEAD_INCHES / height
        figure.subplots_adjust(left=0.06, right=0.985, top=top, bottom=0.62 / height, wspace=0.14, hspace=0.35)
        figure.text(0.02, 1 - 0.42 / height, _headline(profile), size=17, weight="bold")
        figure.text(0.02, 1 - 0.72 / height, _subtitle(profile), size=10)
        for (times, speeds), size in zip(rows, sizes, strict=True):
            draw_size(times, speeds, profile, size)


def _headline(profile: Profile) -> str:
    fit = max(profile.fits, key=lambda fit: fit.batch_sizes[-1])
    largest = fit.batch_sizes[-1]
    if largest <= 1:
        return f"{Path(profile.model_name).name}: time of a decode step"
    ratio = fit.curve(largest) / fit.curve(1)
    return (
        f"{largest:.0f} candidates in a step: {ratio:.1f} times the time of one, "
        f"{largest / ratio:.1f} times the tokens per second"
    )


def _subtitle(profile: Profile) -> str:
    flags = " ".join(profile.serve_flags)
    return (
        f"{Path(profile.model_name).name} on {describe_hardware(profile.hardware)}, vLLM "
        f"{profile.versions.get('vllm')}{f', {flags}' if flags else ''}; medians of decode steps, bars from the 10th "
        "to the 90th percentile"
    )


def draw_size(times, speeds, profile: Profile, tensor_parallel_size: int) -> None:
    """Draw step times on one panel, tokens per second on the other."""
    fits = [fit for fit in profile.fits if fit.tensor_parallel_size == tensor_parallel_size]
    for i, fit in enumerate(fits):
        where = (tensor_parallel_size, fit.context_tokens)
        points = [p for p in profile.points if (p.tensor_parallel_size, p.context_tokens) == where]
        _draw_curve(times, speeds, points, fit, CONTEXT_COLORS[i % len(CONTEXT_COLORS)])
    title = f"tensor-parallel size {tensor_parallel_size}: " if len(profile.tensor_parallel_sizes) > 1 else ""
    largest = max(fit.batch_sizes[-1] for fit in fits)
    ticks = [2**power for power in range(int(np.log2(largest)) + 1)]
    for axes, what, unit in ((times, "time of a decode step", "ms"), (speeds, "what that makes", "tokens/s")):
        finish(axes, f"{title}{what}", unit, ticks)
        axes.set_ylim(bottom=0)
    times.legend(loc="upper left", frameon=False, title="context, fit; ◆ breakpoint", alignment="left")


def _draw_curve(times, speeds, points: Sequence[Point], fit: CurveFit, color: str) -> None:
    x = np.array([p.batch_size for p in points])
    y = np.array([p.median_s for p in points])
    spread = np.array([[p.median_s - p.p10_s for p in points], [p.p90_s - p.median_s for p in points]])
    error = fit.median_left_out_error
    label = f"{fit.mean_context_tokens:,.0f} tokens, R² {fit.r_squared:.3f}"
    label += "" if error is None else f", left out {error:.1%}"
    times.errorbar(x, y * 1e3, spread * 1e3, fmt="o", ms=5, color=color, elinewidth=1, capsize=2, label=label)
    speeds.plot(x, x / y, "o", ms=5, color=color)
    dense = np.geomspace(fit.batch_sizes[0], fit.batch_sizes[-1], 400)
    curve = np.array([fit.curve(size) for size in dense])
    times.plot(dense, curve * 1e3, color=color, lw=1.6)
    speeds.plot(dense, dense / curve, color=color, lw=1.6)
    knots, values = np.array(fit.batch_sizes[1:-1]), np.array(fit.seconds[1:-1])
    marker = {"marker": "D", "ms": 8, "mfc": "white", "mec": color, "mew": 1.6, "ls": "none", "zorder": 4}
    times.plot(knots, values * 1e3, **marker)
    speeds.plot(knots, knots / values, **marker)


def finish(axes, title: str, unit: str, ticks: Sequence[int]) -> None:
    """Set title, axes and grid of a panel over batch sizes."""
    axes.set_title(title, loc="left", weight="bold", fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlabel("candidates in the step (batch size)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color=FAINT, lw=0.6, alpha=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
