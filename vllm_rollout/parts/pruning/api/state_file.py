"""The learned state in files that survive the server.

    learned.state                    {"next": N} in a line, then the whole state as of some moment
    learned.state.head-NUMBER        a head that was put
    learned.state.put-NUMBER-NAME    a state that is being put, in the same format: it replaces the first file once the
                                     database has the state's runs and the name of this file

Heads and states that are put share one count. The state contains everything with a number below N, so a file that a
kill has left beside it is known to be older.

Invariant: a restart finds everything that an answered PUT has put. For a PUT that was not answered it finds all or
nothing. Every file is whole at every moment: a crash during a write leaves the content from before.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import msgspec
from vllm.logger import init_logger

from vllm_rollout.background import spawn, survived
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.http.engine import EngineStopped, RequestError
from vllm_rollout.parts.pruning.api.learning import EngineLearning, Unkept
from vllm_rollout.parts.pruning.calls import PUT_HEAD, HeadToPut
from vllm_rollout.private_file import open_private, private_folder
from vllm_rollout.whole_file import write_whole

logger = init_logger("vllm.vllm_rollout")

LEARNED = "learned.state"
"""File in the folder of --rollout-state with calibration, quality heads and lengths, in the engine's format."""
SAVE_INTERVAL_S = 30.0

MAX_HEADS = 32
"""Files of heads that were put since the last save. At this number, the state is saved before the next head is put."""
MAX_FIRST_LINE_BYTES = 64


class _Contents(msgspec.Struct, forbid_unknown_fields=True):
    """First line of a state on disk."""

    next: int
    """Number of the next head or state that is put."""


class StateFile(Unkept):
    """Loads the state at start. Writes heads and states that are put to disk before the PUT is answered. Saves while
    something is learned (every `SAVE_INTERVAL_S` seconds), and when the server ends.

    Overrides: putting_state, take, putting_head.
    """

    def __init__(self, path: Path, learning: EngineLearning, calls: EngineCalls) -> None:
        self._path = path
        self._learning = learning
        self._lock = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None
        self._saved_all = True
        """True if nothing was learned since the last save began."""
        self._taken = ""
        """File name of the last state that was put."""
        calls.after_change = self._save_soon
        learning.kept = self

    async def load(self, staged: str) -> None:
        """Load state and heads from disk. `staged`: file name of the state that was put with the runs in the database.

        Raises: RuntimeError, which ends the start, for a file of another model or a file that is not ours.
        EngineStopped if the engine dies.
        """
        async with self._alone():
            self._finish(staged)
            for path in self._files("put"):  # their PUTs were never answered
                path.unlink()
            if self._path.exists():
                try:
                    await self._learning.restore_state(await asyncio.to_thread(self._state))
                except EngineStopped:  # the file is not to blame
                    raise
                except RequestError as error:
                    raise RuntimeError(
                        f"--rollout-state {self._path}: {error} Name another file, or remove this one to start anew."
                    ) from error
                logger.info("vllm_rollout: restored what was learned from %s", self._path)
            else:
                logger.info("vllm_rollout: %s does not exist yet; what is learned will be kept there", self._path)
            for path in self._files("head"):
                try:
                    await self._learning.restore_head(PUT_HEAD.decode_argument(path.read_bytes()))
                except EngineStopped:
                    raise
                except (RequestError, msgspec.DecodeError) as error:  # its PUT got the same answer
                    logger.warning("vllm_rollout: the head in %s is not taken: %s", path, error)

    @asynccontextmanager
    async def putting_state(self, state: bytes) -> AsyncIterator[str]:
        async with self._alone():
            number = self._next_number()
            name = f"{self._path.name}.put-{number:06d}-{uuid.uuid4().hex}"
            await self._write_state(name, number + 1, state)
            try:
                yield name
            finally:
                if self._taken != name:
                    self._path.with_name(name).unlink(missing_ok=True)

    async def take(self, staged: str) -> None:
        self._taken = staged
        try:
            self._finish(staged)
        except OSError as error:  # the database has its name: the next start finishes it
            logger.warning("vllm_rollout: %s is not in the place of %s yet: %s", staged, self._path, error)

    @asynccontextmanager
    async def putting_head(self, put: HeadToPut) -> AsyncIterator[None]:
        async with self._alone():
            if len(self._files("head")) >= MAX_HEADS:
                await self._save()
            name = f"{self._path.name}.head-{self._next_number():06d}"
            await self._write(name, PUT_HEAD.encode_argument(put))
            try:
                yield
            except BaseException:
                self._path.with_name(name).unlink()
                raise
        self._save_soon()

    async def save(self) -> None:
        async with self._alone():
            await self._save()

    async def stop(self) -> None:
        """Save when the server ends."""
        if await self._try_to_save():
            logger.info("vllm_rollout: kept what was learned in %s", self._path)

    async def _save(self) -> None:
        state = await self._learning.learning_state()
        await self._write_state(self._path.name, self._next_number(), state)
        self._remove_contained()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Lock the files against other tasks and other API processes."""
        async with self._lock:
            with self._translated():
                private_folder(self._path.parent)
                file = open_private(self._path.with_name(f"{self._path.name}.lock"), os.O_RDWR)
            try:
                await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
                yield
            finally:
                os.close(file)

    def _files(self, kind: Literal["head", "put"]) -> list[Path]:
        """Files of heads, or of states that are being put, in order of their numbers."""
        return sorted(self._path.parent.glob(f"{self._path.name}.{kind}-*"), key=self._number)

    def _number(self, path: Path) -> int:
        """Number of a file. 0 for a file of a version without numbers."""
        digits = path.name.removeprefix(f"{self._path.name}.").split("-")[1]
        return int(digits) if digits.isdecimal() else 0

    def _next_number(self) -> int:
        return max(
            [self._contents(), *(self._number(path) + 1 for path in [*self._files("head"), *self._files("put")])]
        )

    def _contents(self) -> int:
        """The first number that the state does not contain."""
        try:
            with self._path.open("rb") as file:
                return _next_in(file.readline(MAX_FIRST_LINE_BYTES)) or 0
        except FileNotFoundError:
            return 0

    def _state(self) -> bytes:
        with self._path.open("rb") as file:
            if _next_in(file.readline(MAX_FIRST_LINE_BYTES)) is None:
                file.seek(0)
            return file.read()

    def _remove_contained(self) -> None:
        contents = self._contents()
        for path in [*self._files("head"), *self._files("put")]:
            if self._number(path) < contents:
                path.unlink()

    def _finish(self, staged: str) -> None:
        """Let a state that was put replace the saved one, unless the saved one is newer. Removes the files that it
        contains.

        Raises: OSError.
        """
        if staged and (path := self._path.with_name(staged)).exists() and self._number(path) >= self._contents():
            os.replace(path, self._path)
        self._remove_contained()

    async def _write_state(self, name: str, next: int, state: bytes) -> None:
        first = msgspec.json.encode(_Contents(next)) + b"\n"
        await self._write(name, await asyncio.to_thread(first.__add__, state))

    async def _write(self, name: str, data: bytes) -> None:
        """Write a whole file. Raises: RequestError (507)."""
        with self._translated():
            await asyncio.to_thread(write_whole, self._path.with_name(name), data)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestError(
                f"--rollout-state {self._path.parent} cannot be written: {error}. Nothing was changed. Free space or "
                "look at its disk, then send the request again.",
                status=HTTPStatus.INSUFFICIENT_STORAGE,
            ) from error

    def _save_soon(self) -> None:
        """Save now. Later changes are saved at the end of the interval."""
        if self._saving is None or self._saving.done():
            self._saving = spawn(self._save_and_rest(), "learned state on disk")
        else:
            self._saved_all = False

    async def _save_and_rest(self) -> None:
        self._saved_all = False
        while not self._saved_all:
            self._saved_all = True
            with survived("learned state on disk"):
                await self._try_to_save()
            await asyncio.sleep(SAVE_INTERVAL_S)

    async def _try_to_save(self) -> bool:
        """Save, and return False if the disk refuses."""
        try:
            await self.save()
        except (RequestError, OSError) as error:
            logger.warning("vllm_rollout: --rollout-state %s was not written: %s", self._path, error)
            return False
        return True


def _next_in(line: bytes) -> int | None:
    """Number in the first line of a state. None if a version without numbers wrote the state."""
    try:
        return msgspec.json.decode(line, type=_Contents).next
    except msgspec.MsgspecError:
        return None
