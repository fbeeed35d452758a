"""The first of several API processes, which the other processes reach over a socket in the server's own folder
(`parts/front_ends/http/first.py`).

Invariant: vLLM's own server, which listens to clients, does not know of this socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from vllm_rollout.background import spawn, survived
from vllm_rollout.kernel.api import server_folder
from vllm_rollout.parts.front_ends.http.first import IDLE_S, FirstProcess

AGAIN_S = 1.0


class Listener:
    """Socket of the first API process, for the other processes of the server."""

    def __init__(self) -> None:
        folder = server_folder.of_this_server()
        assert folder is not None  # `vllm-rollout serve` has made it
        self.folder, self.socket = folder, folder / "first.sock"
        self._serving: asyncio.Task[None] | None = None

    def serve(self, app: FastAPI) -> None:
        """Serve the app on the socket, in the first process, as long as its event loop runs."""
        # Clients give idle connections up first. Logs are as vLLM's server sets them.
        config = uvicorn.Config(
            app, uds=str(self.socket), lifespan="off", log_config=None, timeout_keep_alive=int(2 * IDLE_S)
        )
        self._serving = spawn(self._serve(config), "the first process's socket")

    @staticmethod
    async def _serve(config: uvicorn.Config) -> None:
        """Run the server on the socket. If it fails it starts again: without it other processes have no sessions and
        runs.
        """
        while True:
            with survived("the first process's socket"):
                await _Beside(config).serve()
            await asyncio.sleep(AGAIN_S)

    def from_another(self) -> FirstProcess:
        """Client of the socket, for another process."""
        return FirstProcess(self.socket, server_folder.sessions_mark())


class _Beside(uvicorn.Server):
    """Server without signal handlers. Signals are handled by vLLM's server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
