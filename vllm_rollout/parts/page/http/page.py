"""The page at /rollouts: files that hold no data and need no key. All data on the page comes from the feed."""

from __future__ import annotations

import mimetypes
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Depends, HTTPException, Request, Response

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _below(folder: Traversable, above: str = "") -> dict[str, Traversable]:
    """All files of a folder and its subfolders, by path."""
    found: dict[str, Traversable] = {}
    for entry in folder.iterdir():
        found |= _below(entry, f"{above}{entry.name}/") if entry.is_dir() else {above + entry.name: entry}
    return found


_FILES = _below(resources.files("vllm_rollout.parts.page.http") / "assets")
"""Files by path. Requests are looked up here, never in the file system."""


def require_on(request: Request) -> None:
    """Raises: HTTPException (404) for a server that was started with --no-enable-rollout-page."""
    if not getattr(request.app.state, "rollout_page", True):
        raise HTTPException(404, "the page and its feed are off. Start the server with --enable-rollout-page.")


def page_router() -> APIRouter:
    """Routes of the page, for a server or for the replay of a file."""
    router = APIRouter(include_in_schema=False, dependencies=[Depends(require_on)])

    @router.get("/rollouts")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/rollouts/assets/{path:path}")
    async def asset(path: str) -> Response:
        return _file(path)

    return router


def _file(path: str) -> Response:
    """The response with a file of the page. Raises: HTTPException (404)."""
    file = _FILES.get(path)
    if file is None:
        raise HTTPException(404)
    kind = "text/javascript" if path.endswith(".js") else mimetypes.guess_type(path)[0] or "text/plain"
    return Response(file.read_bytes(), media_type=kind, headers=HEADERS)
