"""The port of parts in the API process: the face `api`.

The engine makes one object of each part, in the order of the list, and passes itself. Parts find each other by class
(`Engine.part`).

    start     before the first request, with the flags
    take_up   in the first API process: take up what an earlier server has kept
    serve     once there is a service of rollouts
    stop      when the server ends, with --rollout-state
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI

from vllm_rollout.kernel.http.engine import CoreCalls, GroupOrder


class ApiPart:
    """A part in the API process."""

    staged = ""
    """Name of the state that was put last, as this part has kept it. Empty if it keeps no such name."""

    def __init__(self, engine: Any) -> None:
        """`engine`: the process's `VLLMEngine`. Parts that this one needs are there."""

    @property
    def is_busy(self) -> bool:
        """True while several calls belong together: an engine must get all of them or none."""
        return False

    async def start(self, settings: Namespace) -> None:
        """Called once. `settings`: our flags. Raises: RuntimeError, which ends the start of the server."""

    async def take_up(self, staged: str) -> None:
        """Take up what is kept in the folder of --rollout-state. `staged`: of another part.

        Raises: RuntimeError, which ends the start of the server.
        """

    def serve(self, app: FastAPI) -> None:
        """Put the part's services where routes look for them. `app.state.rollout_service` is there."""

    async def stop(self) -> None:
        """Keep what must outlive the server. The engine still answers."""

    async def settled(self) -> None:
        """Wait until no background work of the part runs."""

    def group_begins(self, order: GroupOrder) -> None:
        """Called before the candidates of a group are launched."""

    async def take(self, calls: CoreCalls) -> Any:
        """Knowledge of the engine behind these calls that the next engine needs, too."""

    async def put(self, calls: CoreCalls, taken: Any) -> None:
        """Let another engine know what was taken."""
