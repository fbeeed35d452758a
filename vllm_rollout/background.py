"""Background tasks of an event loop, and the handling of their exceptions.

Invariant: an exception that no task awaits is logged and counted by the task's name. It does not end a loop that is to
go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

Made = TypeVar("Made")
Errors = tuple[type[Exception], ...]

logger = logging.getLogger("vllm.vllm_rollout")

num_errors: Counter[str] = Counter()
"""Exceptions in this process, by the name of a task."""
_HELD: set[asyncio.Task[Any]] = set()
_count: Callable[[str], object] | None = None


def count_with(count: Callable[[str], object]) -> None:
    """Call `count` with a task's name for each of its exceptions from now on. A later call replaces `count`."""
    global _count
    _count = count


def begin(work: Coroutine[Any, Any, Made], among: set[asyncio.Task[Made]] = _HELD) -> asyncio.Task[Made]:
    """Start a task whose owner awaits it, and so gets its exception.

    The task is held until it ends, because the event loop holds it only weakly. `among`: the set in which its owner
    finds it.
    """
    task = asyncio.create_task(work)
    among.add(task)
    task.add_done_callback(among.discard)
    return task


def spawn(work: Coroutine[Any, Any, object], name: str, among: set[asyncio.Task[None]] = _HELD) -> asyncio.Task[None]:
    """Start a task whose result is not needed. Its exceptions are logged and counted."""

    async def run() -> None:
        with survived(name):
            await work

    task = begin(run(), among)
    task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
    return task


@contextmanager
def outside_of_loops() -> Iterator[None]:
    """Let code wait that runs a loop of its own, amid a running one, as in a notebook. The running loop stands still
    meanwhile, as with any code that does not yield."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


@contextmanager
def survived(name: str) -> Iterator[None]:
    """Log and count an exception of one turn of a loop, so that the loop goes on.

    The loop's waiting between two turns stands outside of this context.
    """
    try:
        yield
    except Exception as error:
        _failed(name, error)


async def heard(task: asyncio.Future[Made], name: str, refusals: Errors = ()) -> Made:
    """Await a task that goes on if its caller is cancelled. Then its exception is logged.

    `refusals` are answers, not errors: such an exception is logged as a warning, and not counted.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(_unheard, name, refusals))
        raise


async def to_its_end(work: Coroutine[Any, Any, Made], name: str, refusals: Errors = ()) -> Made:
    """Await work that goes on if its caller is cancelled."""
    return await heard(begin(work), name, refusals)


def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task at most once. A second cancellation would interrupt its cleanup."""
    if not task.cancelling():
        task.cancel()


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait until they have ended. Their exceptions are dropped."""
    tasks = list(tasks)
    for task in tasks:
        cancel(task)
    await asyncio.gather(*tasks, return_exceptions=True)


def _unheard(name: str, refusals: Errors, task: asyncio.Future[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, refusals):
        logger.warning("vllm_rollout: %s, for which nobody waits any more: %.1000s", name, error)
    else:
        _failed(name, error)


def _failed(name: str, error: BaseException) -> None:
    """Count an exception. The first, second, fourth, … exception of a name is logged, as a loop may fail each time."""
    num_errors[name] += 1
    if _count is not None:
        _count(name)
    num = num_errors[name]
    if not num & (num - 1):
        logger.error("vllm_rollout: %s failed, %d times so far", name, num, exc_info=error)
