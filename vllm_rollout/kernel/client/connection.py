"""Connection of a client to a server: settings, timeouts, retries, and parsing of answers.

Invariant: a request is retried only if no answer came. Every failure is a RolloutError.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from functools import cache
from http import HTTPStatus
from types import UnionType
from typing import Annotated, Any, Self, get_origin

import httpx
from pydantic import Discriminator, TypeAdapter, ValidationError

from vllm_rollout.kernel.client.joints import Joints
from vllm_rollout.kernel.http.answers import DoneEvent, ErrorAnswer, ErrorBody, ErrorEvent, Event, RolloutEvent
from vllm_rollout.kernel.http.clients import ADMIN_HEADER

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 10.0
NUM_RETRIES = 3
"""Retries after a connection error."""
BACKOFF_S = 0.5
"""Seconds before the first retry. The wait doubles with each further retry."""
HEALTH_TIMEOUT_S = 5.0
"""Longest wait for an answer of /health, in seconds."""
POLL_INTERVAL_S = 0.5
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
"""No limit of connections: a trainer may wait on hundreds of rollouts at once. The server queues them, not the client.
"""
MAX_ERROR_CHARS = 500
"""Characters of an unparsed error answer that go into the error's message."""

CONNECTION_LOST = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ReadError,
    httpx.WriteError,
    httpx.RemoteProtocolError,
)
"""Errors that are retried, before the first byte of an answer only. A read timeout is not: the rollout may be running.
"""

INCOMPLETE = "IncompleteStream"
"""Error type of a stream that ended early or has gaps."""


class RolloutError(Exception):
    """The server refused or failed, or could not be reached. A server's refusal keeps the server's message."""

    def __init__(
        self, status: int | None, message: str, type: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status. None if there was no answer."""
        self.message = message
        self.type = type
        self.param = param
        """Name of the field that the server refused."""
        self.retry_after_s = retry_after_s
        """Seconds after which the server suggests another attempt."""

    def __str__(self) -> str:
        return f"{self.status or self.type}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.message, self.type, self.param, self.retry_after_s)

    @classmethod
    def from_body(cls, body: ErrorBody) -> Self:
        return cls(body.code, body.message, body.type, body.param)


class EventLines:
    """Splits the bytes of an event stream into lines.

    Splits at line feeds only. httpx's line iterator also splits at characters such as U+2028, which JSON allows in
    text.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        """Parts of an unfinished line. A group of conversations is one line of many megabytes."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Lines that this chunk completes."""
        first, *rest = chunk.split(b"\n")
        self._begun.append(first)
        if not rest:
            return []
        *lines, tail = b"".join(self._begun), *rest
        self._begun = [tail]
        return [line.removesuffix(b"\r") for line in lines]


class EventData:
    """Splits the bytes of an event stream into the data of its events."""

    def __init__(self) -> None:
        self._lines = EventLines()
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that this chunk completes."""
        found = []
        for line in self._lines.feed(chunk):
            if line.startswith(b"data:"):
                self._data.append(line[len(b"data:") :].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found


async def event_data(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the data of an answer's events as they come, and close the answer at the end.

    Raises: RolloutError for an answer that is an error. httpx.TransportError.
    """
    try:
        if not response.is_success:
            await response.aread()
            raise_for_error(response)
        reader = EventData()
        async for chunk in response.aiter_bytes():
            for data in reader.feed(chunk):
                yield data
    finally:
        await response.aclose()


class EventReader:
    """Parses the data of an event stream as events."""

    def __init__(self, events: Any = RolloutEvent, *, streams_tokens: bool = False) -> None:
        """`events`: union of the classes of events, which differ by `type`."""
        self._form = adapter(events)
        self._joints = Joints() if streams_tokens else None
        self._done = False

    def close(self) -> None:
        """Note that the stream has ended. Raises: RolloutError if it ended before its `done` event."""
        if not self._done:
            raise RolloutError(None, "the stream ended before its done event; the rollout is incomplete.", INCOMPLETE)

    def read(self, data: bytes) -> Event:
        """The event with this data. Raises: RolloutError for an `error` event, and if tokens do not join."""
        event: Event = parse(self._form, data)
        if isinstance(event, ErrorEvent):
            raise RolloutError.from_body(event.error)
        if self._joints is not None and (problem := self._joints.problem(event)) is not None:
            raise RolloutError(None, f"{problem} Run the rollout again.", INCOMPLETE)
        self._done = self._done or isinstance(event, DoneEvent)
        return event


class Connection:
    """A client's settings: address, keys, timeouts, retries."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float | None = None,
        num_retries: int = NUM_RETRIES,
        backoff_s: float = BACKOFF_S,
        transport: Any = None,
    ) -> None:
        """`base_url`: the server, with or without `/v1`. `api_key`: the server's --api-key. None: the environment's
        VLLM_API_KEY. `admin_key`: the server's --rollout-admin-key.

        `connect_timeout_s`: longest wait for a connection, in seconds. `read_timeout_s`: longest silence of the server,
        in seconds. None waits as long as a rollout takes.

        `num_retries`, `backoff_s`: retries after a connection error, only while no answer has come. The waits are
        backoff_s, 2 backoff_s, 4 backoff_s, … seconds. `transport`: an httpx transport in place of the network.

        Raises: ValueError for an address that is not HTTP, and for a key that no header can have.
        """
        if httpx.URL(base_url).scheme not in ("http", "https"):
            raise ValueError(f"base_url must begin with http:// or https://, got {base_url!r}.")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._connect_timeout_s = connect_timeout_s
        self._num_retries, self._backoff_s = num_retries, backoff_s
        api_key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key
        for name, key in (("api_key", api_key), ("admin_key", admin_key)):
            if strange := next((each for each in key or "" if not " " <= each <= "~"), None):
                raise ValueError(f"{name} must have printable ASCII characters only, got {strange!r}. Look for a typo.")
        self.key_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        """Header with the API key. Empty without a key."""
        headers = self.key_headers | ({} if admin_key is None else {ADMIN_HEADER: admin_key})
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=self._timeout(read_timeout_s),
            limits=LIMITS,
            transport=transport,
        )

    def _timeout(self, read_timeout_s: float | None) -> httpx.Timeout:
        return httpx.Timeout(None, connect=self._connect_timeout_s, read=read_timeout_s)

    def _delay_s(self, error: httpx.TransportError, attempt: int, url: object) -> float:
        """Seconds to wait before the next attempt. `attempt` counts from 0.

        Raises: RolloutError if there must be no further attempt.
        """
        if not isinstance(error, CONNECTION_LOST):
            raise transport_error(error, url) from error
        if attempt >= self._num_retries:
            raise RolloutError(
                None,
                f"no connection to {url} in {attempt + 1} attempts ({_words(error)}). "
                "Check the address and that the server runs (`vllm-rollout serve MODEL`).",
                type(error).__name__,
            ) from error
        return self._backoff_s * 2.0**attempt


def _made(form: Any) -> TypeAdapter[Any]:
    tagged: Any = Annotated[form, Discriminator("type")]
    return TypeAdapter(tagged if get_origin(form) is UnionType else form)


adapter: Callable[[Any], TypeAdapter[Any]] = cache(_made)
"""The parser of a form, which is made once. Members of a union differ by `type`."""


def parse(form: TypeAdapter[Any], content: bytes) -> Any:
    try:
        return form.validate_json(content)
    except ValidationError as error:
        raise RolloutError(
            None,
            f"the server's answer is not of this client's version ({error.error_count()} differences, first: "
            f"{error.errors()[0]['loc']} {error.errors()[0]['msg']}). Install the same vllm-rollout on both sides.",
            "UnexpectedAnswer",
        ) from error


def raise_for_error(response: httpx.Response) -> None:
    if response.is_success:
        return
    wait = response.headers.get("retry-after", "")
    retry_after_s = float(wait) if wait.isdecimal() else None
    try:
        body = ErrorAnswer.model_validate_json(response.content).error
    except ValidationError:
        text = response.text[:MAX_ERROR_CHARS] or response.reason_phrase
        raise RolloutError(response.status_code, text, response.reason_phrase, None, retry_after_s) from None
    raise RolloutError(response.status_code, body.message, body.type, body.param, retry_after_s)


def transport_error(error: httpx.TransportError, url: object) -> RolloutError:
    remedy = ""
    if isinstance(error, httpx.ReadTimeout):
        remedy = " Rollouts take long: raise timeout or read_timeout_s, or leave both out to wait."
    return RolloutError(None, f"{url}: {_words(error)}.{remedy}", type(error).__name__)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


STARTING = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
"""HTTP statuses of a server that is not ready, or of a proxy whose server is missing."""


def is_healthy(response: httpx.Response) -> bool:
    if response.status_code in STARTING:
        return False
    raise_for_error(response)
    return True
