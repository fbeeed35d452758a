"""Large request bodies, parsed and checked in a thread beside the event loop.

Invariant: a large body is accepted or refused like a small one, with the same message.
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
"""Bodies of at least this size are parsed in the thread. Parsing and checking take about 5 ms."""

_THREADS = ThreadPoolExecutor(1, thread_name_prefix="vllm_rollout-bodies")


class BodyRequest(Request):
    """A request whose body becomes a `model`. Overrides: __init__, json."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """The body. A large one is already an instance of the model, which FastAPI takes as it is.

        Raises: ValueError for a body that is not JSON, RequestValidationError for one that does not fit the model.
        """
        body, model = await self.body(), self._model
        if len(body) < LARGE_BODY_BYTES or model is None:
            return await super().json()
        return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: checked(read_json(body), model))


def checked(fields: Any, model: type[Model]) -> Model:
    """The fields of a body as an instance of its model. Raises: RequestValidationError, as FastAPI does for a body."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        errors = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        raise RequestValidationError(errors) from error


def read_json(body: bytes) -> Any:
    """Parse as `json.loads` does, but let other threads run between the items of an object's lists. Raises:
    ValueError."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: _read_list(raw) for name, raw in fields.items()}
    except (msgspec.DecodeError, RecursionError):  # msgspec is stricter: NaN, lone surrogates, duplicate forms
        return json.loads(body)


def _read_list(raw: msgspec.Raw) -> Any:
    if bytes(memoryview(raw)[:1]) != b"[":
        return msgspec.json.decode(raw)
    return [msgspec.json.decode(item) for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]
