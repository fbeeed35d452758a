"""Writes of one feed to disk, one after the other.

Invariant: a batch is on disk before it is sent, and before numbers that count it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from vllm_rollout.background import heard, spawn
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.feeds.http.running import AdmittedGroup, KeptOutput
from vllm_rollout.parts.feeds.http.store import BatchToKeep, FeedStore

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="vllm_rollout-feeds")
"""A single thread, so that transactions come one after the other."""


class Kept:
    """The rows of one feed. Without a store nothing is written."""

    def __init__(self, store: FeedStore | None, name: str) -> None:
        self.store, self._name = store, name
        self._batch: BatchToKeep | None = None
        """A batch that is perhaps not on disk yet."""
        self._gone: list[int] = []
        """Prompts that left, and are on disk still. Only the thread has this list and the next one."""
        self._anew: list[int] = []
        """Prompts that begin anew, and whose groups are on disk still."""
        self._newest: Mapping[str, Any] = {}
        """The newest numbers that are to be written soon."""

    async def created(self, created: int, model: str, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        if self.store is not None:
            await _written(partial(self.store.create, self._name, created, model, settings, state))

    async def deleted(self) -> None:
        """Delete the feed. Nothing of it is written after that, because another feed may take its name.

        Raises: RequestError (507): it is as it was.
        """
        if self.store is not None:
            await _written(partial(self.store.delete, self._name))
            self.store = None

    async def put(self, key: str | None, digest: str | None, prompts: Iterable[tuple[int, str]]) -> None:
        """Write prompts, each with its turn. They are made where they are written. `digest`: of all."""
        if self.store is not None:
            await _written(partial(self.store.put, self._name, key, digest, prompts))

    def completed(self, group: AdmittedGroup) -> None:
        """Write a complete group soon. After a kill before that, it runs again."""
        if self.store is not None:
            fields = {**_names(group), "rollout_id": group.rollout_id, **asdict(group.size)}
            self._later(partial(self._write_group, self.store.completed, group, fields, group.json))

    def stopped(self, group: AdmittedGroup, kept: KeptOutput) -> None:
        """Write the output of a stopped group soon. After a kill before that, it goes on with less, or runs again."""
        if self.store is not None:
            fields = {**_names(group), "indices": kept.indices, "num_tokens": kept.num_tokens}
            self._later(partial(self._write_group, self.store.stopped, group, fields, kept.packed))

    def _write_group(
        self, write: Callable[..., None], group: AdmittedGroup, fields: Mapping[str, Any], output: bytes
    ) -> None:
        """Write the newest group of a prompt. Runs on the thread."""
        write(self._name, group.turn, group.born, fields, output)
        if group.turn in self._anew:  # an earlier group of it was to be forgotten
            self._anew.remove(group.turn)

    def left(self, turns: list[int], state: Mapping[str, Any], anew: Sequence[int] = ()) -> None:
        """Forget prompts soon, and keep the feed's numbers. `anew`: prompts that begin anew."""
        if self.store is not None:
            self._newest = state
            self._later(partial(self._write, self.store, turns, state, self._batch, anew, may_skip=True))

    def take(self, batch: BatchToKeep) -> None:
        """Note a batch, which `written` writes, or `left` before that."""
        if self.store is not None:
            self._batch = batch

    async def written(self, state: Mapping[str, Any]) -> None:
        """Write the newest batch if it is not on disk. `state`: the feed's numbers. Raises: RequestError (507)."""
        if self.store is not None and (batch := self._batch) is not None:
            await _written(partial(self._write, self.store, [], state, batch))
            if self._batch is batch:
                self._batch = None

    def _write(
        self,
        store: FeedStore,
        turns: list[int],
        state: Mapping[str, Any],
        batch: BatchToKeep | None,
        anew: Sequence[int] = (),
        *,
        may_skip: bool = False,
    ) -> None:
        """Write numbers together with the batch and the prompts that they count. Runs on the thread. `may_skip`: newer
        numbers may be written in place of these."""
        self._gone += turns
        self._anew += anew
        if may_skip and state is not self._newest:
            return
        if batch is not None and batch.is_written:
            batch = None
        store.left(self._name, self._gone, self._anew, state, batch)
        self._gone.clear()
        self._anew.clear()
        if batch is not None:
            batch.is_written = True

    def _later(self, write: Callable[[], None]) -> None:
        spawn(_heard(_submitted(write)), "a feed on disk")


def _names(group: AdmittedGroup) -> dict[str, Any]:
    return {"born_version": group.born_version, "is_long": group.is_long}


async def _written(write: Callable[[], None]) -> None:
    """Run a transaction, to its end even if the caller goes away."""
    await _heard(_submitted(write))


def _submitted(write: Callable[[], None]) -> asyncio.Future[None]:
    return asyncio.get_running_loop().run_in_executor(_THREAD, write)


async def _heard(work: asyncio.Future[None]) -> None:
    await heard(work, "a feed on disk", refusals=(RequestError,))
