"""A run on disk -> its answer. Invariant: nothing is decided here."""

from __future__ import annotations

from dataclasses import asdict

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
    terms = asdict(run.terms) | ({} if request.redundancy is None else {"response_speculation": None})
    return RunAnswer(
        id=stored.id,
        created=stored.created,
        model=stored.model,
        **terms,
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
        history=[RoundRecordAnswer.model_validate(record) for record in run.history],
        totals=RunTotals.model_validate(run),
        savings=SavingsAnswer.model_validate(run.savings),
        parallelism=parallelism,
    )
