"""Spare candidates for a trainer that asks for one answer per call, and wants exactly as many as it asked for.

As many calls for one prompt as a group has trajectories are a group. When the last of them has come, `redundancy` more
candidates start, and each call gets the next that finishes, whichever call started it: candidates of one prompt are
exchangeable. The engine stops the others in the step in which enough have finished; they reach nobody. Fewer calls
than that, as a validation makes, run as they would without this.

Invariant: every call gets one answer, the best that there is: a finished one, then a truncated one where the engine
counts those, then one that was stopped. No candidate runs on when nobody waits for one.
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
"""How a candidate ended: by itself, at a limit of its length, or given up."""
Launch = Callable[[Mapping[str, Any], int], Awaitable[Answer]]
"""Runs one request with these `extra_args`; 0 for the call's own candidate, otherwise the number of the spare one."""


@dataclass(eq=False)
class _Group(Generic[Answer]):
    key: Hashable
    extra_args: Mapping[str, Any]
    num_calls: int = 0
    waiting: deque[asyncio.Future[Answer]] = field(default_factory=deque)
    running: set[asyncio.Task[Answer]] = field(default_factory=set)
    truncated: deque[asyncio.Task[Answer]] = field(default_factory=deque)
    """For calls that the candidates which run are too few for."""
    stopped: deque[asyncio.Task[Answer]] = field(default_factory=deque)
    """Candidates that were given up or failed: for calls that are left with nothing else."""


class Spares(Generic[Answer]):
    """Groups of calls for the same prompt; of one event loop."""

    def __init__(self, group_size: int, redundancy: int, end_of: Callable[[Answer], End]) -> None:
        if group_size < 1 or redundancy < 0:
            raise ValueError(
                f"group_size must be at least 1 and redundancy at least 0, got {group_size} and {redundancy}."
            )
        self._group_size = group_size
        self._redundancy = redundancy
        self._end_of = end_of
        self._open: dict[Hashable, _Group[Answer]] = {}
        """By prompt, the group that the next call joins."""

    async def answer(self, key: Hashable, launch: Launch[Answer]) -> Answer:
        """One call. `key`: the same for calls whose candidates are exchangeable, that is prompt and sampling."""
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
            if waiter in group.waiting:  # its caller went away
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
        if task.cancelled() and not group.waiting:  # it was not needed any more
            return
        end = "stopped" if task.cancelled() or task.exception() is not None else self._end_of(task.result())
        if end != "finished":
            (group.truncated if end == "truncated" else group.stopped).append(task)
        elif group.waiting:
            _give(group.waiting.popleft(), task)
        self._settle(group)

    def _settle(self, group: _Group[Answer]) -> None:
        while group.truncated and len(group.waiting) > len(group.running):  # too few are left, as the engine has it
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
