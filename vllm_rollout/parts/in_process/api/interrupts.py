"""Exceptions of signal handlers (Ctrl-C: KeyboardInterrupt), held back while work runs that must stay whole. Also an
event loop for programs without one, which waits for its work.

Invariant: a handler runs when its signal comes, and only its exception waits. The held exception is raised in the end.
When the loop's `run` has returned or raised, its work has ended. No step of the engine and no turn of the loop is cut
in two.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from vllm_rollout.background import outside_of_loops

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals whose handlers may raise: Ctrl-C, ends, time limits, and signals that clusters send before an end."""
PATIENCE_S = 10.0
"""Seconds after the first exception. A later exception is not held any more, because the work hangs."""


class HeldInterrupts:
    """A block in which no handler raises. Outside the main thread no handler runs, and the block does nothing."""

    def __init__(self, stop: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        """`stop`: ends the block soon. It is called in place of the first exception, within the handler."""
        self.held: BaseException | None = None
        """The last exception that was held."""
        self._stop = stop
        self._clock = clock
        self._handlers: dict[int, Any] = {}
        self._holds = True
        self._first_s: float | None = None

    def __enter__(self) -> HeldInterrupts:
        try:
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:
                    if callable(handler := signal.getsignal(number)):
                        self._handlers[number] = handler
                        signal.signal(number, self._handle)
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()
        if self.held is not None:
            raise self.held

    def _let_go(self) -> None:
        try:
            for number, handler in reversed(self._handlers.items()):  # Ctrl-C waits until the last of them is back
                if signal.getsignal(number) == self._handle:  # otherwise other code has set another handler meanwhile
                    signal.signal(number, handler)
        finally:
            self._holds = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            now_s = self._clock()
            if not self._holds or (self._first_s is not None and now_s - self._first_s > PATIENCE_S):
                raise
            self.held = error
            if self._first_s is None:
                self._first_s = now_s
                self._stop()


class WaitingLoop:
    """Event loop that runs one piece of work after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:  # type: ignore[return]
        """Run `work` and return its result.

        Exceptions of signal handlers are raised here, once the work has been cancelled and has ended. A loop that runs
        already stands still meanwhile.
        """
        # The loop cancels the task: a handler may run before there is a task.
        cancelling = HeldInterrupts(lambda: self._loop.call_soon_threadsafe(lambda: task.cancel()))
        with outside_of_loops(), cancelling as interrupts:
            task = self._loop.create_task(work)
            try:
                return self._loop.run_until_complete(task)
            except asyncio.CancelledError:
                if interrupts.held is None:  # a held exception is raised at the end of the block
                    raise
            finally:
                if not task.done():  # an exception came through the loop
                    task.cancel()
                    self._loop.run_until_complete(asyncio.wait({task}))
                if not task.cancelled():
                    task.exception()  # marks the exception as retrieved
