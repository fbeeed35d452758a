"""The endpoint for harnesses of a feed (docs/reference/http.md). Invariant: as of kernel/http/routes.py."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.errors import ERRORS, errors_of
from vllm_rollout.kernel.http.serialised import LIVE_HEADERS, EventStream, event_stream_schema, server_sent_events
from vllm_rollout.kernel.rules.fields import MAX_NAME_CHARS
from vllm_rollout.parts.feeds.with_sessions.http.answers import SessionFeedEvent

router: APIRouter = APIRouter(route_class=RolloutRoute, tags=["feeds"])
ROUTES = {46: router}


@router.get(
    "/v1/feeds/{feed_id}/events",
    summary="Events of a feed's sessions, for the harness that runs them",
    response_class=Response,
    responses={
        **ERRORS,
        **errors_of(409, 429),
        200: {
            "description": "Server-sent events, until the feed is deleted.",
            "content": {"text/event-stream": event_stream_schema(SessionFeedEvent)},
        },
    },
)
async def feed_events(
    feed_id: str,
    request: Request,
    harness: Annotated[
        str | None,
        Query(min_length=1, max_length=MAX_NAME_CHARS, description="Your name for the harness. Default: a new one."),
    ] = None,
) -> Response:
    """Stream the groups that a harness is to run, and the ends of their sessions.

    A new group goes to the harness with the fewest. A harness that comes back within 30 seconds keeps its groups.
    """
    feeds: Any = request.app.state.feed_service
    source = server_sent_events("the events of a feed", feeds.events(feed_id, harness))
    return EventStream(source, headers=LIVE_HEADERS)
