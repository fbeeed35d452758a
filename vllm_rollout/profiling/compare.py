"""Two profiles side by side: PTL at the points that both have.

Invariant: a ratio above 1 means that the second profile is slower.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from vllm_rollout.drawing import INK, figure_at
from vllm_rollout.parts.shaping.profile_file import Profile, describe_hardware, describe_model
from vllm_rollout.profiling.picture import CONTEXT_COLORS, finish


class Pair(NamedTuple):
    """A point of both profiles."""

    tensor_parallel_size: int
    context_tokens: int
    batch_size: int
    first_s: float
    second_s: float

    @property
    def ratio(self) -> float:
        return self.second_s / self.first_s


def common_points(first: Profile, second: Profile) -> list[Pair]:
    """Points that both profiles have. Raises: ValueError if there are none."""
    seconds = {(p.tensor_parallel_size, p.context_tokens, p.batch_size): p.median_s for p in second.points}
    pairs = [
        Pair(*place, point.median_s, seconds[place])
        for point in first.points
        if (place := (point.tensor_parallel_size, point.context_tokens, point.batch_size)) in seconds
    ]
    if not pairs:
        raise ValueError(
            "the two profiles have no point in common. Measure the same --tensor-parallel, --contexts and "
            "--batch-sizes in both."
        )
    return pairs


def compare(first_path: Path, second_path: Path, picture: Path | None, console: Console | None = None) -> None:
    """Print a table of the two profiles, and draw it if `picture` is given. Raises: ValueError for an unreadable
    profile."""
    console = console or Console()
    first, second = Profile.read(first_path), Profile.read(second_path)
    pairs = common_points(first, second)
    names = _names(first_path, second_path)
    for name, profile in zip(names, (first, second), strict=True):
        console.print(f"[bold]{name}[/]: {describe(profile)}", soft_wrap=True)
    console.print(comparison_table(pairs, names))
    console.print(f"median over {len(pairs)} points: {verdict(pairs, names)}")
    if picture is not None:
        draw_comparison(pairs, names, picture)
        console.print(f"Picture: [bold]{picture}[/]")


def describe(profile: Profile) -> str:
    flags = " ".join(profile.serve_flags) or "no flags"
    return (
        f"{describe_model(profile.model_name, profile.model)}; {describe_hardware(profile.hardware)}; vLLM "
        f"{profile.versions.get('vllm')}; {flags}; {profile.updated}"
    )


def verdict(pairs: list[Pair], names: tuple[str, str]) -> str:
    ratio = median(pair.ratio for pair in pairs)
    word = "slower" if ratio > 1 else "faster"
    return f"{names[1]} takes {ratio:.3f} times as long as {names[0]} ({abs(ratio - 1):.1%} {word})"


def comparison_table(pairs: list[Pair], names: tuple[str, str]) -> Table:
    table = Table(title="Milliseconds of a decode step")
    for column in ("tensor\nparallel", "context", "batch", *names, "second / first"):
        table.add_column(column, justify="right", overflow="fold")
    context = None
    for pair in pairs:
        if context not in (None, pair[:2]):
            table.add_section()
        context = pair[:2]
        cells = [str(pair.tensor_parallel_size), str(pair.context_tokens), str(pair.batch_size)]
        table.add_row(*cells, f"{pair.first_s * 1e3:.2f}", f"{pair.second_s * 1e3:.2f}", f"{pair.ratio:.3f}")
    return table


def draw_comparison(pairs: list[Pair], names: tuple[str, str], path: Path) -> None:
    """Draw the ratio over batch size, with a line per tensor-parallel size and context."""
    with figure_at(path, (9, 5), {"font.size": 10, "axes.labelcolor": INK}, layout="constrained") as figure:
        axes = figure.subplots()
        for i, (size, context) in enumerate(sorted({pair[:2] for pair in pairs})):
            line = [pair for pair in pairs if pair[:2] == (size, context)]
            axes.plot(
                [pair.batch_size for pair in line], [pair.ratio for pair in line], "o-", lw=1.6,
                color=CONTEXT_COLORS[i % len(CONTEXT_COLORS)],
                label=f"context {context}" + (f", tensor-parallel size {size}" if size > 1 else ""),
            )  # fmt: skip
        axes.axhline(1, color=INK, lw=1, ls=(0, (3, 2)))
        sizes = sorted({pair.batch_size for pair in pairs})
        finish(axes, verdict(pairs, names), f"step time, {names[1]} / {names[0]}", sizes)
        axes.legend(frameon=False)


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Names of the files, with their folders if the names are equal."""
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))
