"""Answers about runs (docs/reference/http.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from vllm_rollout.group.lengths.receipt import Receipt
from vllm_rollout.group.plans.fields import QueueOrder
from vllm_rollout.group.ranks.planner import Reason
from vllm_rollout.group.rounds.rounds import RoundKind


class OfAttributes(BaseModel):
    """An answer that is read off the object it describes."""

    model_config = ConfigDict(from_attributes=True)


class OpenGroupAnswer(BaseModel):
    """A group of sessions that is to be run."""

    prompt_id: str
    group_id: str


class OpenRoundAnswer(BaseModel):
    """A round that was begun and has no answer yet."""

    round: int
    idempotency_key: str
    kind: RoundKind
    state: Literal["running", "interrupted"]
    """`interrupted`: repeat its key, or DELETE it to put its prompts back."""
    prompt_ids: list[str]
    reserve: list[str]
    groups: list[OpenGroupAnswer] = []
    """Those that are not over, where a round runs that consists of sessions."""


class RoundRecordAnswer(OfAttributes):
    """A round that is over."""

    round: int = Field(validation_alias=AliasChoices("round", "number"))
    idempotency_key: str = Field(validation_alias=AliasChoices("idempotency_key", "key"))
    kind: RoundKind
    num_returned: int
    num_filtered: int
    num_deferred: int
    max_tokens: int
    latency_s: float
    generated_tokens: int
    returned_tokens: int


class RunTotals(OfAttributes):
    num_prompts: int = Field(validation_alias=AliasChoices("num_prompts", "num_handed_in"))
    """Handed in: returned + filtered + waiting + in the open round."""
    num_returned: int
    num_filtered: int
    num_waiting: int
    num_deferrals: int = Field(validation_alias=AliasChoices("num_deferrals", "num_deferred"))
    generated_tokens: int
    returned_tokens: int
    latency_s: float


class SavingsAnswer(OfAttributes):
    """Decode steps of the longest trajectory of each round, against rounds that wait for all."""

    round_tokens: int
    synchronous_tokens: int
    ratio: float | None
    """An estimate from below; null while too few prompts are back."""


class ForecastAnswer(OfAttributes):
    """What a round was expected to take."""

    seconds: float
    num_preemptions: int


class ParallelismAnswer(BaseModel):
    """The engine's tensor-parallel size, of a server with `--rollout-parallelism auto`."""

    tensor_parallel_size: int
    allowed_sizes: list[int]
    next_size: int
    """The size of the next round: the engine is rebuilt before it, when this is another."""
    reason: Reason
    preemptions_per_candidate: float | None
    """How often that was in the newest round of any run; null before the first."""
    level: float
    """What it was compared with."""
    is_rebuilding: bool
    """Rounds and other requests wait for the engine."""
    num_rebuilds: int
    last_rebuild_s: float | None
    forecasts: dict[int, ForecastAnswer] | None = None
    """Forecasts for the first run's first round by tensor-parallel size, if a profile said where to begin."""


class RunAnswer(BaseModel):
    """A run as it is now."""

    id: str
    object: Literal["run"] = "run"
    created: int
    model: str
    group_size: int
    prompts_per_round: int
    prompt_speculation: float
    response_speculation: float | None
    """Null where redundancy says how many candidates a prompt has."""
    queue_order: QueueOrder
    resume: bool
    filter: str | None
    sessions: dict[str, Any] | None = None
    """What its groups of sessions have in common; null where the server generates the answers."""
    defaults: dict[str, Any]
    """Rollout fields that its rounds need not say."""
    is_durable: bool
    """It is on disk: the server was started with --rollout-state."""
    next_round: RoundKind
    num_fresh_prompts: int
    """How many prompts the next round wants."""
    queue: list[str]
    """Prompt ids that wait for a long round, the oldest first."""
    unstarted: list[str]
    """Prompt ids that are the first of the next short round."""
    num_rounds: int
    open_round: OpenRoundAnswer | None
    history: list[RoundRecordAnswer]
    """The newest rounds, oldest first."""
    totals: RunTotals
    savings: SavingsAnswer
    receipt: Receipt | None = None
    """The sum over rounds that are over. What a long round took is taken off: waiting for all would not need it."""
    parallelism: ParallelismAnswer | None = None
    """Null without `--rollout-parallelism auto`."""


class UnreadableRunAnswer(BaseModel):
    """A run whose row on disk is damaged. It can be deleted."""

    id: str
    message: str
    """What is lost, and how to go on."""


class RunsAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[RunAnswer]
    unreadable: list[UnreadableRunAnswer] = []
