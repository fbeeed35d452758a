"""Paths of requests, as the app's routes name them. Invariant: a proxy's path prefix (`root_path`) does not change
them."""

from __future__ import annotations

from starlette.types import Scope


def path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
