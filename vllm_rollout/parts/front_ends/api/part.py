"""The part in each of several API processes, which answer as one server."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import Scope
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

from vllm_rollout.background import spawn
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.open_paths import has_key
from vllm_rollout.kernel.http.clients import path_of
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.parts.front_ends.api.abort_broadcast import AbortBroadcast
from vllm_rollout.parts.front_ends.api.listener import Listener
from vllm_rollout.parts.front_ends.http.first import HandOn


class FrontEndsApi(ApiPart):
    """Overrides: start, serve. Does nothing in a server with one API process."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._client = engine.client
        self._abort_here: Callable[[set[str]], None] = lambda names: None

    async def start(self, settings: Namespace) -> None:
        if self._client.num_api_processes > 1:
            self._listener = Listener()
            index = self._client.client_index
            self._aborts = AbortBroadcast(self._listener.folder, index, self._heard)
            await self._aborts.listen()

    def _heard(self, names: set[str]) -> None:
        """A client has aborted the requests with these names, in this process or another one."""
        self._abort_here(names)
        if self._client.routes.any_moves:  # no engine core has such a group now
            spawn(self._client.abort_groups(names), "abort of groups that move")

    def serve(self, app: FastAPI) -> None:
        if self._client.num_api_processes == 1:
            return
        self._abort_here, self._client.when_aborted = self._client.when_aborted, self._aborts.send
        if self._client.client_index == 0:
            self._listener.serve(app)
        else:
            # Around all middleware: a request for another process passes that process's middleware.
            own = app.middleware_stack or app.build_middleware_stack()
            app.middleware_stack = HandOn(own, self._listener.from_another(), partial(lacks_key, app))


def lacks_key(app: Starlette, scope: Scope) -> bool:
    """True if vLLM refuses a request because it lacks --api-key."""
    is_guarded = scope["method"] != "OPTIONS" and path_of(scope).startswith(GUARDED_PREFIX)
    return is_guarded and not has_key(app, Headers(scope=scope))
