"""Client and session of the request that is being answered. Clients with the same API key share a namespace for the
names they choose.

Invariant: no key is kept, only its hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

ADMIN_HEADER = "x-rollout-admin-key"
"""Header with the admin key, needed if the server has --rollout-admin-key."""

_namespace: ContextVar[str] = ContextVar("namespace", default="")
_request: ContextVar[str | None] = ContextVar("request", default=None)
_session: ContextVar[str | None] = ContextVar("session", default=None)
_headers: ContextVar[Mapping[str, str] | None] = ContextVar("headers", default=None)


class ClientNamespaces:
    """ASGI middleware that notes the client, session and id of each request for code that runs below it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            _namespace.set(namespace_of(headers.get("authorization")))
            _session.set(headers.get("x-session-id"))
            _request.set(headers.get("x-request-id"))
        await self._app(scope, receive, send)


def client_namespace() -> str:
    """Namespace of the client whose request is being answered. Empty for a client without a key, and outside of
    HTTP."""
    return _namespace.get()


def act_for(namespace: str) -> None:
    """Let the current context run for a client of this namespace, without a request."""
    _namespace.set(namespace)


def owned_name(namespace: str, id: str) -> str:
    """A client's id, unique among all clients by its namespace. Ids of ours have no slash."""
    return f"{namespace}/{id}" if namespace else id


def id_of(name: str) -> str:
    """The id without its client's namespace."""
    return name.rpartition("/")[2]


def client_session() -> str | None:
    """The session that the header X-Session-ID of the current request names."""
    return _session.get()


def client_request() -> str | None:
    """The id that the header X-Request-ID gives the current request."""
    return _request.get()


@contextmanager
def answering(headers: Mapping[str, str]) -> Iterator[None]:
    """Note the headers of a request while an endpoint of ours answers it."""
    token = _headers.set(headers)
    try:
        yield
    finally:
        _headers.reset(token)


def client_headers() -> Mapping[str, str]:
    """The headers of the request that an endpoint of ours answers. Empty outside of such a request."""
    return _headers.get() or {}


def namespace_of(authorization: str | None) -> str:
    """The namespace of a client with this `Authorization` header."""
    return "" if authorization is None else blake2b(authorization.encode(), digest_size=8).hexdigest()
