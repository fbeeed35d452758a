"""Markdown tables and pictures. Invariant: shows only given values, and a dash for an unknown value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#1e293b"

Row = Mapping[str, Any]


def grid(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"### {title}", "", _line(header), _line(["---"] * len(header)), *map(_line, rows)]
    return "\n".join(lines)


def columns(title: str, rows: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> str:
    """A grid with one column per entry of `cells`: its header, and the function that makes a cell from a row."""
    return grid(title, list(cells), [[cell(row) for cell in cells.values()] for row in rows])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "—"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    return number(None if share is None else 100 * share, digits) + ("" if share is None else " %")


def ranged(row: Row) -> str:
    """A value with its interval, if it has one."""
    ends = row["interval"]
    return number(row["value"]) if ends is None else f"{row['value']:.3f} ({ends[0]:.3f} to {ends[1]:.3f})"


@contextmanager
def picture(path: Path, figsize: tuple[float, float], width_ratios: Sequence[float], w_pad: float) -> Iterator[Any]:
    """Panels side by side, written to `path` at the end of the block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with plt.rc_context({"font.size": 10, **colors}):
        figure, (panels,) = plt.subplots(
            1, len(width_ratios), figsize=figsize, dpi=120, width_ratios=width_ratios, squeeze=False
        )
        for axes in panels:
            axes.spines[["top", "right"]].set_visible(False)
        yield panels
        figure.tight_layout(w_pad=w_pad)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def bars(
    axes: Any,
    values: Mapping[str, float],
    *,
    colors: Mapping[str, str],
    names: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    runs: Mapping[str, Sequence[float]] | None = None,
    title: str = "",
    xlabel: str = "",
) -> None:
    """A horizontal bar per way, the first on top, with its text in or beside it and a tick for each of its runs."""
    longest = max(values.values())
    for place, (way, value) in enumerate(values.items()):
        axes.barh(place, value, color=colors[way], height=0.62)
        singles = (runs or {}).get(way, ())
        axes.plot(singles, [place + 0.25] * len(singles), "|", color=INK, ms=6, mew=1.3)
        if texts is not None:
            inside = value > 0.45 * longest
            start = 0 if inside else max([value, *singles])
            style = {"va": "center", "weight": "bold", "color": "white" if inside else INK}
            axes.annotate(texts[way], (start, place), (8, 0), textcoords="offset points", **style)
    axes.set_yticks(range(len(values)), [(names or {}).get(way, way) for way in values])
    axes.set_ylim(len(values) - 0.45, -0.55)
    axes.set_xlabel(xlabel)
    axes.set_title(title, loc="left", weight="bold")


def lines(
    axes: Any,
    xs: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    colors: Mapping[str, str],
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
) -> None:
    """A line with a dot per value for each way, over the same x values."""
    for way, values in series.items():
        axes.plot(xs, values, "o-", color=colors[way], label=way)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", weight="bold")
