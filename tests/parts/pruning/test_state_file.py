"""The state file: if a PUT is answered, its data is on disk, whole or not at all, whenever the server is killed.

Calls, heads, files and the database are real. Only the model is left out."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.parts.pruning.test_learning_calls import HEAD, Client, Rank, content, learned
from tests.parts.shaping.steps import lengths_of
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.http.engine import EngineStopped, RequestError
from vllm_rollout.parts.pruning.api import state_file
from vllm_rollout.parts.pruning.api.learning import EngineLearning
from vllm_rollout.parts.pruning.api.state_file import LEARNED, MAX_HEADS, StateFile
from vllm_rollout.parts.pruning.calls import PUT_HEAD
from vllm_rollout.parts.pruning.options import PruningOptions
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.rounds.http.store import RUNS, RunStore
from vllm_rollout.parts.rounds.rules.rounds import Run, RunTerms
from vllm_rollout.parts.rounds.rules.rounds_state import run_to_state
from vllm_rollout.parts.shaping.rules.history import ObservedLength

pytestmark = pytest.mark.anyio

TERMS = RunTerms(2, 4)
RUNS_PUT = [{"id": "put", "created": 1, "model": "m", "settings": {}, "memo": None, "keys": [], "prompts": [],
             "state": run_to_state(Run(TERMS))}]  # fmt: skip


class Server:
    """As much of a server as learns and has runs, with --rollout-state."""

    def __init__(self, folder: Path, rank: Rank | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.rank = rank or Rank()
        calls = EngineCalls(Client(self.rank))
        self.engine = EngineLearning(calls, PruningOptions(train_budget_s=10.0))
        self.store = RunStore(folder / RUNS)
        self.file = StateFile(folder / LEARNED, self.engine, calls)
        self.file._save_soon = lambda: None  # nothing but what is put writes by itself

    async def put_state(self, state: bytes) -> None:
        async def keep(staged: str) -> None:
            self.store.replace(RUNS_PUT, staged)

        await self.engine.set_learning_state(state, keep)

    def has(self) -> tuple[Any, ...]:
        return heads_and_lengths(self.rank), [run.id for run in self.store.list()]


def heads_and_lengths(rank: Rank) -> tuple[Any, ...]:
    heads = {key: rank.heads.export(key) for key in rank.heads._heads}
    return heads, lengths_of(rank.judge).to_state()


async def restarted(folder: Path) -> tuple[Any, ...]:
    """Services of a server that starts in this folder."""
    server = Server(folder)
    await server.file.load(server.store.staged)
    return server.has()


@pytest.fixture
def kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folder `tmp_path / "live"` as a kill would have left it, before and after everything that writes into it."""
    left: list[Path] = []
    numbers = count()

    def watched(write: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            copy()
            try:
                return write(*args, **kwargs)
            finally:
                copy()

        return watching

    def copy() -> None:
        left.append(tmp_path / f"kill-{next(numbers)}")
        shutil.copytree(tmp_path / "live", left[-1], ignore=shutil.ignore_patterns("*.owners"))

    for owner, name in ((state_file, "write_whole"), (RunStore, "replace"), (os, "replace"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    monkeypatch.setattr(EngineLearning, "restore_state", watched(EngineLearning.restore_state))
    return left


def a_rank() -> Rank:
    """A rank that has learned something else."""
    rank = Rank()
    lengths_of(rank.judge).observe("id:b", [ObservedLength(7, False), ObservedLength(9, False)])
    return rank


SAVED = learned(1)
STATE, OTHER_STATE, OF_ANOTHER_MODEL = (content(each)[0] for each in (SAVED, learned(3), learned(4, "another")))


async def test_a_state_that_was_put_is_there_after_a_kill_at_any_moment_whole_or_not(tmp_path: Path, kills) -> None:
    server = Server(tmp_path / "live", a_rank())
    await server.file.save()
    await server.engine.set_quality_head(HEAD)  # it must not come back over the state
    before = server.has()
    del kills[:]
    await server.put_state(STATE)
    after = server.has()
    assert after == (heads_and_lengths(SAVED), ["put"]) == await restarted(tmp_path / "live")
    found = [await restarted(folder) for folder in list(kills)]
    assert found[0] == before
    assert all(each in (before, after) for each in found)
    changed = found.index(after)
    assert found[changed:] == [after] * len(found[changed:]), "what was on disk once stays there"


async def refused(folder: Path, put: Callable[[Server], Awaitable[Any]], match: str) -> Server:
    """A server that was asked for this: nothing has changed, on disk neither."""
    server = Server(folder, a_rank())
    await server.file.save()
    before, writes = server.has(), server.store._db.total_changes
    with pytest.raises(RequestError, match=match):
        await put(server)
    assert server.has() == before == await restarted(folder)
    assert server.store._db.total_changes == writes
    return server


@pytest.mark.parametrize(
    "put", [lambda server: server.put_state(STATE), lambda server: server.engine.set_quality_head(HEAD)]
)
async def test_a_disk_that_is_full_leaves_everything_as_it_was(tmp_path: Path, monkeypatch, put) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def put_when_full(server: Server) -> Awaitable[Any]:
        monkeypatch.setattr(state_file, "write_whole", full)
        return put(server)

    await refused(tmp_path / "live", put_when_full, r"cannot be written: .*No space.* Nothing was changed\. Free")


async def test_runs_that_cannot_be_written_leave_everything_as_it_was(tmp_path: Path) -> None:
    async def refuse(staged: str) -> None:
        assert (tmp_path / "live" / staged).exists()
        raise RequestError("the runs' database is locked", status=503)

    await refused(tmp_path / "live", lambda server: server.engine.set_learning_state(STATE, refuse), "is locked")
    assert {path.name for path in (tmp_path / "live").glob("learned*")} == {LEARNED, f"{LEARNED}.lock"}


@pytest.mark.parametrize("state", [OF_ANOTHER_MODEL, STATE[: len(STATE) // 2]], ids=["another model", "cut off"])
async def test_a_state_that_the_engine_refuses_leaves_runs_and_files_alone(tmp_path: Path, state: bytes) -> None:
    said = r"is of model 'another'|not a rollout state"
    await refused(tmp_path / "live", lambda server: server.put_state(state), said)
    (tmp_path / "live" / LEARNED).write_bytes(state)
    with pytest.raises(RuntimeError, match=rf"--rollout-state .*{LEARNED}: .*('another'|not a rollout state)"):
        await restarted(tmp_path / "live")


@pytest.mark.parametrize("asked_last", ["put_state", "put_head"])
async def test_an_engine_that_dies_at_the_start_is_not_blamed_on_the_files(
    tmp_path: Path, monkeypatch, asked_last: str
) -> None:
    server = Server(tmp_path / "live", a_rank())
    await server.file.save()
    await server.engine.set_quality_head(HEAD)
    call = Client._call_utility_async

    async def dies(client: Client, method: str, operation: str, *args: Any, **kwargs: Any) -> bytes:
        if operation == asked_last:
            raise EngineDeadError
        return await call(client, method, operation, *args, **kwargs)

    monkeypatch.setattr(Client, "_call_utility_async", dies)
    with pytest.raises(EngineStopped):
        await restarted(tmp_path / "live")


async def test_a_head_that_was_put_is_there_after_a_kill(tmp_path: Path, kills) -> None:
    server = Server(tmp_path / "live")
    await server.file.save()
    before = server.has()
    del kills[:]
    await server.engine.set_quality_head(HEAD)
    with pytest.raises(RequestError, match="safetensors"):
        await server.engine.set_quality_head(b"garbage")
    after = server.has()
    assert await restarted(tmp_path / "live") == after != before
    found = [await restarted(folder) for folder in list(kills)]
    assert found[0] == before
    assert all(each in (before, after) for each in found)


async def test_a_kill_while_all_is_saved_never_brings_an_older_head_back(tmp_path: Path, kills) -> None:
    server = Server(tmp_path / "live", a_rank())
    await server.file.save()
    for _ in range(2):
        await server.engine.set_quality_head(HEAD)
    before = server.has()
    await server.engine.restore_state(OTHER_STATE)  # as if it had gone on learning
    after = server.has()
    del kills[:]
    await server.file.save()
    found = [await restarted(folder) for folder in list(kills)]
    changed = found.index(after)
    assert found == [before] * changed + [after] * (len(found) - changed)
    assert 0 < changed < len(found) - 2, "it was killed before it removed the heads, too"


async def test_a_state_that_could_not_take_its_place_never_comes_over_a_newer_one(tmp_path: Path, kills) -> None:
    server = Server(tmp_path / "live", a_rank())

    def full(staged: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    server.file._finish = full
    await server.put_state(STATE)
    assert await restarted(tmp_path / "live") == server.has(), "the start has finished it"
    await server.put_state(STATE)
    put = server.has()
    await server.engine.restore_state(OTHER_STATE)
    newer = server.has()
    del kills[:]
    await server.file.save()
    found = [await restarted(folder) for folder in list(kills)]
    changed = found.index(newer)
    assert found == [put] * changed + [newer] * (len(found) - changed)
    assert await restarted(tmp_path / "live") == newer


async def test_what_a_version_without_numbers_has_written_is_read(tmp_path: Path) -> None:
    server = Server(tmp_path, a_rank())
    await server.engine.set_quality_head(HEAD)
    with_head = server.has()
    await server.engine.restore_state(OTHER_STATE)
    (tmp_path / LEARNED).write_bytes(OTHER_STATE)
    await server.engine.restore_head(PUT_HEAD.decode_argument((tmp_path / f"{LEARNED}.head-000000").read_bytes()))
    assert await restarted(tmp_path) == server.has() != with_head
    staged = f"{LEARNED}.put-{'a0' * 16}"
    (tmp_path / staged).write_bytes(STATE)
    server.store.replace(RUNS_PUT, staged)
    (tmp_path / f"{LEARNED}.head-000000").unlink()
    assert await restarted(tmp_path) == (heads_and_lengths(SAVED), ["put"])


async def test_heads_that_are_put_again_and_again_do_not_fill_the_disk(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for _ in range(2 * MAX_HEADS + 1):
        await server.engine.set_quality_head(HEAD)
        assert len(list(tmp_path.glob("*.head-*"))) <= MAX_HEADS
    await server.file.save()
    assert not list(tmp_path.glob("*.head-*"))
    assert await restarted(tmp_path) == server.has()


async def test_of_states_that_are_put_at_once_disk_and_engine_have_the_same(tmp_path: Path) -> None:
    one = Server(tmp_path)
    other = Server(tmp_path, one.rank)  # two API processes of one engine
    states = [STATE, OTHER_STATE]
    await asyncio.gather(*(server.put_state(state) for server in (one, other) for state in states), one.file.save())
    assert await restarted(tmp_path) == one.has()
    assert HeadKey(10) in one.rank.heads._heads


async def test_a_state_that_is_saved_while_another_is_put_does_not_undo_it(tmp_path: Path) -> None:
    server = Server(tmp_path, a_rank())
    saving = asyncio.create_task(server.file.save())
    await asyncio.sleep(0)
    await server.put_state(STATE)
    await saving
    assert await restarted(tmp_path) == server.has() == (heads_and_lengths(SAVED), ["put"])
