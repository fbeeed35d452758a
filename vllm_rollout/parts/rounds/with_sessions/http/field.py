"""The field `sessions` of a run: its rounds consist of sessions. Invariant: a run that it refuses has never begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_rollout.parts.rounds.rules.rounds import ALLOW_FEWER
from vllm_rollout.parts.sessions.http.body import SessionOptions

if TYPE_CHECKING:
    from vllm_rollout.parts.rounds.http.body import RunRequest


def check(request: RunRequest) -> None:
    """Check options for sessions. Raises: ValueError for fields that sessions do not have, or set themselves."""
    sessions: SessionOptions = request.sessions
    sessions.check_beside(request.rollout_fields(), "a run whose rounds consist of sessions")
    if request.resume:
        raise ValueError(
            "resume: must be false for sessions, got true: a deferred prompt's conversations begin anew, since "
            "their tools do not go on with them. Leave it out."
        )
    if request.queue_order != "first_in":
        raise ValueError(
            f"queue_order: must be first_in for sessions, got {request.queue_order!r}: their lengths are not learned. "
            "Leave it out."
        )
    if (field := sessions.allows_fewer_by) is not None:
        raise ValueError(ALLOW_FEWER.format(f"sessions.{field}"))
