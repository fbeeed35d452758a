"""Answers about feeds (docs/reference/http.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag

from vllm_rollout.kernel.http.answers import GroupAnswer
from vllm_rollout.kernel.parts import face
from vllm_rollout.parts.feeds.http.born import BornFields
from vllm_rollout.parts.feeds.rules.feed import OnStale, OnUpdate, WaitsFor


class OfRollout(BornFields):
    """Fields of a group that its feed and its rollout add."""

    rollout_id: str
    """Name of its rollout for POST /v1/rollouts/{rollout_id}/rewards."""


class FeedGroup(GroupAnswer, OfRollout):
    """A complete group. `weight_versions` of its trajectories are the versions of their tokens."""


class FeedShare(BaseModel):
    """Lengths and rewards of some groups."""

    num_groups: int
    mean_tokens: float | None
    """Mean over groups of a group's mean length. Null without a group."""
    mean_reward: float | None
    """Mean over groups with rewards. Null if there is none."""


class FeedMeter(BaseModel):
    """Lengths and rewards of all groups since the feed began, by what became of them."""

    admitted: FeedShare
    """All groups. Running groups count with the tokens that are known so far, so the length is a lower bound."""
    trained: FeedShare
    """Groups of batches, this one too."""
    filtered: FeedShare
    dropped: FeedShare
    """Groups that became too old."""
    failed: FeedShare
    complete: FeedShare
    """Groups that no batch has yet."""
    running: FeedShare
    """Groups that run, with the tokens of their ended candidates."""
    trained_std_error: float | None
    """Standard error of the mean length of trained groups, in tokens."""


class FailedPrompt(BaseModel):
    prompt_id: str
    reason: str


class FeedBatchSummary(BaseModel):
    """A batch without its groups."""

    object: Literal["feed.batch"] = "feed.batch"
    feed: str
    batch: int
    """Number of the batch, from 0."""
    idempotency_key: str
    version: int
    """Weights updates since the feed began."""
    weight_version: str | None
    """Name of the current weights."""
    max_staleness: int
    """Largest staleness of its groups."""
    num_over: int
    """Groups that are over the feed's bound, with on_stale "finish"."""
    dropped: list[str]
    """Ids of prompts whose groups became too old since the batch before. Put them again to run them again."""
    deferred: list[str]
    """Ids of prompts whose groups became too old since the batch before, with on_stale "defer". They run again."""
    filtered: list[str]
    """Ids of prompts whose groups were filtered since the batch before."""
    failed: list[FailedPrompt]
    """Prompts without a complete group since the batch before."""
    num_waiting: int
    """Prompts that wait to start."""
    waited_s: float
    """Seconds that the request has waited for the batch."""
    meter: FeedMeter
    warnings: list[str]


def _kind(group: Any) -> str:
    return "sessions" if "sessions" in (group if isinstance(group, dict) else vars(group)) else "rollout"


OfSessions: Any = face("feeds", "session_group")
"""A group of sessions. None without sessions."""
AnyGroup: Any = FeedGroup
if OfSessions is not None:
    AnyGroup = Annotated[
        Annotated[FeedGroup, Tag("rollout")] | Annotated[OfSessions, Tag("sessions")], Discriminator(_kind)
    ]


class FeedBatch(FeedBatchSummary):
    """A batch of complete groups, oldest first."""

    groups: list[AnyGroup]


class FeedTotals(BaseModel):
    num_put: int
    """Prompts that were put."""
    num_admitted: int
    num_taken: int
    num_filtered: int
    num_dropped: int
    num_failed: int
    generated_tokens: int
    wasted_tokens: int
    """Tokens that are in no complete group."""


class FeedAnswer(BaseModel):
    """A feed as it is now."""

    id: str
    object: Literal["feed"] = "feed"
    created: int
    model: str
    group_size: int
    batch: int
    max_staleness: int
    on_stale: OnStale
    on_update: OnUpdate
    filter: str | None
    sessions: dict[str, Any] | None
    """Options of its sessions. Null if its candidates are no sessions."""
    num_harnesses: int
    """Harnesses that run its sessions now."""
    defaults: dict[str, Any]
    """Fields of a rollout that hold for its groups."""
    version: int
    """Weights updates since the feed began."""
    weight_version: str | None
    """Name of the newest weights."""
    num_batches: int
    """Batches that were taken."""
    num_waiting: int
    """Prompts that wait to start."""
    num_deferred: int
    """Prompts whose groups became too old, and that wait for a long batch."""
    num_running: int
    """Groups that have begun and are not complete."""
    num_stopped: int
    """Groups among `num_running` that were stopped, and wait to go on."""
    num_complete: int
    """Complete groups that no batch has yet."""
    complete_bytes: int
    """Size of these groups as JSON, and of the tokens with which stopped groups go on."""
    max_complete_bytes: int
    """From this size on, only those groups start that the next batch lacks."""
    capacity: int
    """Groups that may start before the next weights update."""
    waits_for: WaitsFor
    """Reason why the next batch is not complete. `groups`: more have to complete. `older_groups`: a batch waits for
    groups that would become too old. `prompts`: put more. `weights`: nothing may start before a weights update with a
    new name. `trainer`: a batch is complete, and may be taken. `harness`: nobody runs the feed's sessions. `fields`:
    the server refuses the feed's fields, as `refusal` says."""
    refusal: str | None
    """Reason why the server refuses the feed's fields, such as a reward that it no longer has. No group starts. Null if
    it refuses none. A request for a batch tries again."""
    totals: FeedTotals
    meter: FeedMeter


class FeedsAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[FeedAnswer]
