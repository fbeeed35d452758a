"""Picture of the demo: seconds of both ways, and every candidate of each group."""

from __future__ import annotations

import textwrap
from pathlib import Path

from vllm_rollout.demo.options import Options
from vllm_rollout.demo.phases import Phase, RacedCandidate, compare_kept
from vllm_rollout.drawing import INK, figure_at

STATE_COLORS = {"kept": "#0f766e", "surplus": "#f59e0b", "unused": "#94a3b8"}
AVOIDED_STYLE = {"facecolor": "#e2e8f0", "edgecolor": "#94a3b8", "hatch": "////", "lw": 0}
NUM_COLUMNS = 4


def draw(stock: Phase, race: Phase, options: Options, path: Path) -> None:
    """Draw seconds of both ways, and per group every candidate up to its end or its stop. Writes the file `path`."""
    from matplotlib.patches import Patch

    num_columns = min(NUM_COLUMNS, options.prompts)
    num_rows = -(-options.prompts // num_columns)
    style = {"font.size": 9, "axes.labelcolor": INK, "xtick.color": INK}
    with figure_at(path, (14, 2.9 + 2.9 * num_rows), style) as figure:
        head, body = figure.subfigures(2, 1, height_ratios=[2.3, 2.9 * num_rows])
        _draw_seconds(head.add_axes((0.14, 0.06, 0.84, 0.52)), stock, race, options)
        head.text(
            0.02, 0.83, f"The first {options.group_size} of {options.candidates} candidates, "
            f"{stock.seconds / race.seconds:.1f} times faster", size=19, weight="bold",
        )  # fmt: skip
        head.text(
            0.02, 0.67, f"{options.prompts} prompts x {options.candidates} candidates, temperature 1, at most "
            f"{options.max_tokens} tokens, {Path(options.model).name}, same server and seeds. "
            + compare_kept(stock, race),
            size=10,
        )  # fmt: skip
        axes = body.subplots(num_rows, num_columns, sharex=True, squeeze=False)
        body.subplots_adjust(left=0.02, right=0.985, top=0.92, bottom=0.06 + 0.17 / num_rows, wspace=0.06, hspace=0.34)
        for panel in axes.flat[options.prompts :]:
            panel.axis("off")
        for panel, question, stock_group, race_group in zip(
            axes.flat, options.questions, stock.groups, race.groups, strict=False
        ):
            _draw_group(panel, question, stock_group, race_group, options.max_tokens)
        for panel in axes[-1]:
            panel.set_xlabel("output tokens")
        body.legend(
            handles=[
                Patch(color=STATE_COLORS["kept"], label="in the returned group"),
                Patch(color=STATE_COLORS["surplus"], label="stopped when the group was complete"),
                Patch(label="what stock vLLM went on to decode for it", **AVOIDED_STYLE),
                Patch(color=STATE_COLORS["unused"], label="ran into the cap, not needed"),
            ],
            loc="lower center", ncols=4, frameon=False, fontsize=10.5,
        )  # fmt: skip


def _draw_seconds(axes, stock: Phase, race: Phase, options: Options) -> None:
    for row, (phase, label) in enumerate(
        ((stock, f"stock vLLM\nwaits for all {options.candidates}"), (race, "vllm-rollout\nrace"))
    ):
        share = phase.returned_tokens / phase.generated_tokens
        axes.barh(row, phase.seconds, height=0.62, color=STATE_COLORS["kept" if phase is race else "unused"])
        note = f" {phase.seconds:.1f} s   {phase.generated_tokens:,} tokens, {1 - share:.0%} of them wasted"
        inside = phase.seconds > 0.6 * stock.seconds
        axes.text(
            phase.seconds, row, note + " " if inside else note, va="center", ha="right" if inside else "left",
            color="white" if inside else INK, size=11, weight="bold",
        )  # fmt: skip
        axes.text(-0.008 * stock.seconds, row, label, va="center", ha="right", size=10)
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(0, stock.seconds)
    axes.axis("off")


def _draw_group(
    axes, question: str, stock_group: list[RacedCandidate], race_group: list[RacedCandidate], max_tokens: int
) -> None:
    """Draw kept candidates by length on top, then the others by their length in the stock phase."""
    stock_length = {candidate.index: candidate.num_tokens for candidate in stock_group}
    kept = sorted((c for c in race_group if c.state == "kept"), key=lambda c: c.num_tokens)
    others = sorted((c for c in race_group if c.state != "kept"), key=lambda c: stock_length[c.index])
    for row, candidate in enumerate([*kept, *others]):
        beyond = stock_length[candidate.index] - candidate.num_tokens
        if candidate.state == "surplus" and beyond > 0:
            axes.barh(row, beyond, left=candidate.num_tokens, height=0.72, **AVOIDED_STYLE)
        axes.barh(row, candidate.num_tokens, height=0.72, color=STATE_COLORS[candidate.state])
    title = textwrap.fill(textwrap.shorten(question, 76, placeholder=" …"), 42)
    axes.set_title(title, fontsize=9.5, loc="left", weight="bold")
    if any(candidate.state == "surplus" for candidate in others):
        stop = max(candidate.num_tokens for candidate in kept)
        axes.axvline(stop, color=INK, lw=1, ls=(0, (3, 2)))
        right = stop < 0.6 * max_tokens
        axes.annotate(
            f"{len(kept)} finished: stop at {stop}",
            (stop, -0.4),
            (5 if right else -5, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            size=8.5,
        )
    axes.set_xlim(0, max_tokens * 1.02)
    axes.set_ylim(len(race_group) - 0.4, -1.1)
    only_bottom(axes)


def only_bottom(axes) -> None:
    """Remove the frame, except for the axis below."""
    axes.set_yticks([])
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cbd5e1")
