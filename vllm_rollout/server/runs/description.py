"""A run on disk -> its answer. Invariant: nothing is decided here."""

from __future__ import annotations

from vllm_rollout.server.runs.answers import (
    OpenRoundAnswer,
    ParallelismAnswer,
    RoundRecordAnswer,
    RunAnswer,
    RunTotals,
    SavingsAnswer,
)
from vllm_rollout.server.runs.stored import StoredRun


def run_answer(
    stored: StoredRun, *, is_live: bool, is_durable: bool, parallelism: ParallelismAnswer | None
) -> RunAnswer:
    run, request = stored.run, stored.request
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
        parallelism=parallelism,
    )
