"""Weights that a trainer has sent are gone when the engine is rebuilt.

Invariant: no rollout begins on the model's own weights in place of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

UNNAMED_WEIGHTS = "default"
"""vLLM's weight version until somebody says one."""
PATIENCE_S = 30.0
"""A rollout waits this long for a trainer to send them again."""
LOOK_S = 0.1


class LostWeights:
    """What the engine had before it was rebuilt, until somebody sends weights again."""

    version: str | None = None
    """None: nothing is missing."""

    async def found(self, current_version: Callable[[], Awaitable[str]]) -> None:
        """Return when weights of any version are there again; at once when none were lost.

        Raises: GracefulHTTPError (409) after `PATIENCE_S`.
        """
        deadline = None
        while self.version is not None:
            version = await current_version()  # it waits for an engine that is being rebuilt
            deadline = deadline or time.monotonic() + PATIENCE_S
            if version != UNNAMED_WEIGHTS:
                self.version = None
            elif time.monotonic() >= deadline:
                raise GracefulHTTPError(
                    "the engine was rebuilt at another tensor-parallel size, and has the model's own weights in place "
                    f"of version {self.version!r}. Send the weights again with a version, then repeat.",
                    HTTPStatus.CONFLICT,
                )
            else:
                await asyncio.sleep(LOOK_S)
