"""What a round asks of the rollout service, and whether it may. Invariant: nothing is taken here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from vllm_rollout.group.rounds import OpenRound
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.kept import KeptCandidate, read_kept
from vllm_rollout.server.parsed import read_json
from vllm_rollout.server.protocol import Return, RolloutRequest
from vllm_rollout.server.rollout import Rollout
from vllm_rollout.server.runs.body import RoundRequest, RunRequest
from vllm_rollout.server.runs.store import StoredRun


def rollout_request(fields: Mapping[str, Any], group_size: int, num_candidates: int) -> RolloutRequest:
    return RolloutRequest.model_validate(
        {"redundancy": num_candidates - group_size, "audit_ratio": 0.0, **fields, "group_size": group_size}
    )


def round_request(
    fields: Mapping[str, Any], prompts: list[str], group_size: int, num_candidates: int
) -> RolloutRequest:
    bodies = [read_json(prompt.encode()) for prompt in prompts]
    return rollout_request({**fields, "prompts": bodies}, group_size, num_candidates)


def without_speculation(fields: dict[str, Any]) -> dict[str, Any]:
    """Of a long round: every candidate counts."""
    kept = {name: value for name, value in fields.items() if name not in ("redundancy", "early_stop", "selection")}
    if kept.get("pruning") is not None:
        kept["pruning"] = {**kept["pruning"], "mode": "shadow"}
    return kept


def resumed(opened: OpenRound, waiting: Mapping[int, tuple[str, bytes | None]]) -> dict[int, Sequence[KeptCandidate]]:
    """By position; a prompt of which nothing is kept starts anew."""
    blobs = {position: waiting.get(entry.number, ("", None))[1] for position, entry in enumerate(opened.all_entries)}
    return {position: read_kept(blob) for position, blob in blobs.items() if blob is not None}


def check_resumable(rollout: Rollout) -> None:
    for prompt in rollout.prompts:
        if prompt.resume_refusal is not None:
            raise prompt.resume_refusal


def check_unchanged(request: RoundRequest, defaults: RunRequest) -> None:
    """What is kept was sampled as the run says, and is returned so."""
    for name, said, of_run in (
        ("sampling", request.sampling, defaults.sampling or {}),
        ("return", request.return_, defaults.return_ or Return()),
    ):
        if said is not None and said != of_run:
            raise RequestError(
                f"{name}: rounds of a run that resumes take it from the run, got {said!r:.120}. Leave it out, or make "
                "a run without resume.",
                param=name,
            )


def check_same(key: str, request: RoundRequest, memo: str | None) -> None:
    if not request.is_repeat and request.memo() != memo:
        raise RequestError(
            f"idempotency_key: {key!r} is the key of another round of this run. Repeat that round's request as it was "
            "(or its key alone), or take a new key.",
            status=HTTPStatus.CONFLICT,
            param="idempotency_key",
        )


def check_not_used(stored: StoredRun, key: str) -> None:
    run = stored.run
    number = next((record.number for record in run.history if record.key == key), None)
    if number is not None:
        raise RequestError(
            f"idempotency_key: {key!r} was round {number} of this run; its prompts were returned, and its answer is "
            f"not kept any more, as {run.num_rounds - 1 - number} rounds came after it. Take a new key.",
            status=HTTPStatus.GONE,
            param="idempotency_key",
        )
    if key in run.given_up:
        raise RequestError(
            f"idempotency_key: the round of {key!r} was given up, and its prompts wait. Take a new key.",
            status=HTTPStatus.GONE,
            param="idempotency_key",
        )


def not_written(over: OpenRound, key: str) -> RequestError:
    """What another key hears while the outcome of a round cannot be written."""
    return RequestError(
        f"round {over.number} of this run is over and not written yet, got key {key!r}. "
        f"Repeat its key, {over.key!r}, for its answer.",
        status=HTTPStatus.CONFLICT,
        param="idempotency_key",
    )
