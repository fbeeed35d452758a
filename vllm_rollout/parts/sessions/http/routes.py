"""The endpoints of sessions (docs/guides/agents.md). Invariant: as of kernel/http/routes.py."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.convertors import StringConvertor, register_url_convertor

from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.errors import ERRORS, ROLLOUT_ERRORS, errors_of
from vllm_rollout.kernel.http.serialised import LIVE_HEADERS, EventStream, event_stream_schema, json_response, to_json
from vllm_rollout.kernel.rules.fields import MAX_NAME_CHARS
from vllm_rollout.parts.sessions.http.body import (
    FinishAnswer,
    FinishRequest,
    GroupOverEvent,
    SessionEvent,
    SessionGroupAnswer,
    SessionGroupRequest,
    TrajectoryAnswer,
)
from vllm_rollout.parts.sessions.http.groups import Event
from vllm_rollout.parts.sessions.http.service import SessionService


class NameConvertor(StringConvertor):
    """A client's name in a path: any text, also with slashes and line breaks."""

    regex = r"[\s\S]+"


register_url_convertor("name", NameConvertor())
router = APIRouter(route_class=RolloutRoute, tags=["sessions"])
ROUTES = {60: router}
OF_FIRST = ("/v1/groups", "/v1/sessions")
SESSION_ERRORS = ERRORS | errors_of(409)
Id = Annotated[str, Path(max_length=MAX_NAME_CHARS)]


def _sessions(request: Request) -> SessionService:
    service: SessionService = request.app.state.session_service
    return service


@router.post(
    "/v1/groups",
    summary="Declare a group of sessions",
    response_model=SessionGroupAnswer,
    status_code=HTTPStatus.CREATED,
    responses=ROLLOUT_ERRORS,
)
async def create_group(body: SessionGroupRequest, request: Request) -> Response:
    """Declare a group of sessions. The answer has the ids of its sessions.

    A request whose header X-Session-ID is one of these ids is a turn of that session, whichever client sends it. The
    first `group_size` sessions that finish make the group, and the others stop.
    """
    return json_response(_sessions(request).create(body), HTTPStatus.CREATED)


@router.get(
    "/v1/groups/{group_id:name}", summary="A group as it is now", response_model=SessionGroupAnswer, responses=ERRORS
)
async def get_group(group_id: Id, request: Request) -> Response:
    return json_response(_sessions(request).read_group(group_id))


@router.delete(
    "/v1/groups/{group_id:name}",
    summary="Stop a group's sessions, and forget it",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=SESSION_ERRORS,
)
async def delete_group(group_id: Id, request: Request) -> Response:
    """Stop the sessions of a group and forget it. 409 for a group of a running round, which the round ends itself."""
    _sessions(request).cancel(group_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.get(
    "/v1/sessions/events",
    summary="Events of a group's sessions, as they happen",
    response_class=Response,
    responses={
        **ERRORS,
        **errors_of(429),
        200: {
            "description": "Server-sent events, until the group is over.",
            "content": {"text/event-stream": event_stream_schema(SessionEvent | GroupOverEvent)},
        },
    },
)
async def session_events(
    request: Request, group: Annotated[str, Query(max_length=MAX_NAME_CHARS, description="The group's id.")]
) -> Response:
    """Stream the events of a group's sessions: ended sessions, so that the harness can stop their tools, and wanted
    ones."""
    service = _sessions(request)
    service.read_group(group)
    return EventStream(_sent(service.events(group)), headers=LIVE_HEADERS)


@router.get(
    "/v1/sessions/{session_id:name}",
    summary="A session with its trajectory",
    response_model=TrajectoryAnswer,
    responses=ERRORS,
)
async def get_session(session_id: Id, request: Request) -> Response:
    """Read a session: the token ids of every turn as the engine processed them, and a mask of those that the policy
    generated."""
    return json_response(_sessions(request).read(session_id))


@router.post(
    "/v1/sessions/{session_id:name}/finish",
    summary="Finish a session",
    response_model=FinishAnswer,
    responses=SESSION_ERRORS,
)
async def finish_session(session_id: Id, body: FinishRequest, request: Request) -> Response:
    """Finish a session with a reward, as void, or with neither. With neither, the group's reward function grades it,
    if it has one."""
    return json_response(await _sessions(request).finish(session_id, body))


async def _sent(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield b": \n\n"
        async for event in events:
            yield b"event: %s\ndata: %s\n\n" % (event.type.encode(), to_json(event))
