"""The event loop of a program that has none, which waits for what runs there.

Invariant: when `run` has returned or raised, what it was given has ended. An exception of a signal's handler (Ctrl-C)
cuts nothing in two: no step of the engine, no turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm_rollout.adapter.in_process.interrupts import HeldInterrupts

T = TypeVar("T")


class WaitingLoop:
    """Runs one thing after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`.

        What a signal's handler raises meanwhile comes out of here, when the work has been cancelled and has ended.
        Raises: RuntimeError where an event loop runs already.
        """
        if asyncio._get_running_loop() is not None:
            work.close()
            raise RuntimeError(
                "an event loop runs here already, amid which nothing can wait. Use vllm_rollout.AsyncLLM."
            )
        # The loop does it: a handler may run before there is a task.
        with HeldInterrupts(lambda: self._loop.call_soon_threadsafe(lambda: task.cancel())) as interrupts:
            task = self._loop.create_task(work)
            try:
                return self._loop.run_until_complete(task)
            except asyncio.CancelledError:
                if interrupts.held is None:  # which is raised where the block ends
                    raise
            finally:
                if not task.done():  # an exception came through the loop
                    task.cancel()
                    self._loop.run_until_complete(asyncio.wait({task}))
                if not task.cancelled():
                    task.exception()  # has been seen
