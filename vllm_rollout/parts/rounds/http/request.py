"""The rollout request of a round, and checks of it. Invariant: no prompts are taken here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from vllm_rollout.checks import MAX_SHOWN
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.parsed import read_json
from vllm_rollout.kernel.http.protocol import DEFAULT_INCLUDE, RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.parts.rounds.http.body import RoundPrompt, RoundRequest, RunRequest
from vllm_rollout.parts.rounds.http.kept import KeptCandidate, read_kept
from vllm_rollout.parts.rounds.http.stored import Looked, PlannedRound
from vllm_rollout.parts.rounds.rules.rounds import OpenRound, Run


def rollout_request(fields: Mapping[str, Any], group_size: int, num_candidates: int) -> RolloutRequest:
    usual = {"redundancy": num_candidates - group_size, "audit_ratio": 0.0, "order": "prompts"}
    return RolloutRequest.model_validate({**usual, **fields, "group_size": group_size})


def round_request(
    fields: Mapping[str, Any], prompts: list[str], group_size: int, num_candidates: int
) -> RolloutRequest:
    bodies = [read_json(prompt.encode()) for prompt in prompts]
    return rollout_request({**fields, "prompts": bodies}, group_size, num_candidates)


def bodies_of(planned: PlannedRound, fresh: Mapping[str, str]) -> list[str]:
    """Bodies of a round's prompts, in order. `fresh`: bodies that come with the round's request, by id.

    Raises: RequestError for a waiting prompt that cannot be read.
    """
    bodies = []
    for entry in planned.opened.all_entries:
        if (body := fresh.get(entry.prompt_id)) is None:
            body, _ = planned.waiting.get(entry.number, ("", None))
            try:
                if RoundPrompt.model_validate_json(body).id != entry.prompt_id:
                    raise ValueError("it is another prompt")
            except ValueError as error:
                raise _unreadable_prompt(planned.stored.id, entry.prompt_id, error) from error
        bodies.append(body)
    return bodies


def _unreadable_prompt(run_id: str, prompt_id: str, error: ValueError) -> RequestError:
    return RequestError(
        f"prompt {prompt_id!r} waits in run {run_id!r} and cannot be read from disk ({error!s:.{MAX_SHOWN}}): it is "
        "lost, unless a saved state has it. To go on, PUT such a state to /v1/rollouts/state, or DELETE the run, make "
        "it again and hand in what GET /v1/runs/{id} says that waits.",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
    )


def without_speculation(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a long round, in which every candidate counts."""
    kept = {name: value for name, value in fields.items() if name not in ("redundancy", "early_stop", "selection")}
    if kept.get("pruning") is not None:
        kept["pruning"] = {**kept["pruning"], "mode": "shadow"}
    return kept


class Resumed(NamedTuple):
    candidates: dict[int, Sequence[KeptCandidate]]
    """Kept candidates by position. A prompt without any starts anew."""
    warnings: list[str]
    """Warnings about kept candidates that cannot be read."""


def resumed(planned: PlannedRound) -> Resumed:
    found = Resumed({}, [])
    for position, entry in enumerate(planned.opened.all_entries):
        _, blob = planned.waiting.get(entry.number, ("", None))
        if blob is None:
            continue
        try:
            found.candidates[position] = read_kept(blob)
        except (ValueError, TypeError) as error:
            found.warnings.append(
                f"prompt {entry.prompt_id!r} starts anew: what is kept of it cannot be read from disk ({error})."
            )
    return found


def check_resumable(rollout: Rollout) -> None:
    """Check that candidates can go on in a later round. Raises: RequestError."""
    for prompt in rollout.prompts:
        if prompt.resume_refusal is not None:
            raise prompt.resume_refusal


def check_unchanged(request: RoundRequest, defaults: RunRequest) -> None:
    """Check that a round does not change fields that kept candidates depend on. Raises: RequestError."""
    for name, said, of_run in (
        ("sampling_params", request.sampling_params, defaults.sampling_params or {}),
        ("include", request.include, DEFAULT_INCLUDE if defaults.include is None else defaults.include),
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


def check_not_used(looked: Looked, key: str) -> None:
    """Check that the key is not that of an earlier round, however old. Raises: RequestError (410)."""
    run, used = looked.stored.run, looked.used
    if used is None or (run.open is not None and run.open.key == key):
        return
    if used.is_given_up:
        message = f"the round of {key!r} was given up, and its prompts wait. Take a new key."
    else:
        message = (
            f"{key!r} was round {used.round} of this run; its prompts were returned, and its answer is not kept any "
            f"more, as {run.num_rounds - 1 - used.round} rounds came after it. Answers are kept of "
            f"{', '.join(map(repr, looked.answered)) or 'none'}. Take a new key for a new round."
        )
    raise RequestError(f"idempotency_key: {message}", status=HTTPStatus.GONE, param="idempotency_key")


def reopened(id: str, key: str, run: Run) -> OpenRound:
    """The open round with this key. Raises: RequestError (409) if the round has ended meanwhile."""
    if run.open is None or run.open.key != key:
        raise over_just_now(id, key)
    return run.open


def as_before(id: str, opened: OpenRound, request: RoundRequest, memo: str) -> RoundRequest:
    """A repeat, completed from the memo of the first request. Raises: RequestError for an invalid memo."""
    try:
        return request.as_before(memo)
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestError(
            f"what round {opened.number} of run {id!r} was asked to do cannot be read from disk. Its prompts can: "
            f"DELETE /v1/runs/{id}/rounds/{opened.number} puts them back, and a new round runs them.",
            status=HTTPStatus.INTERNAL_SERVER_ERROR,
        ) from error


def over_just_now(id: str, key: str) -> RequestError:
    return RequestError(
        f"round {key!r} of run {id!r} was over just now. Repeat the request for its answer.",
        status=HTTPStatus.CONFLICT,
        retry_after_s=1,
    )


def not_written(over: OpenRound, key: str) -> RequestError:
    """The error for another key while the outcome of a round cannot be written."""
    return RequestError(
        f"round {over.number} of this run is over and not written yet, got key {key!r}. "
        f"Repeat its key, {over.key!r}, for its answer.",
        status=HTTPStatus.CONFLICT,
        param="idempotency_key",
    )
