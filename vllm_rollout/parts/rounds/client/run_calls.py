"""Calls of a server about runs. Invariant: as in `calls.py`."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import Unpack

from vllm_rollout.kernel.client.body import (
    GroupOptions,
    PromptLike,
    Redundancy,
    option_fields,
    prompt_body,
    said,
    takes_options,
)
from vllm_rollout.kernel.client.calls import Call, EventsCall, typed
from vllm_rollout.parts.rounds.http.answers import RoundAnswer, RoundStreamEvent, RunAnswer, RunsAnswer
from vllm_rollout.parts.rounds.http.body import RunRequest

PATIENCE_S = 600.0
"""Seconds for which a round is asked for again while the server does not answer: a large server takes as long to start.
"""


class RoundOptions(GroupOptions, total=False):
    """Options of a round. Options that are left out are those of the run. A round's sampling parameters replace single
    ones of the run.
    """

    redundancy: Redundancy
    kind: str | None
    epoch: int | None


class RunOptions(GroupOptions, total=False):
    """Options of a run, and the defaults of its rounds."""

    redundancy: Redundancy
    prompt_speculation: float
    response_speculation: float
    queue_order: str
    sessions: Mapping[str, Any] | None
    resume: bool
    filter: str
    model: str


@takes_options(RunOptions, RunRequest)
def create_run(
    group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]
) -> Call[RunAnswer]:
    """Create a run: rounds that return `prompts_per_round` prompts with `group_size` trajectories each (tail batching).

    `id`: your name for the run. If a run of this name has the same terms, it continues. So a trainer that starts again
    finds its queue. Rollout options are the defaults of the run's rounds.

    Raises: RolloutError, 409 if a run of this name has other terms.
    """
    body = {
        "id": id,
        "group_size": group_size,
        "prompts_per_round": prompts_per_round,
        **option_fields(options, RunOptions),
    }
    return Call("POST", "/v1/runs", typed(RunAnswer), said(body))


def run(run_id: str) -> Call[RunAnswer]:
    """The run as it is now. Raises: RolloutError (404)."""
    return Call("GET", f"/v1/runs/{run_id}", typed(RunAnswer))


def runs() -> Call[list[RunAnswer]]:
    """All runs of the server."""
    return Call("GET", "/v1/runs", lambda response: typed(RunsAnswer)(response).data)


def delete_run(run_id: str) -> Call[None]:
    """Delete a run and the prompts that wait in it. Raises: RolloutError (404, or 409 while a round runs)."""
    return Call("DELETE", f"/v1/runs/{run_id}", lambda _: None)


def give_up_round(run_id: str, number: int) -> Call[RunAnswer]:
    """Put the prompts of an interrupted round back into the queue. Raises: RolloutError (404, or 409 while it runs)."""
    return Call("DELETE", f"/v1/runs/{run_id}/rounds/{number}", typed(RunAnswer))


def round(
    run_id: str,
    prompts: Iterable[PromptLike] = (),
    *,
    key: str,
    reserve: Iterable[PromptLike] = (),
    timeout: float | None = None,
    **options: Unpack[RoundOptions],
) -> Call[RoundAnswer]:
    """One round of a run, as one answer."""
    body = _round_body(prompts, reserve, key, options)
    return Call("POST", f"/v1/runs/{run_id}/rounds", typed(RoundAnswer), body, timeout)


def stream_round(
    run_id: str,
    prompts: Iterable[PromptLike] = (),
    *,
    key: str,
    reserve: Iterable[PromptLike] = (),
    stream_tokens: int | None = None,
    timeout: float | None = None,
    **options: Unpack[RoundOptions],
) -> EventsCall:
    """One round of a run, as events."""
    body = _round_body(prompts, reserve, key, options)
    body["stream"] = True
    if stream_tokens is not None:
        body["stream_tokens"] = stream_tokens
    return EventsCall(body, timeout, f"/v1/runs/{run_id}/rounds", RoundStreamEvent)


def agent_round(run_id: str, prompts: Iterable[PromptLike], *, key: str, **options: Unpack[RoundOptions]) -> EventsCall:
    """One round of a run whose rounds consist of sessions, as events."""
    body = _round_body(prompts, (), key, options)
    return EventsCall({**body, "stream": True}, None, f"/v1/runs/{run_id}/rounds")


def new_key() -> str:
    return f"round-{uuid.uuid4().hex}"


def named(prompt: PromptLike, position: int) -> dict[str, Any]:
    """The prompt with an id. A prompt without one gets an id made from its content."""
    body = prompt_body(prompt, position)
    if body.get("id") is None:
        text = json.dumps({field: value for field, value in body.items() if field != "id"}, sort_keys=True)
        body["id"] = f"prompt-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return body


def _round_body(
    prompts: Iterable[PromptLike], reserve: Iterable[PromptLike], key: str, options: RoundOptions
) -> dict[str, Any]:
    body = {
        "prompts": [named(prompt, position) for position, prompt in enumerate(prompts)],
        "reserve": [named(prompt, position) for position, prompt in enumerate(reserve)],
    }
    handed_in = {field: value for field, value in body.items() if value}
    return {"idempotency_key": key, **handed_in, **option_fields(options, RoundOptions)}
