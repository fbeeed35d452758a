"""The admin key, needed to replace quality heads and states. Invariant: the key is in no log, no metric and no
answer."""

from __future__ import annotations

import hashlib
import hmac
from http import HTTPStatus

from fastapi import Request

from vllm_rollout.kernel.http.clients import ADMIN_HEADER
from vllm_rollout.kernel.http.engine import RequestError


class AdminKey:
    """The key of --rollout-admin-key. Only its digest is held, so that neither logs nor timing of comparisons reveal
    it."""

    def __init__(self, key: str) -> None:
        self._digest = _digest(key.encode())

    def opens(self, key: bytes) -> bool:
        return hmac.compare_digest(_digest(key), self._digest)

    def __repr__(self) -> str:
        return "***"  # vLLM logs its arguments


def require_admin(request: Request) -> None:
    """Dependency of endpoints that change something for all clients.

    The key may also be a bearer token: clients in trainers have a setting for that, but not for our header.

    Raises: RequestError (401) without the key, if the server was given one.
    """
    admin_key: AdminKey | None = request.app.state.rollout_service.admin_key
    if admin_key is None:
        return
    sent = request.headers.get(ADMIN_HEADER)
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    keys = [sent, token if scheme.lower() == "bearer" else None]
    if not any(admin_key.opens(key.encode("latin-1")) for key in keys if key is not None):
        raise RequestError(
            f"{ADMIN_HEADER}: the header is {'missing' if sent is None else 'another key'}. Send the key that the "
            "server was given as --rollout-admin-key; our clients take it as admin_key.",
            status=HTTPStatus.UNAUTHORIZED,
            param=ADMIN_HEADER,
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
