"""The path of a request as the app names it. Invariant: the same wherever a proxy has put the app."""

from __future__ import annotations

from starlette.types import Scope


def path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
