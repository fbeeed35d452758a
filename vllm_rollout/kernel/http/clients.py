"""Client and path of the request that is being answered. Clients with one API key share a namespace for the names
they choose.

Invariant: no key is kept, only its hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import blake2b

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

ADMIN_HEADER = "x-rollout-admin-key"
"""Header with the admin key, needed if the server has --rollout-admin-key."""
KEYS = (b"authorization", ADMIN_HEADER.encode())
"""Headers with keys."""

_namespace: ContextVar[str] = ContextVar("namespace", default="")
_headers: ContextVar[Headers | None] = ContextVar("headers", default=None)


class ClientNamespaces:
    """ASGI middleware that notes the client and the headers of each request for code that runs below it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            _namespace.set(namespace_of(Headers(scope=scope).get("authorization")))
            _headers.set(Headers(raw=[header for header in scope["headers"] if header[0] not in KEYS]))
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


def client_headers() -> Mapping[str, str]:
    """The headers of the request that is being answered, without keys. Empty outside of HTTP."""
    return _headers.get() or Headers()


def namespace_of(authorization: str | None) -> str:
    """The namespace of a client with this `Authorization` header."""
    return "" if authorization is None else blake2b(authorization.encode(), digest_size=8).hexdigest()


def path_of(scope: Scope) -> str:
    """The path of a request as the app's routes name it, without a proxy's prefix (`root_path`)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
