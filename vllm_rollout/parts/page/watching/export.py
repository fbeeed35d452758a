"""Exports a recording as curves: TensorBoard's event files, or trackio's database.

Invariant: a second export replaces the first one of the same recording, and changes nothing that other programs wrote.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich.progress
from rich.console import Console

from vllm_rollout.extras import install_command
from vllm_rollout.parts.page.recording.file import TraceRow, pieces, rows_in
from vllm_rollout.parts.page.recording.rows import RewardRow, RolloutRow
from vllm_rollout.parts.page.recording.session_rows import SessionGroupRow, SessionRewardRow, add_session_rewards
from vllm_rollout.parts.page.watching.scalars import add_rewards, known_lengths, scalars, session_scalars

NUM_BINS = 30
OURS = ".vllm_rollout"
"""Ending of the names of our event files."""
CONFIG = {"written_by": "vllm-rollout export"}
"""Config by which our runs in trackio are recognized."""
HISTOGRAM = "lengths"
SESSIONS = "groups of sessions"
"""Name of the run with curves of groups of sessions: a point per group."""


class Point(NamedTuple):
    """Point of a curve: one rollout, or one group of sessions."""

    at: float
    """End of the rollout or group, in Unix seconds."""
    scalars: dict[str, float]
    lengths: tuple[np.ndarray, np.ndarray] | None
    """Counts and edges of a histogram. None if no length is known."""


@dataclass
class Curves:
    by_run: dict[str, dict[int, Point]] = field(default_factory=lambda: defaultdict(dict))
    """Points by run, then by number.

    The run is a run of rounds, a simulated setting, SESSIONS, or "" for other rollouts. The number is that of the
    round, else the position in the file. A round that was interrupted and run again has its last point.
    """
    broken: list[str] = field(default_factory=list)
    """Fault of each row that was left out."""


def check_installed(package: str) -> None:
    """Check that a package is installed. Raises: ValueError that says what to install."""
    if find_spec(package) is None:
        raise ValueError(f"--to {package} needs a package that is missing. Run {install_command(package)}.")


def read_curves(path: Path, threshold: float) -> Curves:
    """Read a recording. Raises: ValueError if nothing is left to draw, or OSError."""
    curves, posted, of_sessions, now = Curves(), defaultdict(list), defaultdict(list), time.time()
    for row in _rows(path, "Reading rewards", []):
        if isinstance(row, RewardRow):
            posted[row.rollout_id].append(row)
        elif isinstance(row, SessionRewardRow):
            of_sessions[row.name].append(row)
    for row in _rows(path, "Reading rollouts", curves.broken):
        if isinstance(row, RolloutRow):
            points = curves.by_run[row.run or row.setting or ""]
            row = add_rewards(row, posted.get(row.rollout_id, ()))
            lengths = list(known_lengths(row))
            points[len(points) if row.round is None else row.round] = Point(
                now if row.began is None else row.began + (row.seconds or 0.0),
                scalars(row, threshold),
                np.histogram(lengths, bins=NUM_BINS) if lengths else None,
            )
        elif isinstance(row, SessionGroupRow):
            points, row = curves.by_run[SESSIONS], add_session_rewards(row, of_sessions.get(row.name, ()))
            points[len(points)] = Point(row.began + (row.seconds or 0.0), session_scalars(row, threshold), None)
    if not curves.by_run:
        why = f"; first of {len(curves.broken)} broken rows: {curves.broken[0]}" if curves.broken else ""
        raise ValueError(f"{path}: holds no rollout and no sessions{why}. Name what `--rollout-record` wrote.")
    return curves


def _rows(path: Path, doing: str, broken: list[str]) -> Iterator[TraceRow]:
    console = Console(stderr=True)
    quiet = not console.is_terminal
    for piece in pieces(path):
        with rich.progress.open(
            piece, encoding="utf-8", errors="replace", description=doing, transient=True, console=console, disable=quiet
        ) as lines:
            yield from rows_in(lines, piece, broken)


def to_tensorboard(curves: Curves, out: Path) -> str:
    """Write an event file in `out`, and one in a subfolder per run. Returns the command that shows them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folders = {run: out / _file_name(run) if run else out for run in curves.by_run}
    before = [path for folder in folders.values() for path in folder.glob(f"events.out.tfevents.*{OURS}")]
    for run, points in curves.by_run.items():
        writer = EventFileWriter(str(folders[run]), filename_suffix=OURS)
        for step, point in sorted(points.items()):
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.scalars.items()]
            if point.lengths is not None:
                counts, edges = point.lengths
                middles = (edges[1:] + edges[:-1]) / 2
                histogram = HistogramProto(
                    min=edges[0], max=edges[-1], num=counts.sum(), sum=counts @ middles,
                    sum_squares=counts @ middles**2, bucket_limit=edges[1:], bucket=counts,
                )  # fmt: skip
                values.append(Summary.Value(tag=HISTOGRAM, histo=histogram))
            writer.add_event(Event(wall_time=point.at, step=step, summary=Summary(value=values)))
        writer.close()
    for path in before:
        path.unlink()
    return f"tensorboard --logdir {out}"


def to_trackio(curves: Curves, project: str, name: str) -> str:
    """Write a run `name`, and one `name-RUN` per run of rounds, to trackio's database. Returns the command that shows
    them.

    trackio's `log` stamps every point with the current time, so this calls what trackio's own importers call. Raises:
    ValueError for a run that another program wrote.
    """
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    SQLiteStorage.validate_project_name(project)
    names = {f"{name}-{run}" if run else name: points for run, points in curves.by_run.items()}
    is_there = project in SQLiteStorage.get_projects()
    known = [run for run in trackio.Api().runs(project) if run.name in names] if is_there else []
    for run in known:
        if (run.config or {}).get("written_by") != CONFIG["written_by"]:
            raise ValueError(f"project {project!r} has a run {run.name!r} that is another program's. Give a --name.")
    for run in known:
        run.delete()
    for run_name, points in names.items():
        steps = sorted(points)
        SQLiteStorage.bulk_log(
            project=project,
            run=run_name,
            metrics_list=[_logged(points[step], trackio.Histogram) for step in steps],
            steps=steps,
            timestamps=[datetime.fromtimestamp(points[step].at, UTC).isoformat() for step in steps],
            config=CONFIG,
        )
    return f"trackio show --project {project}"


def _logged(point: Point, histogram: Callable[..., Any]) -> dict[str, Any]:
    if point.lengths is None:
        return dict(point.scalars)
    return {**point.scalars, HISTOGRAM: histogram(np_histogram=point.lengths)._to_dict()}


def _file_name(run: str) -> str:
    """Name of the folder of a run. Different runs have different folders."""
    plain = re.sub(r"[^\w-]", "_", run, flags=re.ASCII)
    return plain if run in (plain, SESSIONS) else f"{plain}-{blake2b(run.encode(), digest_size=4).hexdigest()}"
