"""Picture of the demo of training: success over seconds, and one answer before and after."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_rollout.demo.training.curve import Answer, Curve
from vllm_rollout.drawing import INK, figure_at

COLORS = ("#94a3b8", "#f59e0b", "#0f766e")
GOOD, BAD = "#0f766e", "#b91c1c"
MAX_SHOWN = 640
"""Most characters of an answer that are drawn."""


def draw(curves: Sequence[Curve], said: tuple[Answer, Answer], path: Path) -> None:
    """Draw the curves on the left. On the right: an answer of the last policy, before and after training."""
    colors = dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    with figure_at(path, (14, 5), {"font.size": 10, **colors}) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        for curve, color in zip(curves, COLORS, strict=True):
            left.plot(curve.seconds, curve.success, "o-", color=color, lw=2.4, label=curve.title)
            end = f"  {curve.success[-1]:.2f} after {curve.seconds[-1]:.0f} s"
            left.annotate(end, (curve.seconds[-1], curve.success[-1]), color=color, weight="bold", va="center")
        left.spines[["top", "right"]].set_visible(False)
        left.set_xlabel("seconds of training (rollouts, rewards, gradients, weights)")
        left.set_ylabel("success on held-out problems")
        left.set_ylim(0, 1)
        left.set_xlim(0, 1.3 * max(curve.seconds[-1] for curve in curves))
        left.legend(frameon=False, loc="lower right")
        left.set_title("The same policy learns three times", loc="left", weight="bold")
        _draw_thoughts(right, said)
        figure.tight_layout(w_pad=3)


def _draw_thoughts(axes: Any, said: tuple[Answer, Answer]) -> None:
    axes.axis("off")
    axes.set_title("The held-out problem that it first thought about longest", loc="left", weight="bold")
    axes.text(0, 1.0, said[0].problem, family="monospace", va="top")
    for answer, name, top in zip(said, ("before", "after"), (0.9, 0.3), strict=True):
        mark, color = ("right", GOOD) if answer.reward else ("wrong", BAD)
        axes.text(0, top, f"{name}: {answer.num_tokens} tokens, {mark}", weight="bold", color=color, va="top")
        text = textwrap.shorten(answer.text, MAX_SHOWN, placeholder=" …")
        axes.text(0, top - 0.07, textwrap.fill(text, 66), family="monospace", size=8.5, va="top", linespacing=1.35)
