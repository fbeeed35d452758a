"""Whose request is being answered: clients with the same API key share a namespace for the names they choose; and which
session it is a turn of.

Invariant: no key is kept, only what is made of it.
"""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import blake2b

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_namespace: ContextVar[str] = ContextVar("namespace", default="")
_request: ContextVar[str | None] = ContextVar("request", default=None)
_session: ContextVar[str | None] = ContextVar("session", default=None)


class ClientNamespaces:
    """ASGI middleware that notes whose request it is, for what is asked about it deep inside."""

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
    """The namespace of the request that is being answered; empty for a client without a key, and where nobody asks over
    HTTP."""
    return _namespace.get()


def owned_name(namespace: str, id: str) -> str:
    """The name of what a client has, among those of all clients. An id of ours has no slash."""
    return f"{namespace}/{id}" if namespace else id


def id_of(name: str) -> str:
    """What the client itself calls it."""
    return name.rpartition("/")[2]


def client_session() -> str | None:
    """The session that the header X-Session-ID names, of the request that is being answered."""
    return _session.get()


def client_request() -> str | None:
    """What the header X-Request-ID calls the request that is being answered."""
    return _request.get()


def namespace_of(authorization: str | None) -> str:
    """That of a client with this header."""
    return "" if authorization is None else blake2b(authorization.encode(), digest_size=8).hexdigest()
