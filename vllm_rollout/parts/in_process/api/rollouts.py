"""The rollout service around an engine of this process: the HTTP endpoints without a socket.

Invariant: bodies, checks, answers and errors are those of the endpoints, because the code is the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.renderers.online_renderer import OnlineRenderer

from vllm_rollout.config import RECORD_MAX_MIB
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.group_client import GroupClient
from vllm_rollout.kernel.api.services import build_services
from vllm_rollout.kernel.client.calls import Call
from vllm_rollout.kernel.client.connection import RolloutError
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.http.answers import Event
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import error_body, explain_invalid
from vllm_rollout.kernel.http.parsed import checked
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.routes import router

T = TypeVar("T")

URL = "http://in-process"

Rewards = Mapping[str, Callable[..., Any] | str]
"""Reward functions by name, as `vllm_rollout.parts.rewards.grading.Grader` takes them."""


class Rollouts:
    """Client of the service of one engine."""

    def __init__(self, app: FastAPI, engine: VLLMEngine) -> None:
        self._app = app
        self._engine = engine
        self._client = Sender(URL, transport=httpx.ASGITransport(app))

    @classmethod
    async def around(
        cls,
        client: GroupClient,
        *,
        chat_template: str | None,
        profile: str | None,
        record: str | None,
        rewards: Rewards | None,
    ) -> Rollouts:
        """Build the service of an engine. Raises: RuntimeError for a profile of another model."""
        app, config = FastAPI(), client.vllm_config.model_config
        app.include_router(router)
        paths = [BaseModelPath(name=config.served_model_name, model_path=config.model)]  # type: ignore[arg-type]
        app.state.openai_serving_models = OpenAIServingModels(client, paths)  # type: ignore[arg-type]
        app.state.online_renderer = OnlineRenderer(
            config,
            client.renderer,
            request_logger=None,
            chat_template=chat_template,
            chat_template_content_format="auto",
        )
        settings = Namespace(
            rollout_profile=profile, rollout_record=record, rollout_record_max_mib=RECORD_MAX_MIB,
            rollout_state=None, rollout_admin_key=None,
            enable_rollout_page=False, rollout_emulate=None, rollout_parallelism="fixed",
            rollout_reward=rewards or {}, rollout_reward_processes=None, rollout_reward_limits=None,
        )  # fmt: skip
        return cls(app, await build_services(client, app, settings))  # type: ignore[arg-type]

    async def settled(self) -> None:
        """Wait until no background work of the service runs, such as the training of a head."""
        for part in self._engine.parts:
            await part.settled()

    async def ask(self, call: Call[T]) -> T:
        """Send a call as the async client does. Raises: RolloutError."""
        return await self._client.send(call)

    async def events(self, body: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """Yield the events of a streamed rollout. Raises: RolloutError."""
        service = self._app.state.rollout_service
        try:
            rollout = await service.prepare(_checked(body))
            async with aclosing(service.events(rollout)) as events:
                async for event in events:
                    yield event
        except RequestError as error:
            said = error_body(error)
            raise RolloutError(error.status, said.message, said.type, said.param, error.retry_after_s) from error

    def know(self, lora: LoRARequest) -> str:
        """Let rollouts name an adapter. Returns the adapter's name."""
        self._app.state.openai_serving_models.lora_requests[lora.lora_name] = lora
        return lora.lora_name


def _checked(body: Mapping[str, Any]) -> RolloutRequest:
    """The parsed body. Raises: RequestError that names the field."""
    try:
        return checked(body, RolloutRequest)
    except RequestValidationError as error:
        raise explain_invalid(error, RolloutRequest) from error
