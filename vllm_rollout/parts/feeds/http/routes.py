"""The endpoints of feeds (docs/reference/http.md). Invariant: as of kernel/http/routes.py."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from vllm_rollout.kernel.http.answers import ErrorAnswer
from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.errors import ERRORS, ROLLOUT_ERRORS, errors_of
from vllm_rollout.kernel.http.serialised import (
    CLIENT_CLOSED_REQUEST,
    PartsResponse,
    json_response,
    unless_disconnected,
)
from vllm_rollout.parts.feeds.http.answers import FeedAnswer, FeedBatch, FeedsAnswer
from vllm_rollout.parts.feeds.http.body import BatchRequest, FeedRequest, PutRequest
from vllm_rollout.parts.feeds.http.service import FeedService

router: APIRouter = APIRouter(route_class=RolloutRoute, tags=["feeds"])
ROUTES = {45: router}
OF_FIRST = ("/v1/feeds", "/finish_weight_update", "/update_weight_version", "/v1/weights/adapter_version")
"""Paths of the first process. It has the feeds, which hear each name of weights from it."""

NO_BATCH = "There was no batch within timeout_s seconds. The message says what it waits for."


def _feeds(request: Request) -> FeedService:
    service: FeedService = request.app.state.feed_service
    return service


@router.post(
    "/v1/feeds",
    summary="Create a feed: batches of groups with a bound on staleness",
    response_model=FeedAnswer,
    status_code=HTTPStatus.CREATED,
    responses={
        **ROLLOUT_ERRORS,
        200: {"model": FeedAnswer, "description": "A feed on the same terms exists already."},
    },
)
async def create_feed(body: FeedRequest, request: Request) -> Response:
    """Create a feed. Prompts go in, batches of complete groups come out, and generation goes on in between.

    A feed has `(max_staleness + 1) * batch` places, for groups that run, are complete or were taken. A weights update
    frees the places of one taken batch. Filtered, failed and dropped groups give their places back.
    """
    answer, is_new = await _feeds(request).create(body)
    return json_response(answer, HTTPStatus.CREATED if is_new else HTTPStatus.OK)


@router.get("/v1/feeds", summary="All feeds of this API key", response_model=FeedsAnswer, responses=ERRORS)
async def list_feeds(request: Request) -> Response:
    return json_response(await _feeds(request).read_all())


@router.get("/v1/feeds/{feed_id}", summary="A feed as it is now", response_model=FeedAnswer, responses=ERRORS)
async def get_feed(feed_id: str, request: Request) -> Response:
    return json_response(await _feeds(request).read(feed_id))


@router.delete(
    "/v1/feeds/{feed_id}",
    summary="Delete a feed, and stop its groups",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=ERRORS | errors_of(507),
)
async def delete_feed(feed_id: str, request: Request) -> Response:
    await _feeds(request).delete(feed_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.post(
    "/v1/feeds/{feed_id}/prompts",
    summary="Put prompts into a feed",
    response_model=FeedAnswer,
    responses=ERRORS | errors_of(409, 507),
)
async def put_prompts(feed_id: str, body: PutRequest, request: Request) -> Response:
    """Put prompts behind those that wait. Each becomes a group as soon as the bound on staleness allows it."""
    return json_response(await _feeds(request).put(feed_id, body))


@router.post(
    "/v1/feeds/{feed_id}/batches",
    summary="Take a batch",
    response_model=FeedBatch,
    responses={**ERRORS, **errors_of(409, 410, 507), 504: {"model": ErrorAnswer, "description": NO_BATCH}},
)
async def take_batch(feed_id: str, body: BatchRequest, request: Request) -> Response:
    """Wait for a batch of complete groups, and take it. The oldest groups come first.

    A batch is taken once. The same `idempotency_key` gives the same answer, so a lost answer costs no group. The
    answers of the two newest batches are kept.
    """
    work = _feeds(request).take(feed_id, body)
    answer = await unless_disconnected(request.receive, work)
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else PartsResponse(answer)
