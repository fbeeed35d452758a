"""Picture of a sweep: rounds of the fastest setting beside synchronous rounds, and the mean round of every setting."""

from __future__ import annotations

from pathlib import Path

from vllm_rollout.parts.rounds.with_shaping.simulated.outcome import RoundSweep, RunOutcome
from vllm_rollout.simulator.machine import duration
from vllm_rollout.simulator.picture import BASELINE, FASTEST, KEEPING, PLAIN, open_axes, sheet

SHORT, LONG = FASTEST, KEEPING
MAX_ROUNDS = 40
"""Number of consecutive rounds that are drawn."""


def draw(sweep: RoundSweep, subtitle: str, path: Path) -> None:
    """Draw a sweep to a file. Raises: OSError, or ValueError for a file ending that matplotlib does not know."""
    fastest = sweep.fastest
    title = "Nothing beats synchronous rounds here"
    if fastest is not sweep.baseline:
        title = f"{fastest.setting.name}: {sweep.speed_up(fastest):.2f} times as fast as synchronous rounds"
    bars_in = 0.42 * len(sweep.outcomes)
    height = 1.75 + bars_in + 5.4
    with sheet(path, title, subtitle, height) as figure:
        left = 0.03 + 0.0058 * max(len(outcome.setting.name) for outcome in sweep.outcomes)
        _draw_means(figure.add_axes((left, 5.6 / height, 0.97 - left, bars_in / height)), sweep)
        drawn = fastest if fastest is not sweep.baseline else sweep.outcomes[-1]
        upper = figure.add_axes((0.06, 3.05 / height, 0.91, 1.95 / height))
        lower = figure.add_axes((0.06, 0.55 / height, 0.91, 1.95 / height), sharex=upper)
        unit = "steps" if sweep.conditions.machine.is_ideal else "seconds"
        _draw_rounds(upper, sweep, drawn, "seconds", f"time of consecutive rounds, {unit}: {drawn.setting.name}")
        _draw_rounds(lower, sweep, drawn, "max_tokens", "longest returned answer of each round, tokens")
        lower.set_xlabel("round")


def _draw_means(axes, sweep: RoundSweep) -> None:
    for row, outcome in enumerate(sweep.outcomes):
        color = BASELINE if outcome is sweep.baseline else FASTEST if outcome is sweep.fastest else PLAIN
        axes.barh(row, outcome.round_s, height=0.66, color=color)
        text = f"  {duration(outcome.round_s, sweep.conditions.machine.is_ideal)}"
        if outcome is not sweep.baseline:
            text += f"  {sweep.speed_up(outcome):.2f}x"
        axes.text(outcome.round_s, row, text, va="center", size=9.5, weight="bold")
    axes.set_yticks(range(len(sweep.outcomes)), [outcome.setting.name for outcome in sweep.outcomes])
    axes.set_ylim(len(sweep.outcomes) - 0.45, -0.55)
    axes.set_xlim(0, 1.15 * max(outcome.round_s for outcome in sweep.outcomes))
    axes.set_xticks([])
    axes.set_title(f"mean round, over {sweep.span}", loc="left", size=10.5, weight="bold")
    axes.tick_params(length=0)
    open_axes(axes, "top", "right", "bottom")


def _draw_rounds(axes, sweep: RoundSweep, drawn: RunOutcome, field: str, title: str) -> None:
    for outcome, shift in ((sweep.baseline, -0.22), (drawn, 0.22)):
        for kind in ("short", "long"):
            its = [(n, getattr(r, field)) for n, r in enumerate(outcome.rounds[:MAX_ROUNDS]) if r.kind == kind]
            if not its:
                continue
            if outcome is sweep.baseline:
                color, label = BASELINE, "synchronous" if kind == "short" else None
            else:
                color, label = (SHORT, "short round") if kind == "short" else (LONG, "long round")
            numbers, values = zip(*its, strict=True)
            axes.bar([n + shift for n in numbers], values, width=0.42, color=color, label=label)
    axes.set_xlim(-0.7, min(MAX_ROUNDS, max(len(o.rounds) for o in (sweep.baseline, drawn))) - 0.3)
    axes.set_title(title, loc="left", size=10.5, weight="bold")
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    axes.tick_params(length=0)
    axes.grid(axis="y", color="#e2e8f0", lw=0.8)
    axes.set_axisbelow(True)
    open_axes(axes, "top", "right")
