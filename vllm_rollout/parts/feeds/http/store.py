"""Feeds on disk, in SQLite. Invariant: each method is one transaction, which is done completely or not at all.

Calls block, so they are made on a thread (`kept.py`).
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.feeds.rules.feed import MAX_NAMES
from vllm_rollout.private_database import give_unowned, open_database

FEEDS = "feeds.sqlite"
"""File in the folder of --rollout-state."""
FORMAT = 2
SCHEMA = """
CREATE TABLE IF NOT EXISTS feeds (
    name TEXT PRIMARY KEY, created INTEGER NOT NULL, model TEXT NOT NULL, settings TEXT NOT NULL, state TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS prompts (
    feed TEXT NOT NULL, turn INTEGER NOT NULL, body TEXT NOT NULL, born INTEGER, fields TEXT, json BLOB,
    kept BLOB,
    PRIMARY KEY (feed, turn)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    feed TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (feed, kind, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS digests (
    feed TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (feed, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (
    feed TEXT NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (feed, number)
);
CREATE TABLE IF NOT EXISTS pieces (
    feed TEXT NOT NULL, number INTEGER NOT NULL, piece INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (feed, number, piece)
);
"""
# prompts has a row until the prompt's group is in a batch, or left the feed. born, fields and json are of complete
# groups. born, fields and kept are of groups that were stopped, and go on after a restart. Another group that runs has
# none of them, and runs again. digests has the prompts of each key of a put. pieces has what
# an answer has beyond its first MAX_BLOB bytes. Files of before lack both tables.
TABLES = ("prompts", "keys", "digests", "answers", "pieces")
MAX_BLOB = 256 << 20
"""Most bytes of an answer in one row. SQLite takes up to 1e9."""


class StoredPrompt(NamedTuple):
    """A prompt that has not come back."""

    turn: int
    body: str
    born: int | None
    """Version at the birth of its group. None: the group begins anew."""
    fields: Mapping[str, Any]
    """Fields of the group's object."""
    json: bytes
    """The complete group."""
    kept: bytes | None
    """Packed output of a stopped group. None for other groups."""


class StoredFeed(NamedTuple):
    name: str
    created: int
    model: str
    settings: Mapping[str, Any]
    state: Mapping[str, Any]
    """Numbers of `LiveFeed.state`."""
    prompts: Sequence[StoredPrompt]
    puts: Mapping[str, str | None]
    """Digests of prompts by the key of the request that has put them, oldest first. None: it is not known."""
    keys: Sequence[str]
    """Keys of batches, oldest first."""
    answers: Mapping[str, bytes]
    """Newest batches by key, oldest first."""


@dataclass(slots=True, eq=False)
class BatchToKeep:
    """The answer of a batch, which is kept in place of its groups."""

    turns: list[int]
    """Prompts of its groups."""
    number: int
    key: str
    body: bytes
    forgotten: list[str]
    """Keys of older batches whose answers are not kept any more."""
    is_written: bool = False


class FeedStore:
    """All feeds of one server."""

    def __init__(self, path: Path, *, keyless: str = "") -> None:
        """`keyless`: the namespace that gets feeds which were made without a key. Empty: these feeds stay without one.

        Raises: RuntimeError for a file that cannot be read or written.
        """
        self.path = path
        try:
            self._database = open_database(path, FORMAT)
            self._database.executescript(SCHEMA)
            self._database.execute(f"PRAGMA user_version = {FORMAT}")
            if keyless:
                with self._transaction():
                    give_unowned(self._database, {**dict.fromkeys(TABLES, "feed"), "feeds": "name"}, keyless)
        except (sqlite3.Error, ValueError, RequestError) as error:
            raise RuntimeError(f"{path} cannot be used for feeds ({error}). Move it away, then start again.") from error

    def create(
        self, name: str, created: int, model: str, settings: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        """Add a feed, in place of one of this name whose deletion failed."""
        row = (name, created, model, json.dumps(settings), _as_json(state))
        with self._transaction() as run:
            _delete(run, name)
            run("INSERT INTO feeds VALUES (?, ?, ?, ?, ?)", row)

    def delete(self, name: str) -> None:
        with self._transaction() as run:
            _delete(run, name)

    def put(self, name: str, key: str | None, digest: str | None, prompts: Iterable[tuple[int, str]]) -> None:
        """Add prompts, each with its turn. `digest`: of all."""
        with self._transaction() as run:
            last = 0
            for turn, body in prompts:
                run("INSERT INTO prompts (feed, turn, body) VALUES (?, ?, ?)", (name, turn, body))
                last = turn
            if key is not None:
                run("REPLACE INTO keys VALUES (?, 'put', ?, ?)", (name, key, last))
                run("REPLACE INTO digests VALUES (?, ?, ?)", (name, key, digest))
                _forget_keys(run, name, "put")
                run(
                    "DELETE FROM digests WHERE feed = ? AND key NOT IN "
                    "(SELECT key FROM keys WHERE feed = ? AND kind = 'put')",
                    (name, name),
                )

    def completed(self, name: str, turn: int, born: int, fields: Mapping[str, Any], group: bytes) -> None:
        values = (born, json.dumps(fields), zlib.compress(group, 1), name, turn)
        with self._transaction() as run:
            run("UPDATE prompts SET born = ?, fields = ?, json = ?, kept = NULL WHERE feed = ? AND turn = ?", values)

    def stopped(self, name: str, turn: int, born: int, fields: Mapping[str, Any], kept: bytes) -> None:
        values = (born, json.dumps(fields), kept, name, turn)
        with self._transaction() as run:
            run("UPDATE prompts SET born = ?, fields = ?, kept = ? WHERE feed = ? AND turn = ?", values)

    def left(
        self,
        name: str,
        turns: Iterable[int],
        anew: Iterable[int],
        state: Mapping[str, Any],
        batch: BatchToKeep | None,
    ) -> None:
        """Forget prompts whose groups are in no batch, and the groups of prompts that begin `anew`. Keep the feed's
        numbers. `batch`: one that they count. It may be written twice. Nothing is written of a feed that was deleted.
        """
        with self._transaction() as run:
            for turn in anew:
                run(
                    "UPDATE prompts SET born = NULL, fields = NULL, json = NULL, kept = NULL "
                    "WHERE feed = ? AND turn = ?",
                    (name, turn),
                )
            for turn in (*turns, *(() if batch is None else batch.turns)):
                run("DELETE FROM prompts WHERE feed = ? AND turn = ?", (name, turn))
            is_there = run("UPDATE feeds SET state = ? WHERE name = ?", (_as_json(state), name)).rowcount
            if batch is not None and is_there:
                number, body = batch.number, memoryview(zlib.compress(batch.body, 1))
                run("REPLACE INTO keys VALUES (?, 'batch', ?, ?)", (name, batch.key, number))
                _forget_keys(run, name, "batch")
                run("REPLACE INTO answers VALUES (?, ?, ?, ?)", (name, number, batch.key, body[:MAX_BLOB]))
                for at in range(MAX_BLOB, len(body), MAX_BLOB):
                    run("REPLACE INTO pieces VALUES (?, ?, ?, ?)", (name, number, at, body[at : at + MAX_BLOB]))
                for key in batch.forgotten:
                    its = "feed = ? AND number = (SELECT number FROM answers WHERE feed = ? AND key = ?)"
                    for table in ("pieces", "answers"):
                        run(f"DELETE FROM {table} WHERE {its}", (name, name, key))

    def load(self) -> list[StoredFeed]:
        """All feeds. Raises: RuntimeError for a damaged file."""
        try:
            return [self._feed(*row) for row in self._database.execute("SELECT * FROM feeds").fetchall()]
        except (sqlite3.Error, ValueError, zlib.error) as error:
            raise RuntimeError(f"{self.path} is damaged ({error}). Move it away, then start again.") from error

    def _feed(self, name: str, created: int, model: str, settings: str, state: str) -> StoredFeed:
        def rows(query: str, *values: int) -> list[Any]:
            return self._database.execute(query, (name, *values)).fetchall()

        prompts = [
            StoredPrompt(turn, body, born, json.loads(fields or "{}"), zlib.decompress(group) if group else b"", kept)
            for _, turn, body, born, fields, group, kept in rows("SELECT * FROM prompts WHERE feed = ? ORDER BY turn")
        ]
        puts = rows(
            "SELECT key, digest FROM keys LEFT JOIN digests USING (feed, key) WHERE feed = ? AND kind = 'put' "
            "ORDER BY number"
        )
        batches = rows("SELECT key FROM keys WHERE feed = ? AND kind = 'batch' ORDER BY number")
        answers = {}
        for number, key, body in rows("SELECT number, key, body FROM answers WHERE feed = ? ORDER BY number"):
            more = rows("SELECT body FROM pieces WHERE feed = ? AND number = ? ORDER BY piece", number)
            answers[key] = zlib.decompress(b"".join([body, *(piece for (piece,) in more)]))
        keys = [key for (key,) in batches]
        return StoredFeed(
            name, created, model, json.loads(settings), json.loads(state), prompts, dict(puts), keys, answers
        )

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Yields a function that runs one statement. Raises: RequestError (507)."""
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database.execute
        except (sqlite3.Error, OverflowError) as error:  # OverflowError: of a value that is too large
            raise RequestError(
                f"the feeds' database {self.path} cannot be written: {error}. Free space, or look at its disk. Then "
                "repeat the request.",
                status=HTTPStatus.INSUFFICIENT_STORAGE,
            ) from error


def _forget_keys(run: Any, name: str, kind: str) -> None:
    """Forget all but the newest keys, as memory does."""
    run(
        "DELETE FROM keys WHERE feed = ? AND kind = ? AND key NOT IN "
        "(SELECT key FROM keys WHERE feed = ? AND kind = ? ORDER BY number DESC LIMIT ?)",
        (name, kind, name, kind, MAX_NAMES),
    )


def _delete(run: Any, name: str) -> None:
    for table in TABLES:
        run(f"DELETE FROM {table} WHERE feed = ?", (name,))
    run("DELETE FROM feeds WHERE name = ?", (name,))


def _as_json(state: Mapping[str, Any]) -> str:
    return json.dumps(state, default=vars)  # for FailedPrompt
