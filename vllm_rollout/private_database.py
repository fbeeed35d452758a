"""SQLite databases that only their owner reads. Invariant: a transaction that is committed survives a power cut."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vllm_rollout.private_file import narrow, open_private

BUSY_TIMEOUT_S = 5.0
"""Seconds that another process may hold a database."""


def open_database(path: Path | None, version: int) -> sqlite3.Connection:
    """The database at `path`, or one in memory. Each statement commits unless a transaction has begun.

    The caller makes the tables and sets `user_version`, which is 0 in a new database. Raises: ValueError for a database
    of another version. sqlite3.Error, OSError.
    """
    if path is not None:
        os.close(open_private(path, os.O_RDWR))  # SQLite gives its other files the mode of this one
        for beside in (f"{path.name}-wal", f"{path.name}-shm"):
            with suppress(FileNotFoundError):
                narrow(path.with_name(beside))
    database = sqlite3.connect(path or ":memory:", BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    _write_ahead(database)
    database.execute("PRAGMA synchronous = FULL")
    (found,) = database.execute("PRAGMA user_version").fetchone()
    if found not in (0, version):
        raise ValueError(
            f"{path} is of version {found}, this server reads version {version}. Use the version that wrote it, or "
            "name another folder."
        )
    return database


def give_unowned(database: sqlite3.Connection, columns: Mapping[str, str], namespace: str) -> None:
    """Move rows that were made without a key into this namespace, except names that the namespace already has.

    `columns`: each table, with its column for the name. The last table has each name once. Its names tell which rows of
    the other tables move.
    """
    last, name = [*columns.items()][-1]
    for table, column in columns.items():
        database.execute(
            f"UPDATE {table} SET {column} = :their || '/' || {column} WHERE instr({column}, '/') = 0 "
            f"AND NOT EXISTS (SELECT 1 FROM {last} AS r WHERE r.{name} = :their || '/' || {table}.{column})",
            {"their": namespace},
        )


def _write_ahead(database: sqlite3.Connection) -> None:
    """Set WAL mode. SQLite itself does not wait for other processes that change a new database's mode."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(0.01)
