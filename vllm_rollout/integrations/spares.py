"""Spare candidates for a trainer that asks for one answer per call and needs exactly as many as it asked for.

`group_size` calls for one prompt form a group. When the last of them arrives, `redundancy` more candidates start. Each
call gets the next candidate that finishes, whichever call started it: candidates of one prompt are exchangeable. The
engine stops the others in the step in which enough have finished, and their output is dropped. If fewer than
`group_size` calls arrive (as in a validation), they run without spare candidates.

Invariant: every call gets one answer, the best available: a finished one, then a truncated one where the engine counts
those, then a stopped one. No candidate runs on once no call waits for an answer.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from vllm_rollout.background import begin

Answer = TypeVar("Answer")
End = Literal["finished", "truncated", "stopped"]
"""End of a candidate: by itself, at a length limit, or stopped by the engine."""
Launch = Callable[[Mapping[str, Any], int], Awaitable[Answer]]
"""Runs one request with these `extra_args`. The number is 0 for the call's own candidate, 1 or more for a spare one."""


@dataclass(eq=False)
class _Group(Generic[Answer]):
    key: Hashable
    extra_args: Mapping[str, Any]
    num_calls: int = 0
    waiting: deque[asyncio.Future[Answer]] = field(default_factory=deque)
    running: set[asyncio.Task[Answer]] = field(default_factory=set)
    truncated: deque[asyncio.Task[Answer]] = field(default_factory=deque)
    """Truncated candidates. They answer calls once more calls wait than candidates run."""
    stopped: deque[asyncio.Task[Answer]] = field(default_factory=deque)
    """Stopped and failed candidates. They answer calls once no candidate runs."""


class Spares(Generic[Answer]):
    """Groups of calls for the same prompt. Use from one event loop only."""

    def __init__(self, group_size: int, redundancy: int, end_of: Callable[[Answer], End]) -> None:
        if group_size < 1 or redundancy < 0:
            raise ValueError(
                f"group_size must be at least 1 and redundancy at least 0, got {group_size} and {redundancy}."
            )
        self._group_size = group_size
        self._redundancy = redundancy
        self._end_of = end_of
        self._open: dict[Hashable, _Group[Answer]] = {}
        """Groups that the next call joins, by `key`."""

    async def answer(self, key: Hashable, launch: Launch[Answer]) -> Answer:
        """Return the answer for one call.

        `key`: equal for calls whose candidates are exchangeable (same prompt and sampling). Raises: the error of a
        failed candidate if no other answer is left.
        """
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Group(key, self._extra_args())
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        group.waiting.append(waiter)
        group.num_calls += 1
        self._start(group, launch, 0)
        if group.num_calls == self._group_size:
            del self._open[key]
            for number in range(self._redundancy):
                self._start(group, launch, number + 1)
        try:
            return await waiter
        finally:
            if waiter in group.waiting:  # the call was cancelled
                group.waiting.remove(waiter)
                self._settle(group)

    def _extra_args(self) -> dict[str, Any]:
        return {
            "rollout_group_id": uuid.uuid4().hex,
            "rollout_group_size": self._group_size,
            "rollout_num_candidates": self._group_size + self._redundancy,
        }

    def _start(self, group: _Group[Answer], launch: Launch[Answer], number: int) -> None:
        task = begin(launch(group.extra_args, number), group.running)
        task.add_done_callback(lambda task: self._ended(group, task))

    def _ended(self, group: _Group[Answer], task: asyncio.Task[Answer]) -> None:
        group.running.discard(task)
        if task.cancelled() and not group.waiting:  # it is not needed any more
            return
        end = "stopped" if task.cancelled() or task.exception() is not None else self._end_of(task.result())
        if end != "finished":
            (group.truncated if end == "truncated" else group.stopped).append(task)
        elif group.waiting:
            _give(group.waiting.popleft(), task)
        self._settle(group)

    def _settle(self, group: _Group[Answer]) -> None:
        while group.truncated and len(group.waiting) > len(group.running):  # too few candidates are left
            _give(group.waiting.popleft(), group.truncated.popleft())
        while group.stopped and group.waiting and not group.running:
            _give(group.waiting.popleft(), group.stopped.popleft())
        if not group.waiting:
            if self._open.get(group.key) is group:
                del self._open[group.key]
            for task in group.running:
                task.cancel()


def _give(waiter: asyncio.Future[Answer], task: asyncio.Task[Answer]) -> None:
    if waiter.cancelled():
        return
    if task.cancelled():
        waiter.set_exception(RuntimeError("the request was cancelled by whoever sent it"))
    elif (error := task.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(task.result())
