"""The folder of --rollout-state. Invariant: what an earlier version kept there as one file is taken over whole."""

from __future__ import annotations

from pathlib import Path

LEARNED = "learned.state"
"""Calibration, quality heads, lengths: the bytes of GET /v1/rollouts/state."""
RUNS = "runs.sqlite"


def state_folder(path: Path) -> Path:
    """Make the folder, or a folder of the file that is there. Raises: OSError.

    A server that ends between two of these steps goes on with the next one at its next start.
    """
    moving = path.with_name(f"{path.name}.moving")
    if path.is_file():
        moving.mkdir(exist_ok=True)
        path.rename(moving / LEARNED)
    if moving.is_dir() and not path.exists():
        moving.rename(path)
    path.mkdir(parents=True, exist_ok=True)
    return path
