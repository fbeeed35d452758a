"""Answers about runs (docs/http.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from vllm_rollout.group.rounds import QueueOrder, RoundKind
from vllm_rollout.server.runs.body import RunRequest
from vllm_rollout.server.runs.store import StoredRun


class OpenRoundAnswer(BaseModel):
    """A round that was begun and has no answer yet."""

    round: int
    idempotency_key: str
    kind: RoundKind
    state: Literal["running", "interrupted"]
    """`interrupted`: repeat its key, or DELETE it to put its prompts back."""
    prompt_ids: list[str]
    reserve: list[str]


class RoundRecordAnswer(BaseModel):
    """A round that is over."""

    round: int
    idempotency_key: str
    kind: RoundKind
    num_returned: int
    num_filtered: int
    num_deferred: int
    max_tokens: int
    latency_s: float
    generated_tokens: int
    returned_tokens: int


class RunTotals(BaseModel):
    num_prompts: int
    """Handed in: returned + filtered + waiting + in the open round."""
    num_returned: int
    num_filtered: int
    num_waiting: int
    num_deferrals: int
    generated_tokens: int
    returned_tokens: int
    latency_s: float


class SavingsAnswer(BaseModel):
    """Decode steps of the longest trajectory of each round, against rounds that wait for all."""

    round_tokens: int
    synchronous_tokens: int
    ratio: float | None
    """An estimate from below; null while too few prompts are back."""


class RunAnswer(BaseModel):
    """A run as it is now."""

    id: str
    object: Literal["run"] = "run"
    created: int
    model: str
    group_size: int
    prompts_per_round: int
    prompt_speculation: float
    response_speculation: float | None
    """Null where redundancy says how many candidates a prompt has."""
    queue_order: QueueOrder
    resume: bool
    filter: str | None
    defaults: dict[str, Any]
    """Rollout fields that its rounds need not say."""
    is_durable: bool
    """It is on disk: the server was started with --rollout-state."""
    next_round: RoundKind
    num_fresh_prompts: int
    """How many prompts the next round wants."""
    queue: list[str]
    """Prompt ids that wait for a long round, the oldest first."""
    unstarted: list[str]
    """Prompt ids that are the first of the next short round."""
    num_rounds: int
    open_round: OpenRoundAnswer | None
    history: list[RoundRecordAnswer]
    """The newest rounds, oldest first."""
    totals: RunTotals
    savings: SavingsAnswer


class RunsAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[RunAnswer]


def run_answer(stored: StoredRun, *, is_live: bool, is_durable: bool) -> RunAnswer:
    run, request = stored.run, RunRequest.model_validate(stored.settings)
    opened = run.open
    return RunAnswer(
        id=stored.id,
        created=stored.created,
        model=stored.model,
        group_size=run.terms.group_size,
        prompts_per_round=run.terms.prompts_per_round,
        prompt_speculation=run.terms.prompt_speculation,
        response_speculation=run.terms.response_speculation if request.redundancy is None else None,
        queue_order=run.terms.queue_order,
        resume=request.resume,
        filter=request.filter,
        defaults=request.rollout_fields(),
        is_durable=is_durable,
        next_round=run.next_kind,
        num_fresh_prompts=run.num_fresh,
        queue=[entry.prompt_id for entry in run.queue],
        unstarted=[entry.prompt_id for entry in run.carried],
        num_rounds=run.num_rounds,
        open_round=opened
        and OpenRoundAnswer(
            round=opened.number,
            idempotency_key=opened.key,
            kind=opened.kind,
            state="running" if is_live else "interrupted",
            prompt_ids=[entry.prompt_id for entry in opened.entries],
            reserve=[entry.prompt_id for entry in opened.reserve],
        ),
        history=[
            RoundRecordAnswer(
                round=record.number,
                idempotency_key=record.key,
                kind=record.kind,
                num_returned=record.num_returned,
                num_filtered=record.num_filtered,
                num_deferred=record.num_deferred,
                max_tokens=record.max_tokens,
                latency_s=record.latency_s,
                generated_tokens=record.generated_tokens,
                returned_tokens=record.returned_tokens,
            )
            for record in run.history
        ],
        totals=RunTotals(
            num_prompts=run.num_handed_in,
            num_returned=run.num_returned,
            num_filtered=run.num_filtered,
            num_waiting=run.num_waiting,
            num_deferrals=run.num_deferred,
            generated_tokens=run.generated_tokens,
            returned_tokens=run.returned_tokens,
            latency_s=run.latency_s,
        ),
        savings=SavingsAnswer(
            round_tokens=run.savings.round_tokens,
            synchronous_tokens=run.savings.synchronous_tokens,
            ratio=run.savings.ratio,
        ),
    )
