"""The feed of what runs, and the texts of a group. Read only."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from vllm_rollout.server.boundary import RolloutRoute
from vllm_rollout.server.clients import client_namespace
from vllm_rollout.server.errors import ERRORS, errors_of
from vllm_rollout.server.serialised import EventStream, json_response
from vllm_rollout.server.slices import chained
from vllm_rollout.server.watch.events import SCHEMA, GroupTexts
from vllm_rollout.server.watch.page import require_on
from vllm_rollout.server.watch.viewers import Viewers

router = APIRouter(route_class=RolloutRoute, tags=["watch"], dependencies=[Depends(require_on)])
MAX_POSITION = 1 << 20


def _viewers(request: Request) -> Viewers:
    viewers: Viewers = request.app.state.rollout_service.viewers
    return viewers


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
    """Server-sent events for the page at /rollouts and `vllm-rollout top`: rollouts, groups that have changed, ranks,
    rounds (docs/guides/watching.md). It has no end; a reader that is too slow is told everything anew."""
    feed = _viewers(request).feed()
    first = await anext(feed)
    return EventStream(chained(first, feed), headers={"cache-control": "no-store", "x-accel-buffering": "no"})


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
    """What each of its candidates said, and why it ended; of those that run the last 512 tokens.
    404 for a rollout of another API key."""
    return json_response(await _viewers(request).texts(rollout_id, position, client_namespace()))
