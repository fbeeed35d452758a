"""Aborts by name, sent to all API processes of a server.

A rollout that only waits for places has no candidate in an engine core. Only its own process knows of it.

Invariant: each running process hears of every abort, whichever process has taken it. An abort is answered without
waiting for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from vllm_rollout.background import spawn, survived


class AbortBroadcast:
    """The aborts that one API process sends and receives, over one socket per process."""

    def __init__(self, folder: Path, process: int, hear: Callable[[set[str]], None]) -> None:
        """`folder`: the server's own. `process`: number of this process. `hear`: called with the names of each abort,
        also of one that this process has taken."""
        self._folder, self._hear = folder, hear
        self._own = folder / f"aborts{process}.sock"
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Receive aborts of the other processes, as long as the event loop runs."""
        self._server = await asyncio.start_unix_server(self._receive, self._own)

    def send(self, names: set[str]) -> None:
        """Tell all processes that a client aborts the requests with these names."""
        self._hear(names)
        message = msgspec.json.encode(names)
        for socket in self._folder.glob("aborts*.sock"):
            if socket != self._own:
                spawn(_send(socket, message), "abort for another process")

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with survived("abort of another process"):  # one that ends amid its message
            self._hear(msgspec.json.decode(await reader.read(), type=set[str]))
        writer.close()


async def _send(socket: Path, message: bytes) -> None:
    _, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(message)
        await writer.drain()
    finally:
        writer.close()
