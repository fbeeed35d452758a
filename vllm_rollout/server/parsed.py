"""Large request bodies, read and checked beside the event loop.

Invariant: what is accepted, and what is said of what is not, are the same as of a small body.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

Model = TypeVar("Model", bound=BaseModel)

LARGE_BODY_BYTES = 256 * 1024
"""Bytes from which on a body goes to the thread: about 5 ms of reading and checking."""

_THREADS = ThreadPoolExecutor(1, thread_name_prefix="vllm_rollout-bodies")


class BodyRequest(Request):
    """A request whose body is to become a `model`. Overrides: __init__, json."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """The body; of a large one already the model, which FastAPI takes as it is.

        Raises: ValueError for what is no JSON, RequestValidationError for what is no such model.
        """
        body = await self.body()
        if len(body) < LARGE_BODY_BYTES or self._model is None:
            return await super().json()
        return await asyncio.get_running_loop().run_in_executor(_THREADS, _parsed, body, self._model)


def _parsed(body: bytes, model: type[Model]) -> Model:
    return checked(read_json(body), model)


def checked(fields: Any, model: type[Model]) -> Model:
    """What a body says as its model. Raises: RequestValidationError, as FastAPI does for a body."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        errors = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        raise RequestValidationError(errors) from error


def read_json(body: bytes) -> Any:
    """As `json.loads`, with turns for other threads between the items of an object's lists. Raises: ValueError."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: _read_list(raw) for name, raw in fields.items()}
    except (msgspec.DecodeError, RecursionError):  # msgspec is stricter: NaN, lone surrogates, duplicate forms
        return json.loads(body)


def _read_list(raw: msgspec.Raw) -> Any:
    if bytes(memoryview(raw)[:1]) != b"[":
        return msgspec.json.decode(raw)
    return [msgspec.json.decode(item) for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]
