"""Limits and error handling of all our endpoints.

Invariant: every error body is an OpenAI error with the problem, the value, allowed values and a remedy. None of our
endpoints reads a body above the limit, and the bodies of their unanswered requests take a bounded number of bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from typing import Any, ClassVar, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_rollout.config import MAX_BODY_BYTES, MAX_HELD_BYTES
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import error_response, explain_internal, explain_invalid, explain_unreadable
from vllm_rollout.kernel.http.parsed import BodyRequest

logger = logging.getLogger(__name__)


class HeldBodies:
    """Bytes of the bodies of requests that are not fully answered."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def received(self, receive: Receive, check_size: Callable[[int], None]) -> Iterator[Receive]:
        """Wrap one request's `receive`. It fails if the body is too large by itself, or too much beside the others.
        A single body is never too much beside others.

        The bytes are counted as they come, so a body that does not state its length is limited too. Raises:
        RequestError (503), and what `check_size` raises.
        """
        mine = 0

        async def receive_held() -> Message:
            nonlocal mine
            message = await receive()
            size = len(message.get("body", b""))
            self.num_bytes += size
            mine += size
            check_size(mine)
            if size and self.num_bytes > max(self.max_bytes, mine):
                raise RequestError(
                    f"the requests on their way here have {self.num_bytes} bytes with this one's, at most "
                    f"{self.max_bytes} are held. Try again when others are answered.",
                    status=HTTPStatus.SERVICE_UNAVAILABLE,
                    retry_after_s=1,
                )
            return message

        try:
            yield receive_held
        finally:
            self.num_bytes -= mine


def check_size(num_bytes: int | str, max_bytes: int, remedy: str) -> None:
    """Check the size of a body, given in bytes or as its content-length. Raises: RequestError (413) if it is too
    large."""
    if isinstance(num_bytes, str):
        num_bytes = int(num_bytes) if num_bytes.isascii() and num_bytes.isdecimal() else 0
    if num_bytes > max_bytes:
        raise RequestError(
            f"the body has {num_bytes} bytes or more, at most {max_bytes} are allowed. {remedy}",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )


_AHEAD = HeldBodies(MAX_HELD_BYTES)
"""Bodies that are read to choose the app that answers, until that app has taken them."""


async def answer_by_body(
    choose: Callable[[bytes], tuple[ASGIApp, Scope]],
    too_large: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """For middleware: `choose` picks the app that answers a request and the app's scope, by the request's body.

    The body is held within the bounds of our endpoints. A larger one is not read to its end here: `too_large` gets it
    without a bound. If too much is held at once, the answer is that error (503).
    """
    messages: deque[Message] = deque()
    num_bytes = 0
    with ExitStack() as holding:
        receive_held = holding.enter_context(_AHEAD.received(receive, lambda num_bytes: None))

        async def receive_again() -> Message:
            if not messages:
                return await receive()
            message = messages.popleft()
            if not messages:
                holding.close()
            return message

        answer: ASGIApp
        try:
            while num_bytes <= MAX_BODY_BYTES and (not messages or messages[-1].get("more_body", False)):
                messages.append(await receive_held())
                num_bytes += len(messages[-1].get("body", b""))
            answer = too_large
            if num_bytes <= MAX_BODY_BYTES:
                answer, scope = choose(b"".join(message.get("body", b"") for message in messages))
        except RequestError as error:
            answer = error_response(error)
        await answer(scope, receive_again, send)


class RolloutRoute(APIRoute):
    """A route whose errors are OpenAI error bodies: 400 names the field, 413 the limit, 503 says when to try again."""

    held: ClassVar[HeldBodies] = HeldBodies(MAX_HELD_BYTES)
    max_body_bytes: ClassVar[int] = MAX_BODY_BYTES
    too_large_remedy: ClassVar[str] = "Send fewer prompts or rewards per request."

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.held.received(receive, self._check_size) as receive:
            await super().handle(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        body = get_type_hints(self.endpoint).get("body")

        async def handler(request: Request) -> Response:
            try:
                self._check_size(request.headers.get("content-length", ""))
                return await handle(BodyRequest(request.scope, request.receive, body))
            except RequestValidationError as error:
                return error_response(explain_invalid(error, body))
            except RequestError as error:
                return error_response(error)
            except HTTPException as error:
                if isinstance(error.__cause__, RequestValidationError):  # of a body that was checked as it was read
                    return error_response(explain_invalid(error.__cause__, body))
                return error_response(explain_unreadable(error))
            except Exception as error:  # the HTTP boundary: no answer but ours
                logger.exception("%s %s failed", request.method, request.url.path)
                return error_response(explain_internal(error))

        return handler

    def _check_size(self, num_bytes: int | str) -> None:
        check_size(num_bytes, self.max_body_bytes, self.too_large_remedy)
