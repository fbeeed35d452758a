"""The field `sessions` of a feed: its candidates are sessions. Invariant: a feed that it refuses has never begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_rollout.kernel.http.protocol import RolloutFields
from vllm_rollout.parts.sessions.http.body import SessionOptions

if TYPE_CHECKING:
    from vllm_rollout.parts.feeds.http.body import FeedRequest


def check(request: FeedRequest) -> None:
    """Check options for sessions. Raises: ValueError for fields that sessions do not have, or set themselves."""
    sessions: SessionOptions = request.sessions
    said = {name: getattr(request, name) for name in RolloutFields.model_fields if name in request.model_fields_set}
    sessions.check_beside(said, "a feed of sessions")
    if request.on_update == "stop":
        raise ValueError(
            'on_update: must be "keep" or "recompute" for sessions, got "stop": their turns belong to the harness. '
            'Choose "recompute".'
        )
    if (field := sessions.allows_fewer_by) is not None:
        raise ValueError(f"sessions.{field}: groups of a feed are whole, got true. Leave it out.")
