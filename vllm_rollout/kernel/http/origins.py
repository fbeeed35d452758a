"""Decides which web pages may use this server.

A browser sends requests for any page that its user looks at, from inside the user's network. A server without a key
accepts them without one. Only the headers `Origin` and `Host` show where they come from.

A page of another site sends its own origin. With DNS rebinding, a page's name is made to point at this server
afterwards. For the browser both then have the same origin, and only the name in `Host` gives the page away.

Invariant: requests without Origin come from curl, trainers and OpenAI's clients. A server refuses them only if it has
no key, and `Host` is a name that a stranger can register.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.errors import error_response

ANY = "*"
PRIVATE_ENDS = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that cannot be registered, among them Kubernetes' `svc.cluster.local`."""


class AllowedHosts:
    """The names and origins under which pages may call this server."""

    def __init__(self, hosts: Collection[str] = (), origins: Collection[str] = (), *, bound: str = "", has_key: bool):
        """`hosts`: of --rollout-allowed-hosts. `origins`: of vLLM's --allowed-origins. `bound`: of --host.
        `has_key`: True if the server has an API key."""
        self._hosts = {host.lower() for host in hosts}
        self._origins = set(origins)
        self._own = {name.lower() for name in (bound, socket.gethostname(), socket.getfqdn())}
        self._has_key = has_key

    def refusal(self, host: str | None, origin: str | None) -> RequestError | None:
        """The error for a request with these headers. None if it is allowed."""
        if origin is not None and not self._is_ours(origin, host or ""):
            return RequestError(
                f"origin: a page of {origin!r:.100} may not use this server. Start it with --rollout-allowed-hosts and "
                "the page's host name, or name the origin in vLLM's --allowed-origins.",
                status=HTTPStatus.FORBIDDEN,
                param="origin",
            )
        if host is not None and not self._has_key and not self._is_known(_name_of(f"//{host}")):
            return RequestError(
                f"host: this server has no --api-key, and does not know itself as {host!r:.100}. Call it by its IP "
                "address, or start it with --rollout-allowed-hosts and this name, or with --api-key.",
                status=HTTPStatus.FORBIDDEN,
                param="host",
            )
        return None

    def _is_ours(self, origin: str, host: str) -> bool:
        if ANY in self._origins or ANY in self._hosts or origin in self._origins:
            return True
        return _authority(origin) == host.lower() or _name_of(origin) in self._hosts

    def _is_known(self, name: str) -> bool:
        if ANY in self._hosts or name in self._hosts or name in self._own:
            return True
        # A page at an IP address came from there. A name without a dot is one of the user's own network.
        return _is_address(name) or "." not in name or name.endswith(PRIVATE_ENDS)


class OwnPages:
    """ASGI middleware that refuses requests of other sites' pages."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts | None = None) -> None:
        """`allowed`: by default `allowed_hosts` of the app's state. If the app has none, no request is refused."""
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            allowed = self._allowed or getattr(scope["app"].state, "allowed_hosts", None)
            headers = Headers(scope=scope)
            if allowed is not None:
                refusal = allowed.refusal(headers.get("host"), headers.get("origin"))
                if refusal is not None:
                    await error_response(refusal)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _authority(origin: str) -> str:
    """Host and port. Empty for `null` and for text that is no origin."""
    return origin.partition("://")[2].lower()


def _name_of(url: str) -> str:
    """The host without its port. Empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
