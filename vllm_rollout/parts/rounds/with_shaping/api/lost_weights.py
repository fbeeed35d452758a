"""Handling of weights that a trainer has sent and that a rebuild of the engine has lost.

Invariant: no rollout begins on the model's own weights in place of the lost ones.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from vllm_rollout.kernel.api.client import UNNAMED_WEIGHTS, RolloutAsyncLLM

PATIENCE_S = 30.0
"""Seconds for which a rollout waits for a trainer to send weights again."""
LOOK_S = 0.1


class LostWeights:
    """Weight version before the engine was rebuilt, until weights are sent again."""

    def __init__(self, client: RolloutAsyncLLM) -> None:
        self._client = client
        self.version: str | None = None
        """None: no weights are missing."""
        client.before_rollouts = self.found

    async def found(self) -> None:
        """Wait until the engine has weights of any named version. Returns at once if none were lost.

        Raises: GracefulHTTPError (409) after `PATIENCE_S` seconds.
        """
        deadline = None
        while self.version is not None:
            version = await self._client.get_weight_version()  # it waits for an engine that is being rebuilt
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
