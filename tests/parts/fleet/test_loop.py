"""Async code that a sync client runs in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.waiting import WAIT_S, wait_until
from vllm_rollout.kernel.client.blocking import _items
from vllm_rollout.parts.fleet.loop import LoopThread


def test_an_interrupt_is_raised_once_what_it_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C in a loop over a stream, whose connection takes a while to close."""
    waits, events = threading.Event(), []

    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 1
            waits.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            events.append("closed")

    result, num_calls = Future.result, 0

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            assert waits.wait(WAIT_S)
            raise KeyboardInterrupt
        return result(future, timeout)

    monkeypatch.setattr(Future, "result", interrupted)
    thread = LoopThread()
    items = _items(source(), thread.finished)
    assert next(items) == 1
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert events == ["closed"]
    thread.close()
    wait_until(lambda: not thread._thread.is_alive())
