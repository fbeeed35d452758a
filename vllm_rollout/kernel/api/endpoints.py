"""Endpoint plugin: our routes on vLLM's app. A part adds middleware and other routes by its face `app`: a function.

Invariant: vLLM loads it only if VLLM_PLUGINS names us.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State

from vllm_rollout.adapter import PLUGIN


class RolloutEndpoints:
    """Our endpoint plugin, named by the entry point `vllm.endpoint_plugins`."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from vllm_rollout.kernel.api.open_paths import OpenPaths
        from vllm_rollout.kernel.api.refusals import refuse_our_fields_in_beam_search
        from vllm_rollout.kernel.http.clients import ClientNamespaces
        from vllm_rollout.kernel.http.gauges import FreshGauges
        from vllm_rollout.kernel.http.misplaced import MisplacedFields
        from vllm_rollout.kernel.http.origins import OwnPages
        from vllm_rollout.kernel.http.routes import router
        from vllm_rollout.kernel.parts import faces

        refuse_our_fields_in_beam_search()
        app.include_router(router)
        app.add_middleware(MisplacedFields)
        app.add_middleware(OpenPaths)
        app.add_middleware(FreshGauges)
        for _, attach in faces("app"):
            attach(app)
        app.add_middleware(ClientNamespaces)
        app.add_middleware(OwnPages)
        self._app = app

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        from vllm_rollout.kernel.api.client import RolloutAsyncLLM
        from vllm_rollout.kernel.api.open_paths import keys_of
        from vllm_rollout.kernel.api.services import build_services
        from vllm_rollout.kernel.http.origins import AllowedHosts

        if not isinstance(engine_client, RolloutAsyncLLM):
            raise RuntimeError(
                f"the rollout endpoints need vllm_rollout's engine client, found {type(engine_client).__name__}. "
                "Start the server with `vllm-rollout serve` instead of `vllm serve`."
            )
        state.allowed_hosts = AllowedHosts(
            args.rollout_allowed_hosts, args.allowed_origins, bound=args.host or "", has_key=bool(keys_of(args))
        )
        await build_services(engine_client, self._app, args)
