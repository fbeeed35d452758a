"""The endpoints of runs (docs/reference/http.md). Invariant: as of kernel/http/routes.py."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.kernel.http.errors import ERRORS, ROLLOUT_ERRORS, errors_of
from vllm_rollout.kernel.http.serialised import (
    CLIENT_CLOSED_REQUEST,
    EventStream,
    PartsResponse,
    event_stream_schema,
    json_response,
    server_sent_events,
    unless_disconnected,
)
from vllm_rollout.parts.rounds.http.answer_events import events_of_answer
from vllm_rollout.parts.rounds.http.answers import RunAnswer, RunsAnswer
from vllm_rollout.parts.rounds.http.body import RoundRequest, RunRequest
from vllm_rollout.parts.rounds.http.of_sessions import ANY_ANSWER, ANY_EVENT
from vllm_rollout.parts.rounds.http.service import RunService

RUN_ERRORS = ERRORS | errors_of(409, 507)

router: APIRouter = APIRouter(route_class=RolloutRoute, tags=["runs"])
ROUTES = {40: router}
OF_FIRST = ("/v1/runs",)


def _runs(request: Request) -> RunService:
    service: RunService = request.app.state.run_service
    return service


@router.post(
    "/v1/runs",
    summary="Create a run: tail batching over the rounds of a training",
    response_model=RunAnswer,
    status_code=HTTPStatus.CREATED,
    responses={
        **RUN_ERRORS,
        **ROLLOUT_ERRORS,
        200: {"model": RunAnswer, "description": "A run on the same terms exists already."},
    },
)
async def create_run(body: RunRequest, request: Request) -> Response:
    """Create a run. A run keeps prompts that took too long in a queue, from round to round.

    With `--rollout-state` the queue is on disk. A short round runs `prompt_speculation` x `prompts_per_round` prompts
    and returns the first that complete. The others wait. When as many prompts wait as a round returns, a long round
    runs them to their end. `next_round` and `num_fresh_prompts` say what comes next.
    """
    answer, is_new = await _runs(request).create(body)
    return json_response(answer, HTTPStatus.CREATED if is_new else HTTPStatus.OK)


@router.get("/v1/runs", summary="All runs", response_model=RunsAnswer, responses=ERRORS)
async def list_runs(request: Request) -> RunsAnswer:
    return await _runs(request).list()


@router.get("/v1/runs/{run_id}", summary="A run as it is now", response_model=RunAnswer, responses=ERRORS)
async def get_run(run_id: str, request: Request) -> RunAnswer:
    """Read a run: its next round and the prompts that this round wants, waiting prompts, past rounds and savings."""
    return await _runs(request).read(run_id)


@router.delete(
    "/v1/runs/{run_id}",
    summary="Delete a run and its waiting prompts",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses=RUN_ERRORS,
)
async def delete_run(run_id: str, request: Request) -> Response:
    """Delete a run and the prompts that wait in it. 409 while a round of it runs."""
    await _runs(request).delete(run_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.post(
    "/v1/runs/{run_id}/rounds",
    summary="One round of a run",
    response_model=ANY_ANSWER,
    responses={
        **RUN_ERRORS,
        **ROLLOUT_ERRORS,
        **errors_of(410, 504),
        200: {
            "description": "The groups that the round returns. With `stream`: server-sent events.",
            "content": {"text/event-stream": event_stream_schema(ANY_EVENT)},
        },
    },
)
async def create_round(run_id: str, body: RoundRequest, request: Request) -> Response:
    """Run one round and answer as `/v1/rollouts` does, with the groups that the round returns.

    The prompts are on disk before anything runs, and the outcome is on disk before it is sent. The same
    `idempotency_key` gives the same answer, or runs the round anew if it was interrupted. So no prompt is returned
    twice, and none is lost.

    With `stream` the events are those of a rollout, with `round` first. A `deferred` event means that a prompt waits
    for a long round. Earlier events of its group are then void.

    In a run of sessions, `declared` events name the sessions to run. The round is over when a harness has run enough of
    them.
    """
    service = _runs(request)
    begun = await service.begin(run_id, body)
    if isinstance(begun, bytes):
        if body.stream:
            return EventStream(server_sent_events(f"a round of run {run_id}", events_of_answer(begun)))
        return PartsResponse([begun])
    if body.stream:
        return EventStream(server_sent_events(f"round {begun.live.id}", begun.events))
    answer = await unless_disconnected(request.receive, service.answer(begun))
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else PartsResponse([answer])


@router.delete(
    "/v1/runs/{run_id}/rounds/{number}",
    summary="Give up an interrupted round",
    response_model=RunAnswer,
    responses=RUN_ERRORS,
)
async def give_up_round(run_id: str, number: int, request: Request) -> RunAnswer:
    """Give up an interrupted round. Its prompts wait again, as if it had never begun, and its key is used up. 409
    while it runs."""
    return await _runs(request).give_up(run_id, number)
