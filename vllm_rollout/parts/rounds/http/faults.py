"""SQLite's errors, translated into errors that tell a client what to do. Invariant: a failed operation has changed
nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.rounds.rules.rounds import RoundError

PASSING = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INSUFFICIENT_STORAGE)
"""Statuses of errors that may pass: the database was locked, or the disk was full."""


def is_damage(error: sqlite3.Error) -> bool:
    """True if the file is damaged or no SQLite database."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # errors of Python's own have none
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def translated(path: Path | None) -> Iterator[None]:
    """Translate errors of the database at `path`. Raises: RequestError for these, and for a round that cannot be
    opened."""
    try:
        yield
    except RoundError as error:
        status = HTTPStatus.CONFLICT if error.conflict else HTTPStatus.BAD_REQUEST
        raise RequestError(str(error), status=status, param=error.field) from error
    except sqlite3.Error as error:
        raise _translation(path, error) from error


def _translation(path: Path | None, error: sqlite3.Error) -> RequestError:
    if is_damage(error):
        return RequestError(
            f"{path} is damaged, or no database of runs ({error}). What cannot be read is lost: prompts that wait in "
            "runs, and answers that nobody has read; what was learned is in another file, and whole. To go on, end the "
            "server, move the file away with its -wal and -shm, start again, and PUT your newest state to "
            "/v1/rollouts/state, or make the runs again and hand in what had not come back. `sqlite3 FILE .recover` "
            "may read more of it.",
            status=HTTPStatus.INTERNAL_SERVER_ERROR,
        )
    if "locked" in str(error) or "busy" in str(error):
        return RequestError(
            f"the runs' database {path} is locked by another process. Nothing was changed; try again.",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            retry_after_s=1,
        )
    remedy = "Free space" if "full" in str(error) else "Look at its disk"
    return RequestError(
        f"the runs' database {path} cannot be written: {error}. Nothing was changed. {remedy}, then repeat the request "
        "with its idempotency_key.",
        status=HTTPStatus.INSUFFICIENT_STORAGE,
    )
