"""Our HTTP endpoints. Invariant: every error body is an OpenAI error that says what, value, allowed, remedy."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from vllm_rollout.config import MAX_BODY_BYTES
from vllm_rollout.server.answers import RolloutAnswer
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.errors import (
    ERRORS,
    error_response,
    explain_internal,
    explain_invalid,
    explain_unreadable,
)
from vllm_rollout.server.event_stream import EventStream, event_stream_schema, server_sent_events, unless_disconnected
from vllm_rollout.server.protocol import RolloutRequest
from vllm_rollout.server.service import RolloutService

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


class RolloutRoute(APIRoute):
    """A route whose errors are OpenAI error bodies: 422 names the field, 413 the limit."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                _check_size(request.headers.get("content-length", ""))
                return await handle(Request(request.scope, _limited(request.receive)))
            except RequestValidationError as error:
                return error_response(explain_invalid(error))
            except RequestError as error:
                return error_response(error)
            except HTTPException as error:
                return error_response(explain_unreadable(error))
            except Exception as error:  # the HTTP boundary: no answer but ours
                logger.exception("%s %s failed", request.method, request.url.path)
                return error_response(explain_internal(error))

        return handler


router = APIRouter(route_class=RolloutRoute, tags=["rollouts"])


@router.post(
    "/v1/rollouts",
    summary="Groups of trajectories for many prompts",
    response_model=RolloutAnswer,
    responses={
        **ERRORS,
        200: {
            "description": "The finished groups, in the order of the prompts; with `stream`, server-sent events.",
            "content": {"text/event-stream": event_stream_schema()},
        },
    },
)
async def create_rollout(body: RolloutRequest, request: Request) -> Response:
    """For every prompt run `group_size + redundancy` candidates and answer with `group_size` trajectories.

    With `early_stop` the others stop inside the engine in the step in which the group completes. With `stream` the
    answer is a stream of server-sent events: `tokens`, `trajectory`, `candidate`, `group`, then `done` (or `error`).
    Each has one JSON object in `data`, whose `type` is the event's name.
    """
    service: RolloutService = request.app.state.rollout_service
    rollout = await service.prepare(body)
    if body.stream:
        return EventStream(server_sent_events(service, rollout))
    answer = await unless_disconnected(request.receive, service.answer(rollout))
    if answer is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    # Serialized here once: a response_model would validate every token id again.
    return Response(answer.model_dump_json(), media_type="application/json")


def _check_size(num_bytes: int | str) -> None:
    """Raises: RequestError when a body of that size, or of that content-length, is too large."""
    if isinstance(num_bytes, str):
        num_bytes = int(num_bytes) if num_bytes.isascii() and num_bytes.isdecimal() else 0
    if num_bytes > MAX_BODY_BYTES:
        raise RequestError(
            f"the body has {num_bytes} bytes or more, at most {MAX_BODY_BYTES} are allowed. "
            "Send fewer prompts per request.",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )


def _limited(receive: Receive) -> Receive:
    """`receive`, which fails as soon as a body that does not state its length is too large."""
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        _check_size(num_bytes)
        return message

    return receive_limited
