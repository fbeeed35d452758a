"""Runs on disk, in SQLite. Invariant: each method is one transaction, which is done completely or not at all.

Calls block, so `RunService` makes them on a thread. Without a folder the database is in memory and ends with the
server.
"""

from __future__ import annotations

import base64
import json
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any, Literal

from vllm_rollout.kernel.http.clients import id_of, owned_name
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.rounds.http.faults import is_damage, translated
from vllm_rollout.parts.rounds.http.owner import Owner
from vllm_rollout.parts.rounds.http.request import over_just_now
from vllm_rollout.parts.rounds.http.stored import (
    EndedGroup,
    Looked,
    PlannedRound,
    StoredAnswer,
    StoredRun,
    UnreadableRun,
    UsedKey,
    read_run,
)
from vllm_rollout.parts.rounds.rules.rounds import EntryOutcome, OpenRound, Run, RunTerms
from vllm_rollout.parts.rounds.rules.rounds_state import run_to_state
from vllm_rollout.private_database import give_unowned, open_database

logger = logging.getLogger("vllm.vllm_rollout")

RUNS = "runs.sqlite"
"""File in the folder of --rollout-state."""
FORMAT = 2
MAX_RUNS = 4096
MAX_WAITING_BYTES = 512 * 1024 * 1024
"""Most bytes of prompts that wait in runs, with their kept output. A saved state contains all of them."""
NUM_ANSWERS = 2
"""Number of newest answers that are kept of a run. A client that asks for a new round has read the one before."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, model TEXT NOT NULL, settings TEXT NOT NULL, state TEXT NOT NULL,
    owner TEXT, memo TEXT
);
CREATE TABLE IF NOT EXISTS prompts (
    run TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, kept BLOB, PRIMARY KEY (run, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS staged (name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS keys (
    run TEXT NOT NULL, key TEXT NOT NULL, round INTEGER NOT NULL, given_up INTEGER NOT NULL, PRIMARY KEY (run, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (
    run TEXT NOT NULL, number INTEGER NOT NULL, version TEXT, body BLOB NOT NULL, PRIMARY KEY (run, number)
);
CREATE TABLE IF NOT EXISTS weights (run TEXT PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    run TEXT NOT NULL, round INTEGER NOT NULL, key TEXT NOT NULL, memo TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (run, round)
);
"""
TABLES = ("runs", "prompts", "keys", "answers", "ended", "weights")
_IS_OF = "(typeof({0}) <> 'text' OR substr({0}, 1, instr({0}, '/')) = ?)"
"""SQL condition for runs of one namespace, with which their names begin."""
# runs.id, and `run` of the others, are as of `owned_name`.
# runs.owner and runs.memo belong to the open round: the process that runs it, and its request (`RoundRequest.memo`).
# An owner is a process and a number, "NAME.7". Taking a round up again makes a new owner, even in the same process. So
# a late write of an earlier owner finds that the round is not its own any more.
# keys has every key under which a round ever began: a key that comes again after years begins no new round.
# weights has the name of the weights under which a run's newest round began.
# staged names the file of everything learned that belongs to the runs that were restored last.


def _column(table: str) -> str:
    """The column that has a run's name."""
    return "id" if table == "runs" else "run"


class RunStore:
    """All runs of one server."""

    def __init__(self, path: Path | None = None, *, keyless: str = "") -> None:
        """`keyless`: the namespace that gets runs which were made without a key. Empty: these runs stay without one.

        Raises: ValueError for a database of another version, RequestError for a file that is no database, is locked or
        cannot be written, OSError.
        """
        self.path = path
        self.owner = Owner(None if path is None else path.with_name(f"{path.name}.owners"))
        self._turns = count()
        """Numbers for the rounds that this process begins or takes up."""
        self._let_go: set[str] = set()
        """Owners whose round no longer runs, if that could not be written yet."""
        with translated(path):
            self._db = open_database(path, FORMAT)
            # Text that is not UTF-8 fails where it is read as JSON, and not in queries over other rows.
            self._db.text_factory = lambda text: text.decode(errors="surrogateescape")
            with self._transaction():
                for statement in SCHEMA.split(";"):
                    self._db.execute(statement)
                if keyless:
                    give_unowned(self._db, {table: _column(table) for table in reversed(TABLES)}, keyless)
                self._db.execute(f"PRAGMA user_version = {FORMAT}")

    @property
    def is_durable(self) -> bool:
        """True if runs survive the server."""
        return self.path is not None

    def create(self, id: str, model: str, settings: Mapping[str, Any], terms: RunTerms) -> tuple[StoredRun, bool]:
        """Create a run. Returns it and True, or an existing run on the same terms and False.

        Raises: RequestError (409) for other terms, or too many runs.
        """
        with self._transaction():
            found = self._find(id)
            if found is None:
                if self._db.execute("SELECT COUNT(*) FROM runs").fetchone()[0] >= MAX_RUNS:
                    raise RequestError(
                        f"this server keeps {MAX_RUNS} runs, and has as many. DELETE one that is over.",
                        status=HTTPStatus.CONFLICT,
                    )
                self._db.execute(
                    "INSERT INTO runs (id, created, model, settings, state) VALUES (?, ?, ?, ?, ?)",
                    (id, int(time.time()), model, json.dumps(settings), json.dumps(run_to_state(Run(terms)))),
                )
                return self.read(id), True
            found = self.read(id)
            if found.model != model or found.settings != settings:
                raise RequestError(_other_terms(found, model, settings), status=HTTPStatus.CONFLICT, param="id")
            return found, False

    def read(self, id: str) -> StoredRun:
        """A run. Raises: RequestError (404), UnreadableRun."""
        with self._transaction("DEFERRED"):
            found = self._known(id)
        if isinstance(found, UnreadableRun):
            raise found
        return found

    def list(self, namespace: str = "") -> list[StoredRun | UnreadableRun]:
        """Runs of one namespace, oldest first. A run whose name cannot be read is listed in every namespace."""
        with self._transaction("DEFERRED"):
            wanted = f"SELECT id FROM runs WHERE {_IS_OF.format('id')} ORDER BY created, id"
            return [self._listed(id) for (id,) in self._db.execute(wanted, (owned_name(namespace, ""),)).fetchall()]

    def delete(self, id: str) -> None:
        """Delete a run, even one that cannot be read. Raises: RequestError (404, or 409 while a round of it runs)."""
        with self._transaction():
            self._check_idle(self._known(id))
            for table in TABLES:
                self._db.execute(f"DELETE FROM {table} WHERE {_column(table)} = ?", (id,))

    def look(self, id: str, key: str) -> Looked:
        """A run, and the state of a key. Raises: RequestError (404), UnreadableRun."""
        with self._transaction("DEFERRED"):
            stored = self.read(id)
            answers = self._db.execute("SELECT key, memo, body FROM answers WHERE run = ? ORDER BY round", (id,))
            answer, answered = None, []
            for answered_key, memo, body in answers:
                if answered_key == key:
                    answer = _read_answer(memo, body)
                answered.append(answered_key)
            return Looked(stored, answer, self._used(id, key), answered)

    def see_weights(self, id: str, name: str | None) -> None:
        """Note the name of the weights for a round that begins next.

        Raises: RequestError (412) if they have none, and those of the round before had one.
        """
        with self._transaction():
            (before,) = self._db.execute("SELECT name FROM weights WHERE run = ?", (id,)).fetchone() or (None,)
            if name is None and before is not None:
                raise RequestError(
                    f"the weights have no name, and the round before began under {before!r}: the server has started "
                    "anew, with the weights of its model. Give it the newest weights under a name, then repeat the "
                    "round with its idempotency_key.",
                    status=HTTPStatus.PRECONDITION_FAILED,
                )
            if name != before:
                self._db.execute("REPLACE INTO weights VALUES (?, ?)", (id, name))

    def planned(self, id: str, plan: Callable[[Run], OpenRound]) -> PlannedRound:
        """Plan a round. Nothing changes. Raises: RequestError, as `begin` does."""
        with self._transaction("DEFERRED"):
            stored = self.read(id)
            self._check_idle(stored)
            opened = plan(stored.run)
            numbers = {entry.number for entry in opened.all_entries}
            rows = self._db.execute("SELECT number, body, kept FROM prompts WHERE run = ?", (id,))
            waiting = {number: (body, kept) for number, body, kept in rows if number in numbers}
            rows = self._db.execute("SELECT number, version, body FROM ended WHERE run = ?", (id,))
            return PlannedRound(stored, opened, waiting, {number: EndedGroup(*row) for number, *row in rows})

    def begin(
        self, id: str, memo: str, plan: Callable[[Run], OpenRound], prompts: Mapping[str, str], planned: OpenRound
    ) -> str:
        """Take the prompts of a round before anything of it runs. Returns the owner of the round.

        Args:
            plan: makes the round from the run as it is now. Raises: RoundError.
            prompts: bodies of fresh prompts, by id.
            planned: the round as it was checked.

        Raises: RequestError (409) if the run has changed since, or the key has been used.
        """
        with self._transaction():
            stored = self.read(id)
            self._check_idle(stored)
            if self._used(id, planned.key) is not None:
                raise over_just_now(id_of(id), planned.key)
            run = stored.run
            opened = plan(run)
            if opened != planned:
                raise RequestError(
                    f"run {id_of(id)!r} has changed while this round was checked: another round of it was over. Look "
                    "at its num_fresh_prompts, and send the round again.",
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
            self._db.execute("INSERT INTO keys VALUES (?, ?, ?, 0)", (id, opened.key, opened.number))
            owner = self._new_owner()
            self._save(id, run, owner, memo)
            return owner

    def _check_room(self, bodies: Collection[str]) -> None:
        """Check that there is space for more prompts. Raises: RequestError (507) if there is not."""
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

    def claim(self, id: str, opened: OpenRound) -> str:
        """Take the open round, to run it anew. Returns its owner. Raises: RequestError (409) while it runs, here or
        elsewhere."""
        with self._transaction():
            stored = self.read(id)
            if stored.run.open != opened:
                raise over_just_now(id_of(id), opened.key)
            self._check_idle(stored)
            owner = self._new_owner()
            self._save(id, stored.run, owner, stored.memo)
            return owner

    def keep_ended(self, id: str, owner: str, groups: Mapping[int, EndedGroup]) -> None:
        """Write finished groups of the open round, by number. Does nothing if the round has another owner now."""
        with self._transaction():
            (now,) = self._db.execute("SELECT owner FROM runs WHERE id = ?", (id,)).fetchone() or (None,)
            if now == owner:
                rows = [(id, number, *group) for number, group in groups.items()]
                self._db.executemany("INSERT OR REPLACE INTO ended VALUES (?, ?, ?, ?)", rows)

    def close(
        self,
        id: str,
        owner: str,
        outcomes: Mapping[int, EntryOutcome],
        answer: Callable[[Run], bytes],
        *,
        kept: Mapping[int, bytes],
        **told: Any,
    ) -> Run:
        """Close the open round. Returns the run after it.

        Args:
            owner: as `begin` or `claim` returned it.
            outcomes, told: as of `Run.close`.
            answer: makes the round's answer from the run after it.
            kept: output of deferred prompts, by number.

        Raises: RequestError (409) if the round has another owner now.
        """
        with self._transaction():
            stored = self.read(id)
            opened, run = stored.run.open, stored.run
            if stored.owner != owner or opened is None:
                raise RequestError(
                    f"the round of run {id_of(id)!r} that ran here is not this process's any more: another one has "
                    "taken it, and what came of it here counts for nothing. Repeat its key for its answer.",
                    status=HTTPStatus.CONFLICT,
                    retry_after_s=1,
                )
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
            self._db.execute("DELETE FROM ended WHERE run = ?", (id,))
            self._save(id, run, None, None)
            return run

    def release(self, id: str, owner: str) -> None:
        """Release a round that no longer runs, unless it is over. It then waits to be repeated or given up.

        Raises: RequestError. In this process the round is released all the same.
        """
        self._let_go.add(owner)
        with self._transaction():
            self._db.execute("UPDATE runs SET owner = NULL WHERE id = ? AND owner = ?", (id, owner))
        self._let_go.discard(owner)

    def give_up(self, id: str, number: int) -> StoredRun:
        """Put the prompts of the open round back. Raises: RequestError (404, or 409 while it runs)."""
        with self._transaction():
            stored = self.read(id)
            opened = stored.run.open
            if opened is None or opened.number != number:
                is_open = "none" if opened is None else str(opened.number)
                raise RequestError(
                    f"round {number} of run {id_of(id)!r} is not open; open: {is_open}. Only an open round can be "
                    "given up.",
                    status=HTTPStatus.NOT_FOUND,
                )
            self._check_idle(stored)
            stored.run.give_up()
            self._db.execute("DELETE FROM ended WHERE run = ?", (id,))
            self._db.execute("UPDATE keys SET given_up = 1 WHERE run = ? AND key = ?", (id, opened.key))
            self._save(id, stored.run, None, None)
            return self.read(id)

    def dump(self, namespace: str = "") -> Sequence[dict[str, Any]]:
        """All readable runs of one namespace as JSON, without their answers. An open round is saved as interrupted."""
        with self._transaction("DEFERRED"):
            runs = []
            for stored in self.list(namespace):
                if isinstance(stored, UnreadableRun):
                    logger.error("a saved state goes without it: %s", stored)
                    continue
                of_run = (stored.name,)
                rows = self._db.execute("SELECT number, body, kept FROM prompts WHERE run = ? ORDER BY number", of_run)
                keys = self._db.execute("SELECT key, round, given_up FROM keys WHERE run = ? ORDER BY round", of_run)
                runs.append(
                    {name: getattr(stored, name) for name in ("id", "created", "model", "settings", "memo")}
                    | {
                        "state": run_to_state(stored.run),
                        "keys": [list(row) for row in keys],
                        "prompts": [
                            [number, body, None if kept is None else base64.b64encode(kept).decode()]
                            for number, body, kept in rows
                        ],
                    }
                )
            return runs

    @property
    def staged(self) -> str:
        """Name of the file that came with the runs that were restored last. Empty if there was none."""
        with translated(self.path):
            row = self._db.execute("SELECT name FROM staged").fetchone()
        return "" if row is None else row[0]

    def replace(self, runs: Sequence[Mapping[str, Any]], staged: str = "", namespace: str = "") -> None:
        """Replace all runs of a namespace by dumped and checked ones. `staged`: name of the file that comes with
        them.

        Raises: RequestError (409) while a round runs.
        """
        with self._transaction():
            self._db.execute("DELETE FROM staged")
            self._db.execute("INSERT INTO staged VALUES (?)", (staged,))
            self.check_all_idle(namespace)
            for table in TABLES:
                self._db.execute(
                    f"DELETE FROM {table} WHERE {_IS_OF.format(_column(table))}", (owned_name(namespace, ""),)
                )
            for dumped in runs:
                id = owned_name(namespace, dumped["id"])
                self._db.execute(
                    "INSERT INTO runs (id, created, model, settings, state, memo) "
                    "VALUES (:id, :created, :model, :settings, :state, :memo)",
                    {
                        **dumped,
                        "id": id,
                        "settings": json.dumps(dumped["settings"]),
                        "state": json.dumps(dumped["state"]),
                    },
                )
                self._db.executemany("INSERT INTO keys VALUES (?, ?, ?, ?)", [(id, *row) for row in dumped["keys"]])
                self._db.executemany(
                    "INSERT INTO prompts (run, number, body, kept) VALUES (?, ?, ?, ?)",
                    [
                        (id, number, body, None if kept is None else base64.b64decode(kept))
                        for number, body, kept in dumped["prompts"]
                    ],
                )

    def check_all_idle(self, namespace: str = "") -> None:
        """Check that no round of any run of a namespace is running. Raises: RequestError (409)."""
        for found in self.list(namespace):
            self._check_idle(found)

    def is_live(self, found: StoredRun | UnreadableRun) -> bool:
        """True if a process runs the open round."""
        if found.owner is None or found.owner in self._let_go:
            return False
        return self.owner.is_alive(found.owner.partition(".")[0])

    def _check_idle(self, found: StoredRun | UnreadableRun) -> None:
        """Check that no round of the run is running. Raises: RequestError (409)."""
        if not self.is_live(found):
            return
        opened = found.run.open if isinstance(found, StoredRun) else None
        which = "a round" if opened is None else f"round {opened.number}"
        key = "" if opened is None else f", under the key {opened.key!r}"
        raise RequestError(
            f"{which} of run {found.id!r} is running{key}: a run has one round at a time. Wait for its answer.",
            status=HTTPStatus.CONFLICT,
            retry_after_s=1,
        )

    def _new_owner(self) -> str:
        return f"{self.owner.name}.{next(self._turns)}"

    def _listed(self, id: str) -> StoredRun | UnreadableRun:
        try:
            return self._known(id)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return UnreadableRun(id, error)  # its pages are damaged, and pages of other runs may be whole

    def _known(self, id: str) -> StoredRun | UnreadableRun:
        """A run, readable or not. Raises: RequestError (404)."""
        found = self._find(id)
        if found is None:
            raise RequestError(
                f"run {id_of(id)!r} is not known here as one of yours. GET /v1/runs lists those of your API key; "
                "POST /v1/runs makes one.",
                status=HTTPStatus.NOT_FOUND,
            )
        return found

    def _find(self, id: str) -> StoredRun | UnreadableRun | None:
        row = self._db.execute(
            "SELECT id, created, model, settings, state, owner, memo FROM runs WHERE id IS ?", (id,)
        ).fetchone()
        return None if row is None else read_run(row)

    def _used(self, id: str, key: str) -> UsedKey | None:
        row = self._db.execute("SELECT round, given_up FROM keys WHERE run = ? AND key = ?", (id, key)).fetchone()
        return None if row is None else UsedKey(row[0], bool(row[1]))

    def _save(self, id: str, run: Run, owner: str | None, memo: str | None) -> None:
        self._db.execute(
            "UPDATE runs SET state = ?, owner = ?, memo = ? WHERE id = ?",
            (json.dumps(run_to_state(run)), owner, memo, id),
        )

    @contextmanager
    def _transaction(self, kind: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE") -> Iterator[None]:
        """Do all of a block or nothing, on the database at one moment. Within another transaction it is part of
        that.

        A transaction that only reads is DEFERRED, and waits for nothing.
        """
        if self._db.in_transaction:
            yield
            return
        with translated(self.path):
            self._db.execute(f"BEGIN {kind}")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


def _read_answer(memo: str, body: bytes) -> StoredAnswer | None:
    """A stored answer. None if it cannot be read, as if it were no longer kept."""
    try:
        return StoredAnswer(memo, zlib.decompress(body))
    except (zlib.error, TypeError):
        return None


def _other_terms(found: StoredRun, model: str, settings: Mapping[str, Any]) -> str:
    ours, theirs = {"model": found.model, **found.settings}, {"model": model, **settings}
    name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
    return (
        f"run {found.id!r} exists with {name} {ours.get(name)!r:.120}, got {theirs.get(name)!r:.120}. Say the same, or "
        "name another run."
    )
