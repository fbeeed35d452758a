"""Calls of a server about feeds. Invariant: as in `kernel/client/calls.py`."""

from __future__ import annotations

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
from vllm_rollout.kernel.client.calls import Call, typed
from vllm_rollout.parts.feeds.http.answers import FeedAnswer, FeedBatch, FeedsAnswer
from vllm_rollout.parts.feeds.http.body import DEFAULT_TIMEOUT_S, FeedRequest

MARGIN_S = 60.0
"""Seconds of silence that a client allows beyond the time for which the server waits."""


class FeedOptions(GroupOptions, total=False):
    """Options of a feed, and those of its groups."""

    redundancy: Redundancy
    max_staleness: int
    on_stale: str
    on_update: str
    filter: str | None
    sessions: Mapping[str, Any] | None
    model: str | None


@takes_options(FeedOptions, FeedRequest)
def create_feed(group_size: int, batch: int, id: str | None = None, **options: Unpack[FeedOptions]) -> Call[FeedAnswer]:
    """Create a feed: batches of `batch` groups with `group_size` trajectories each, while generation goes on.

    `id`: your name for the feed. If a feed of this name has the same terms, it continues. Use the feed as a context
    manager, which deletes it at the end.

    Raises: RolloutError, 409 if a feed of this name has other terms.
    """
    body = {"id": id, "group_size": group_size, "batch": batch, **option_fields(options, FeedOptions)}
    return Call("POST", "/v1/feeds", typed(FeedAnswer), said(body))


def feed(id: str) -> Call[FeedAnswer]:
    """The feed as it is now. Raises: RolloutError (404)."""
    return Call("GET", f"/v1/feeds/{id}", typed(FeedAnswer))


def feeds() -> Call[list[FeedAnswer]]:
    """All feeds of this client's API key, as they are now."""
    return Call("GET", "/v1/feeds", lambda response: typed(FeedsAnswer)(response).data)


def delete_feed(id: str) -> Call[None]:
    """Delete the feed, and stop its groups. Raises: RolloutError (404)."""
    return Call("DELETE", f"/v1/feeds/{id}", lambda _: None)


def put(id: str, prompts: Iterable[PromptLike], key: str) -> Call[FeedAnswer]:
    """Put prompts behind those that wait. A request repeated with its key puts them once."""
    bodies = [prompt_body(prompt, position) for position, prompt in enumerate(prompts)]
    body = {"prompts": bodies, "idempotency_key": key}
    return Call("POST", f"/v1/feeds/{id}/prompts", typed(FeedAnswer), body)


def batch(id: str, key: str, *, drain: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S) -> Call[FeedBatch]:
    """Wait for a batch, and take it."""
    body = {"idempotency_key": key, "drain": drain, "timeout_s": timeout_s}
    return Call("POST", f"/v1/feeds/{id}/batches", typed(FeedBatch), body, timeout_s + MARGIN_S)


def new_key(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
