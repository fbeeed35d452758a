"""The terms of a group of sessions, from its declaration or from the first turn of a session, and fields of turns.

Invariant: this module opens no group.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_rollout.kernel.http.clients import client_headers
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.rules.rows import PlanError, rows
from vllm_rollout.kernel.rules.terms_port import PartTerms
from vllm_rollout.kernel.xargs import NAMES, claimed_from_xargs
from vllm_rollout.parts.sessions.http.body import SessionGroupRequest
from vllm_rollout.parts.sessions.http.fields import SessionFields, TurnFields
from vllm_rollout.parts.sessions.http.groups import OpenGroup, Terms, limits_of


class TurnSaid(NamedTuple):
    """Fields of a request that is one turn of a session."""

    session: str
    last: bool
    group: Mapping[str, Any]
    """Fields of the group, by name. The first turn needs them, later turns may repeat them."""


def client_session() -> str | None:
    """The session that the header X-Session-ID of the current request names."""
    return client_headers().get("x-session-id")


def turn_from_xargs(xargs: Mapping[str, object], named: str | None, *, n: int) -> TurnSaid:
    """Read the fields of a turn. `named`: the session of the request header.

    Raises: PlanError with the field's name as the user wrote it.
    """
    said = claimed_from_xargs(xargs)
    session = said.pop("session", named)
    if session is None:
        raise PlanError(NAMES["session"], "is required, or the header X-Session-ID: which session this is a turn of.")
    rows(TurnFields)["session"].check(session, NAMES["session"])
    if n != 1:
        raise PlanError(NAMES["session"], f"a turn of a session has one answer, but n is {n}. Send n=1.")
    return TurnSaid(session, said.pop("last", False), said)


def asked_terms(request: SessionGroupRequest, pruning_refusal: Callable[[], str | None], audit_ratio: float) -> Terms:
    """The terms of a declared group.

    Args:
        pruning_refusal: returns the reason why this server cannot score. None if it can.
        audit_ratio: share of audit groups among pruned ones, unless the request sets one.

    Raises: RequestError.
    """
    return Terms(
        request.group_size,
        request.group_size + request.redundancy,
        limits_of(request.model_dump(include=set(rows(SessionFields)))),
        request.early_stop,
        request.selection,
        request.history == "rewritable",
        request.max_sessions,
        *_pruned(request, pruning_refusal, audit_ratio),
    )


def _pruned(
    request: SessionGroupRequest, pruning_refusal: Callable[[], str | None], audit_ratio: float
) -> tuple[dict[str, PartTerms], int, bool]:
    """Terms with the part that prunes, the turn to score, and True for an audit group. Raises: RequestError."""
    try:
        parts = request.part_terms()
    except PlanError as error:
        raise RequestError(str(error), param=error.field) from error
    if not parts:
        return {}, request.pruning_turn, random.random() < (request.audit_ratio or 0.0)
    if (refusal := pruning_refusal()) is not None:
        raise RequestError(f"pruning: {refusal}", param="pruning")
    if any(len(terms.scored_lengths) > 1 for terms in parts.values()):
        raise RequestError(
            "pruning.detection_length: sessions are scored at one length, which has to be named. Give a number.",
            param="pruning.detection_length",
        )
    ratio = audit_ratio if request.audit_ratio is None else request.audit_ratio
    return parts, request.pruning_turn, random.random() < ratio


def said_terms(said: TurnSaid) -> tuple[Terms, str]:
    """The terms of a group and its name, from the first turn of a session."""
    of_group = said.group
    for needed in ("group_id", "group_size"):
        if needed not in of_group:
            raise PlanError(
                NAMES[needed],
                f"is required with the first turn of a session that no group was declared for "
                f"(session {said.session!r:.80}). Send it, or declare the group by POST /v1/groups.",
            )
    size = of_group["group_size"]
    num_candidates = of_group.get("num_candidates", size)
    if num_candidates < size:
        raise PlanError(
            NAMES["num_candidates"],
            f"counts all sessions and must be at least {NAMES['group_size']} ({size}), got {num_candidates}.",
        )
    terms = Terms(
        size,
        num_candidates,
        limits_of(of_group),
        of_group.get("early_stop") is not False,
        is_rewritable=of_group.get("history") == "rewritable",
    )
    return terms, of_group["group_id"]


def check_same(group: OpenGroup, said: TurnSaid) -> None:
    """Check a turn against its group. Raises: PlanError if the turn contradicts the group's first turn."""
    known: dict[str, Any] = {
        "group_id": group.id,
        "group_size": group.terms.group_size,
        "num_candidates": group.terms.num_candidates,
        "early_stop": group.terms.early_stop,
        "history": "rewritable" if group.terms.is_rewritable else "strict",
        "cut_turn": "ends" if group.terms.limits.cut_turn_ends else "goes_on",
        **group.terms.limits._asdict(),
    }
    for name, value in said.group.items():
        if name in known and value != known[name]:
            raise PlanError(
                NAMES[name],
                f"of this session's group is {known[name]!r}, as its first turn said, got {value!r}. A session "
                "stays in its group: leave the field out, or name another session.",
            )


def most_sessions(terms: Terms) -> int:
    """The most sessions that the group may ever have. Raises: RequestError."""
    most = terms.max_sessions or 2 * terms.num_candidates
    if most < terms.num_candidates:
        raise RequestError(
            f"max_sessions: must be at least group_size + redundancy ({terms.num_candidates}), got {most}.",
            param="max_sessions",
        )
    return most
