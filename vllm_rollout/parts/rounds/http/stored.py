"""Rows of runs on disk, and answers about runs for clients.

Invariant: a row that no server has written harms only its own run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from vllm_rollout.checks import MAX_SHOWN, integer, is_writable, text
from vllm_rollout.kernel.http.clients import id_of
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.rounds.http.answers import (
    OpenGroupAnswer,
    OpenRoundAnswer,
    ParallelismAnswer,
    RoundRecordAnswer,
    RunAnswer,
    RunTotals,
    SavingsAnswer,
)
from vllm_rollout.parts.rounds.http.body import RunRequest
from vllm_rollout.parts.rounds.http.earlier import with_new_names
from vllm_rollout.parts.rounds.rules.rounds import OpenRound, Run
from vllm_rollout.parts.rounds.rules.rounds_state import run_from_state

MAX_MODEL_CHARS = 4096


class UnreadableRun(RequestError):
    """Stands for a run that cannot be read. Lists and saved states go on without it, and it can be deleted."""

    def __init__(self, name: Any, error: Exception, owner: str | None = None) -> None:
        id = id_of(name) if isinstance(name, str) else name
        reason, *_ = f"{error}\n".encode(errors="backslashreplace").decode().splitlines()
        super().__init__(
            f"run {id!r} cannot be read from disk ({reason:.{MAX_SHOWN}}). The prompts that wait in it are lost, "
            "unless a saved state has them; other runs are whole. To go on, PUT such a state to /v1/rollouts/state, or "
            "DELETE the run, make it again and hand in what had not come back.",
            status=HTTPStatus.INTERNAL_SERVER_ERROR,
        )
        self.id = id if isinstance(id, str) and is_writable(id) else repr(id)
        self.owner = owner


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run that can be read."""

    name: str
    """The run's name with its client's namespace (`owned_name`)."""
    created: int
    model: str
    settings: Mapping[str, Any]
    """The run's request as JSON."""
    request: RunRequest
    """`settings` as a model."""
    run: Run
    owner: str | None
    """Owner of the open round: a process, and a number for its round."""
    memo: str | None
    """The memo of the open round's request."""

    @property
    def id(self) -> str:
        """The run's id as its client knows it."""
        return id_of(self.name)


class StoredAnswer(NamedTuple):
    memo: str
    """The memo of the request that it answers."""
    body: bytes


class UsedKey(NamedTuple):
    """A key under which a round was begun."""

    round: int
    is_given_up: bool


class Looked(NamedTuple):
    """A run and the state of a key, at one moment."""

    stored: StoredRun
    answer: StoredAnswer | None
    """The answer of the key's round, if it is still kept."""
    used: UsedKey | None
    """None if the key is new."""
    answered: Sequence[str]
    """Keys whose answers are still kept, oldest first."""


class EndedGroup(NamedTuple):
    version: str | None
    """Version of the weights with which the round began."""
    body: bytes
    """A GroupAnswer, or a PromptSessions in a round of sessions, as compressed JSON."""


class PlannedRound(NamedTuple):
    """A planned round and what the run has of its prompts, at one moment."""

    stored: StoredRun
    opened: OpenRound
    waiting: Mapping[int, tuple[str, bytes | None]]
    """Body and kept output of each waiting prompt, by number."""
    ended: Mapping[int, EndedGroup]
    """Finished groups of the open round, by number."""


def read_run(row: Sequence[Any]) -> StoredRun | UnreadableRun:
    """A run, from all columns of its row in `runs`."""
    name, created, model, settings, state, owner, memo = row
    owner = owner if isinstance(owner, str) else None
    try:
        settings, run = json.loads(settings), run_from_state(json.loads(state))
        request = RunRequest.model_validate(with_new_names(settings))
        if run.terms != request.terms:
            raise ValueError(f"its terms are not its settings', got {run.terms}")
        if run.open is not None and not isinstance(memo, str):
            raise ValueError("its open round has no request")
        text(model, "model of a run", MAX_MODEL_CHARS)
        integer(created, "created of a run")
    except (ValueError, TypeError, RecursionError) as error:
        return UnreadableRun(name, error, owner)
    # Rows of an earlier version lack newer fields. The run has their defaults.
    return StoredRun(name, created, model, request.settings, request, run, owner, memo)


def run_answer(
    stored: StoredRun,
    *,
    is_live: bool,
    is_durable: bool,
    parallelism: ParallelismAnswer | None,
    groups: Sequence[OpenGroupAnswer] = (),
) -> RunAnswer:
    """A run as clients read it."""
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
        sessions=request.settings.get("sessions"),
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
            groups=list(groups),
        ),
        history=[RoundRecordAnswer.model_validate(record) for record in run.history],
        totals=RunTotals.model_validate(run),
        savings=SavingsAnswer.model_validate(run.savings),
        receipt=run.receipt,
        parallelism=parallelism,
    )
