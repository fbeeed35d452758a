"""Tasks of an event loop beside the one that begins them, and what becomes of their exceptions.

Invariant: an exception that nobody awaits is logged and counted by the task's name, and no loop that is to go on ends
by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

Made = TypeVar("Made")
Errors = tuple[type[Exception], ...]

logger = logging.getLogger("vllm.vllm_rollout")

num_errors: Counter[str] = Counter()
"""Of this process, by the name of a task."""
_HELD: set[asyncio.Task[Any]] = set()
_count: Callable[[str], object] | None = None


def count_with(count: Callable[[str], object]) -> None:
    """From now on `count` is called with a task's name for each of its exceptions. The last call of this counts."""
    global _count
    _count = count


def begin(work: Coroutine[Any, Any, Made], among: set[asyncio.Task[Made]] = _HELD) -> asyncio.Task[Made]:
    """A task whose owner awaits it, and so hears its exception. It is held until it ends, for the event loop holds it
    weakly. `among`: where its owner finds it."""
    task = asyncio.create_task(work)
    among.add(task)
    task.add_done_callback(among.discard)
    return task


def spawn(work: Coroutine[Any, Any, object], name: str, among: set[asyncio.Task[None]] = _HELD) -> asyncio.Task[None]:
    """The same, of one whose result nobody needs: its exceptions are logged and counted."""

    async def run() -> None:
        with survived(name):
            await work

    return begin(run(), among)


@contextmanager
def survived(name: str) -> Iterator[None]:
    """Around one turn of a loop that goes on whatever happens: an exception is logged and counted, and ends here. What
    the loop waits with between two turns stands outside."""
    try:
        yield
    except Exception as error:
        _failed(name, error)


async def heard(task: asyncio.Future[Made], name: str, refusals: Errors = ()) -> Made:
    """Await a task that goes on when the one who waits goes away; then its exception is logged. `refusals` are answers
    and no errors: such a one is a line in the log, and not counted."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(_unheard, name, refusals))
        raise


async def to_its_end(work: Coroutine[Any, Any, Made], name: str, refusals: Errors = ()) -> Made:
    """Await work that goes on when the one who waits for it goes away."""
    return await heard(begin(work), name, refusals)


def _unheard(name: str, refusals: Errors, task: asyncio.Future[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, refusals):
        logger.warning("vllm_rollout: %s, for which nobody waits any more: %.1000s", name, error)
    else:
        _failed(name, error)


def _failed(name: str, error: BaseException) -> None:
    """A loop may fail each time: the first, second, fourth … exception of a name is logged."""
    num_errors[name] += 1
    if _count is not None:
        _count(name)
    num = num_errors[name]
    if not num & (num - 1):
        logger.error("vllm_rollout: %s failed, %d times so far", name, num, exc_info=error)
