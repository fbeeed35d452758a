"""Markdown tables and the frame of a picture. Invariant: shows what is there; what is not known is a dash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#1e293b"


def grid(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"### {title}", "", _line(header), _line(["---"] * len(header)), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "—"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    return number(None if share is None else 100 * share, digits) + ("" if share is None else " %")


def ranged(row: Mapping[str, Any]) -> str:
    """A value with its interval."""
    ends = row["interval"]
    return number(row["value"]) if ends is None else f"{row['value']:.3f} ({ends[0]:.3f} to {ends[1]:.3f})"


@contextmanager
def picture(path: Path, figsize: tuple[float, float], width_ratios: Sequence[float], w_pad: float) -> Iterator[Any]:
    """Three panels side by side, written to `path` when they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with plt.rc_context({"font.size": 10, **colors}):
        figure, panels = plt.subplots(1, len(width_ratios), figsize=figsize, dpi=120, width_ratios=width_ratios)
        for axes in panels:
            axes.spines[["top", "right"]].set_visible(False)
        yield panels
        figure.tight_layout(w_pad=w_pad)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
