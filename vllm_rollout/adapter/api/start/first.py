"""Which API process has sessions and runs, and how the others reach it: over a socket of the server's own folder.

Invariant: vLLM's own server, which listens where clients call, knows nothing of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from vllm_rollout.adapter.api.calls import server_folder
from vllm_rollout.background import spawn, survived
from vllm_rollout.server.first import IDLE_S, FirstProcess

AGAIN_S = 1.0


class Listener:
    """The place where the first process of a server with several is reached."""

    def __init__(self) -> None:
        folder = server_folder.of_this_server()
        assert folder is not None  # `vllm-rollout serve` has made it
        self.socket, self._in_use = folder / "first.sock", folder / "sessions"
        self._serving: asyncio.Task[None] | None = None

    def has_sessions(self) -> None:
        """From now on a request is one's turn if its header says so."""
        self._in_use.touch()

    def serve(self, app: FastAPI) -> None:
        """In the first process: for as long as its loop runs, beside vLLM's server."""
        # Who calls gives idle connections up first. Logs are as vLLM's server sets them.
        config = uvicorn.Config(
            app, uds=str(self.socket), lifespan="off", log_config=None, timeout_keep_alive=int(2 * IDLE_S)
        )
        self._serving = spawn(self._serve(config), "the first process's socket")

    @staticmethod
    async def _serve(config: uvicorn.Config) -> None:
        """Again if it fails: without it the other processes have no sessions and runs."""
        while True:
            with survived("the first process's socket"):
                await _Beside(config).serve()
            await asyncio.sleep(AGAIN_S)

    def from_another(self) -> FirstProcess:
        """In another one."""
        return FirstProcess(self.socket, self._in_use)


class _Beside(uvicorn.Server):
    """Signals are for vLLM's server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
