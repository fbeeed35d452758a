"""Read-only endpoints: the feed of running rollouts, and the texts of a group."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.errors import ERRORS, errors_of
from vllm_rollout.kernel.http.serialised import LIVE_HEADERS, EventStream, json_response
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.http.slices import chained
from vllm_rollout.parts.page.http.events import SCHEMA, GroupTexts
from vllm_rollout.parts.page.http.page import page_router, require_on
from vllm_rollout.parts.page.http.plan import PagePlan
from vllm_rollout.parts.page.http.viewers import Viewers

router = APIRouter(route_class=RolloutRoute, tags=["watch"], dependencies=[Depends(require_on)])
ROUTES = {80: router, 90: page_router()}
OF_FIRST = ("/rollouts",)
MAX_POSITION = 1 << 20


def _viewers(request: Request) -> Viewers:
    service: RolloutService = request.app.state.rollout_service
    return service.part(PagePlan).viewers


@router.get(
    "/v1/rollouts/watch",
    summary="Events of running rollouts, as they happen",
    response_class=Response,
    responses={
        **ERRORS,
        **errors_of(429),
        200: {"description": "Events without an end.", "content": {"text/event-stream": SCHEMA}},
    },
)
async def watch(request: Request) -> Response:
    """Stream everything that runs, as server-sent events: rollouts, changed groups, ranks, rounds and sessions.

    The page at /rollouts and `vllm-rollout top` read this stream (docs/guides/watching.md). It does not end. A reader
    that is too slow misses updates and is then sent everything anew.
    """
    feed = _viewers(request).feed()
    first = await anext(feed)
    return EventStream(chained(first, feed), headers=LIVE_HEADERS)


@router.get(
    "/v1/rollouts/watch/{rollout_id}/{position}",
    summary="The texts of a group",
    response_model=GroupTexts,
    responses=ERRORS,
)
async def read_texts(
    request: Request,
    rollout_id: Annotated[str, Path(max_length=256)],
    position: Annotated[int, Path(ge=0, le=MAX_POSITION)],
) -> Response:
    """Read the text of each candidate of a group, and the reason why it ended. If a candidate still runs, only its last
    512 tokens are returned.

    404 for a rollout of another API key, and for a rollout whose tokens are no longer kept.
    """
    return json_response(await _viewers(request).texts(rollout_id, position, client_namespace()))
