"""Runs on disk, in SQLite. Invariant: each method is one transaction; what it was asked is there whole, or not at all.

Calls block; `RunService` makes them on a thread. Without a folder the database is in memory and ends with the server.
"""

from __future__ import annotations

import base64
import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from vllm_rollout.group.rounds import EntryOutcome, OpenRound, RoundError, Run, RunTerms
from vllm_rollout.group.rounds_state import run_from_state, run_to_state
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.runs.owner import Owner

FORMAT = 1
MAX_RUNS = 4096
MAX_WAITING_BYTES = 512 * 1024 * 1024
"""Prompts that wait in runs, with what is kept of them: a state has all of them."""
NUM_ANSWERS = 2
"""Newest answers that are kept of a run: a client that asks for a new round has read the one before."""
BUSY_TIMEOUT_S = 5.0
"""How long another process may hold the database."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, model TEXT NOT NULL, settings TEXT NOT NULL, state TEXT NOT NULL,
    owner TEXT, memo TEXT
);
CREATE TABLE IF NOT EXISTS prompts (
    run TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, kept BLOB, PRIMARY KEY (run, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS staged (name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    run TEXT NOT NULL, round INTEGER NOT NULL, key TEXT NOT NULL, memo TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (run, round)
);
"""
# runs.owner and runs.memo belong to the open round: the process that runs it, and what its request
# asked for (`RoundRequest.memo`). staged has the file of what was learned that belongs to the runs that were put last.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it is on disk."""

    id: str
    created: int
    model: str
    settings: Mapping[str, Any]
    """Its request, as JSON."""
    run: Run
    owner: str | None
    """The process that runs the open round."""
    memo: str | None
    """Of the open round's request."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    memo: str
    """Of the request that it answers."""
    body: bytes


def _write_ahead(database: sqlite3.Connection) -> None:
    """SQLite itself does not wait for other processes that change a new database's mode."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(0.01)


class RunStore:
    """All runs of one server."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises: ValueError for a file that is no such database, or of another version; RequestError for one that is
        locked, or cannot be written; OSError."""
        self.path = path
        self._let_go: set[str] = set()
        """Runs whose open round this process does not run any more, whatever is written."""
        self.owner = Owner(None if path is None else path.with_name(f"{path.name}.owners"))
        with _translated(path):
            self._db = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            _write_ahead(self._db)
            self._db.execute("PRAGMA synchronous = FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise ValueError(
                    f"{path} is of version {version}, this server reads version {FORMAT}. Use the version that wrote "
                    "it, or name another folder."
                )
            with self._transaction():
                for statement in SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {FORMAT}")

    @property
    def is_durable(self) -> bool:
        """Runs survive the server."""
        return self.path is not None

    def create(self, id: str, model: str, settings: Mapping[str, Any], terms: RunTerms) -> tuple[StoredRun, bool]:
        """A run of that name, and whether it is new: one on the same terms may have been there.

        Raises: RequestError (409) when there is one on other terms.
        """
        with self._transaction():
            found = self._find(id)
            if found is None:
                if len(self.ids()) >= MAX_RUNS:
                    raise RequestError(
                        f"this server keeps {MAX_RUNS} runs, and has as many. DELETE one that is over.",
                        status=HTTPStatus.CONFLICT,
                    )
                self._db.execute(
                    "INSERT INTO runs (id, created, model, settings, state) VALUES (?, ?, ?, ?, ?)",
                    (id, int(time.time()), model, json.dumps(settings), json.dumps(run_to_state(Run(terms)))),
                )
                return self.read(id), True
            if found.model != model or found.settings != settings:
                raise RequestError(_other_terms(found, model, settings), status=HTTPStatus.CONFLICT, param="id")
            return found, False

    def read(self, id: str) -> StoredRun:
        """Raises: RequestError (404)."""
        found = self._find(id)
        if found is None:
            raise RequestError(
                f"run {id!r} is not known here. GET /v1/runs lists those that are; POST /v1/runs makes one.",
                status=HTTPStatus.NOT_FOUND,
            )
        return found

    def ids(self) -> list[str]:
        """The oldest first."""
        with _translated(self.path):
            return [id for (id,) in self._db.execute("SELECT id FROM runs ORDER BY created, id")]

    def delete(self, id: str) -> None:
        """Raises: RequestError (404; 409 while a round of it runs)."""
        with self._transaction():
            self.check_idle(self.read(id))
            for table in ("prompts", "answers"):
                self._db.execute(f"DELETE FROM {table} WHERE run = ?", (id,))
            self._db.execute("DELETE FROM runs WHERE id = ?", (id,))

    def planned(self, id: str, plan: Callable[[Run], OpenRound]) -> OpenRound:
        """What a round would be; nothing changes. Raises: RequestError, as `begin` does."""
        with _translated(self.path):
            stored = self.read(id)
            self.check_idle(stored)
            return plan(stored.run)

    def begin(
        self, id: str, memo: str, plan: Callable[[Run], OpenRound], prompts: Mapping[str, str], planned: OpenRound
    ) -> None:
        """Take the prompts of a round, before anything of it runs; this process owns it.

        Args:
            plan: what the round is, of the run as it is now. Raises: RoundError.
            prompts: bodies of fresh ones, by id.
            planned: what it was when it was checked.

        Raises: RequestError (409) when the run has changed since.
        """
        with self._transaction():
            stored = self.read(id)
            self.check_idle(stored)
            run = stored.run
            opened = plan(run)
            if opened != planned:
                raise RequestError(
                    f"run {id!r} has changed while this round was checked: another round of it was over. Look at its "
                    "num_fresh_prompts, and send the round again.",
                    status=HTTPStatus.CONFLICT,
                )
            num_known = run.num_handed_in
            self._check_room(prompts.values())
            run.begin(opened)
            fresh = [entry for entry in opened.all_entries if entry.number >= num_known]
            self._db.executemany(
                "INSERT INTO prompts (run, number, body) VALUES (?, ?, ?)",
                [(id, entry.number, prompts[entry.prompt_id]) for entry in fresh],
            )
            self._save(id, run, self.owner.name, memo)
        self._let_go.discard(id)

    def _check_room(self, bodies: Collection[str]) -> None:
        """Raises: RequestError (507) when these prompts are too much beside all that wait."""
        if not bodies:
            return
        sizes = "LENGTH(CAST(body AS BLOB)) + IFNULL(LENGTH(kept), 0)"
        (held,) = self._db.execute(f"SELECT IFNULL(SUM({sizes}), 0) FROM prompts").fetchone()
        fresh = sum(len(body.encode()) for body in bodies)
        if held + fresh > MAX_WAITING_BYTES:
            raise RequestError(
                f"prompts: {fresh} bytes beside {held} that wait in the runs of this server; at most "
                f"{MAX_WAITING_BYTES} may wait. Run long rounds, DELETE runs that are over, or send shorter prompts.",
                status=HTTPStatus.INSUFFICIENT_STORAGE,
                param="prompts",
            )

    def claim(self, id: str, key: str) -> OpenRound:
        """Run the open round of that key anew. Raises: RequestError (409) while it runs, here or elsewhere."""
        with self._transaction():
            stored = self.read(id)
            opened = stored.run.open
            if opened is None or opened.key != key:
                raise RequestError(f"round {key!r} of run {id!r} was over just now. Repeat the request.", status=409)
            self.check_idle(stored)
            self._save(id, stored.run, self.owner.name, stored.memo)
        self._let_go.discard(id)
        return opened

    def close(
        self,
        id: str,
        outcomes: Mapping[int, EntryOutcome],
        answer: Callable[[Run], bytes],
        *,
        kept: Mapping[int, bytes],
        **told: Any,
    ) -> Run:
        """The open round is over; returns the run after it.

        Args:
            outcomes, told: as of `Run.close`.
            answer: of the round, from the run after it.
            kept: what deferred prompts have generated, by number.
        """
        with self._transaction():
            stored = self.read(id)
            opened, run = stored.run.open, stored.run
            run.close(outcomes, **told)
            body = zlib.compress(answer(run), 1)
            gone = [number for number, outcome in outcomes.items() if outcome.fate in ("returned", "filtered")]
            self._db.executemany("DELETE FROM prompts WHERE run = ? AND number = ?", [(id, n) for n in gone])
            self._db.executemany(
                "UPDATE prompts SET kept = ? WHERE run = ? AND number = ?", [(blob, id, n) for n, blob in kept.items()]
            )
            self._db.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)",
                (id, opened.number, opened.key, stored.memo, body),
            )
            self._db.execute("DELETE FROM answers WHERE run = ? AND round <= ?", (id, opened.number - NUM_ANSWERS))
            self._save(id, run, None, None)
            return run

    def release(self, id: str) -> None:
        """The open round does not run any more: it waits to be repeated or given up.

        Raises: RequestError; here it is let go of all the same.
        """
        self._let_go.add(id)
        with self._transaction():
            self._db.execute("UPDATE runs SET owner = NULL WHERE id = ? AND owner = ?", (id, self.owner.name))

    def give_up(self, id: str, number: int) -> Run:
        """Put the prompts of the open round back. Raises: RequestError (404, 409 while it runs)."""
        with self._transaction():
            stored = self.read(id)
            opened = stored.run.open
            if opened is None or opened.number != number:
                is_open = "none" if opened is None else str(opened.number)
                raise RequestError(
                    f"round {number} of run {id!r} is not open; open: {is_open}. Only an open round can be given up.",
                    status=HTTPStatus.NOT_FOUND,
                )
            self.check_idle(stored)
            stored.run.give_up()
            self._save(id, stored.run, None, None)
            return stored.run

    def answer(self, id: str, key: str) -> StoredAnswer | None:
        """What a round was answered, if that is still kept."""
        with _translated(self.path):
            row = self._db.execute(
                "SELECT memo, body FROM answers WHERE run = ? AND key = ?", (id, key)
            ).fetchone()  # fmt: skip
        return None if row is None else StoredAnswer(row[0], zlib.decompress(row[1]))

    def prompts(self, id: str, numbers: Sequence[int]) -> dict[int, tuple[str, bytes | None]]:
        """Body of waiting prompts, and what is kept of them, by number."""
        wanted = set(numbers)
        with _translated(self.path):
            rows = self._db.execute("SELECT number, body, kept FROM prompts WHERE run = ?", (id,)).fetchall()
        return {number: (body, kept) for number, body, kept in rows if number in wanted}

    def dump(self) -> list[dict[str, Any]]:
        """All runs as JSON, without their answers: an open round is one that was interrupted."""
        with self._transaction():
            runs = []
            for id in self.ids():
                stored = self.read(id)
                rows = self._db.execute("SELECT number, body, kept FROM prompts WHERE run = ? ORDER BY number", (id,))
                runs.append(
                    {
                        "id": id,
                        "created": stored.created,
                        "model": stored.model,
                        "settings": stored.settings,
                        "state": run_to_state(stored.run),
                        "memo": stored.memo,
                        "prompts": [
                            [number, body, None if kept is None else base64.b64encode(kept).decode()]
                            for number, body, kept in rows
                        ],
                    }
                )
            return runs

    @property
    def staged(self) -> str:
        """The file that came with the runs that were put last; empty: none did."""
        with _translated(self.path):
            row = self._db.execute("SELECT name FROM staged").fetchone()
        return "" if row is None else row[0]

    def replace(self, runs: Sequence[Mapping[str, Any]] | None, staged: str = "") -> None:
        """Put dumped runs, which were checked, in place of all there are, unless they are None; with them comes a file.

        Raises: RequestError (409).
        """
        with self._transaction():
            self._db.execute("DELETE FROM staged")
            self._db.execute("INSERT INTO staged VALUES (?)", (staged,))
            if runs is None:
                return
            for id in self.ids():
                self.delete(id)
            for dumped in runs:
                self._db.execute(
                    "INSERT INTO runs (id, created, model, settings, state, memo) VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        dumped["id"],
                        dumped["created"],
                        dumped["model"],
                        json.dumps(dumped["settings"]),
                        json.dumps(dumped["state"]),
                        dumped["memo"],
                    ),
                )
                self._db.executemany(
                    "INSERT INTO prompts (run, number, body, kept) VALUES (?, ?, ?, ?)",
                    [
                        (dumped["id"], number, body, None if kept is None else base64.b64decode(kept))
                        for number, body, kept in dumped["prompts"]
                    ],
                )

    def check_all_idle(self) -> None:
        """Raises: RequestError (409) while a round of any run is running."""
        for id in self.ids():
            self.check_idle(self.read(id))

    def close_files(self) -> None:
        """The server ends."""
        self._db.close()
        self.owner.close()

    def is_live(self, stored: StoredRun) -> bool:
        """Whether a process runs its open round."""
        if stored.owner is None or (stored.owner == self.owner.name and stored.id in self._let_go):
            return False
        return self.owner.is_alive(stored.owner)

    def check_idle(self, stored: StoredRun) -> None:
        """Raises: RequestError (409) while a round of the run is running."""
        if stored.run.open is not None and self.is_live(stored):
            raise RequestError(
                f"round {stored.run.open.number} of run {stored.id!r} is running, under the key "
                f"{stored.run.open.key!r}: a run has one round at a time. Wait for its answer.",
                status=HTTPStatus.CONFLICT,
                retry_after_s=1,
            )

    def _find(self, id: str) -> StoredRun | None:
        with _translated(self.path):
            row = self._db.execute(
                "SELECT id, created, model, settings, state, owner, memo FROM runs WHERE id = ?", (id,)
            ).fetchone()
        if row is None:
            return None
        id, created, model, settings, state, owner, memo = row
        return StoredRun(id, created, model, json.loads(settings), run_from_state(json.loads(state)), owner, memo)

    def _save(self, id: str, run: Run, owner: str | None, memo: str | None) -> None:
        self._db.execute(
            "UPDATE runs SET state = ?, owner = ?, memo = ? WHERE id = ?",
            (json.dumps(run_to_state(run)), owner, memo, id),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing; within another one it is part of that."""
        if self._db.in_transaction:
            yield
            return
        with _translated(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


@contextmanager
def _translated(path: Path | None) -> Iterator[None]:
    """SQLite's errors as what a client can do about them: nothing was changed."""
    try:
        yield
    except RoundError as error:
        status = HTTPStatus.CONFLICT if error.conflict else HTTPStatus.UNPROCESSABLE_ENTITY
        raise RequestError(str(error), status=status, param=error.field) from error
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise RequestError(
                f"the runs' database {path} is locked by another process. Nothing was changed; try again.",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                retry_after_s=1,
            ) from error
        raise _not_written(path, error) from error
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname == "SQLITE_NOTADB":
            raise ValueError(f"{path} is no database of runs. Move it away, or name another folder.") from error
        raise _not_written(path, error) from error


def _not_written(path: Path | None, error: sqlite3.Error) -> RequestError:
    remedy = "Free space" if "full" in str(error) else "Look at its disk"
    return RequestError(
        f"the runs' database {path} cannot be written: {error}. Nothing was changed. {remedy}, then repeat the request "
        "with its idempotency_key.",
        status=HTTPStatus.INSUFFICIENT_STORAGE,
    )


def _other_terms(found: StoredRun, model: str, settings: Mapping[str, Any]) -> str:
    ours, theirs = {"model": found.model, **found.settings}, {"model": model, **settings}
    name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
    return (
        f"run {found.id!r} exists with {name} {ours.get(name)!r:.120}, got {theirs.get(name)!r:.120}. Say the same, or "
        "name another run."
    )
