"""Answers about runs, and answers and events of rounds (docs/reference/http.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from vllm_rollout.kernel.http.answers import DoneEvent, ErrorEvent, GroupsEvent, PartEvent, RolloutAnswer, VoidsGroup
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.parts.rounds.rules.fields import QueueOrder, RoundKind
from vllm_rollout.parts.rounds.rules.planner import SizeReason
from vllm_rollout.parts.rounds.rules.round_progress import DeferReason


class OfAttributes(BaseModel):
    """An answer whose fields are read from the attributes of an object."""

    model_config = ConfigDict(from_attributes=True)


class OpenGroupAnswer(BaseModel):
    """A group of sessions that a harness is to run."""

    prompt_id: str
    group_id: str


class OpenRoundAnswer(BaseModel):
    """A round that has begun and has no answer yet."""

    round: int
    idempotency_key: str
    kind: RoundKind
    state: Literal["running", "interrupted"]
    """`interrupted`: repeat its key to run it, or DELETE it to put its prompts back."""
    prompt_ids: list[str]
    reserve: list[str]
    groups: list[OpenGroupAnswer] = []
    """Groups that are not over, if a round of sessions runs."""


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
    """Prompts handed in: returned + filtered + waiting + in the open round."""
    num_returned: int
    num_filtered: int
    num_waiting: int
    num_deferrals: int = Field(validation_alias=AliasChoices("num_deferrals", "num_deferred"))
    generated_tokens: int
    returned_tokens: int
    latency_s: float


class SavingsAnswer(OfAttributes):
    """Savings of tail batching. Both token counts sum up each round's longest trajectory. `synchronous_tokens` is
    for rounds that wait for all prompts."""

    round_tokens: int
    synchronous_tokens: int
    ratio: float | None
    """Estimate of `synchronous_tokens` / `round_tokens`, from below. Null while too few prompts have been returned."""


class ForecastAnswer(OfAttributes):
    """Forecast for a round at one tensor-parallel size."""

    seconds: float
    num_preemptions: int


class ParallelismAnswer(BaseModel):
    """The engine's tensor-parallel size, of a server with `--rollout-parallelism auto`."""

    tensor_parallel_size: int
    allowed_sizes: list[int]
    next_size: int
    """Size for the next round. If it is another one, the engine is rebuilt first."""
    reason: SizeReason
    preemptions_per_candidate: float | None
    """Preemptions per candidate in the newest round of any run. Null before the first round."""
    level: float
    """Level that `preemptions_per_candidate` was compared with."""
    is_rebuilding: bool
    """True while rounds and other requests wait for a rebuild of the engine."""
    num_rebuilds: int
    last_rebuild_s: float | None
    forecasts: dict[int, ForecastAnswer] | None = None
    """Forecasts for the first run's first round by tensor-parallel size, if a profile chose the first size."""


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
    """Null if `redundancy` sets the number of candidates."""
    queue_order: QueueOrder
    resume: bool
    filter: str | None
    sessions: dict[str, Any] | None = None
    """Options that its groups of sessions share. Null if the server generates the answers."""
    defaults: dict[str, Any]
    """Fields of a rollout that hold for its rounds unless they set their own."""
    is_durable: bool
    """True if the run is on disk, because the server has --rollout-state."""
    next_round: RoundKind
    num_fresh_prompts: int
    """Number of fresh prompts that the next round wants."""
    queue: list[str]
    """Ids of prompts that wait for a long round, oldest first."""
    unstarted: list[str]
    """Ids of prompts that come first in the next short round."""
    num_rounds: int
    open_round: OpenRoundAnswer | None
    history: list[RoundRecordAnswer]
    """The newest rounds, oldest first."""
    totals: RunTotals
    savings: SavingsAnswer
    receipt: Receipt | None = None
    """Sum over finished rounds. The cost of long rounds is subtracted from the savings, since waiting for all
    candidates would not need long rounds."""
    parallelism: ParallelismAnswer | None = None
    """Null without `--rollout-parallelism auto`."""


class UnreadableRunAnswer(BaseModel):
    """A run whose row on disk is damaged. It can be deleted."""

    id: str
    message: str
    """The loss, and the way to go on."""


class RunsAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[RunAnswer]
    unreadable: list[UnreadableRunAnswer] = []


class RebuildAnswer(BaseModel):
    """The engine was rebuilt between two rounds. If no engine starts at the wanted size, it has the size that it had
    before."""

    wanted_size: int
    size_before: int
    tensor_parallel_size: int
    """Size since the rebuild."""
    reason: SizeReason
    seconds: float
    """Seconds for which requests waited."""


class RoundSummary(BaseModel):
    """A finished round of a run: the prompts that it did not return, and the kind and size of the next round."""

    run: str
    round: int
    kind: RoundKind
    idempotency_key: str
    deferred: list[str] = []
    """Ids of prompts that wait for a long round."""
    filtered: list[str] = []
    """Ids of prompts that left the run, because all rewards of their group were the same."""
    unstarted: list[str] = []
    """Ids of prompts that did not start. They are the first of the next short round."""
    next_round: RoundKind
    num_fresh_prompts: int
    """Number of fresh prompts that the next round wants."""
    num_waiting: int
    """Prompts of the run that were neither returned nor filtered yet."""
    rebuilt: RebuildAnswer | None = None
    """Since the round before, with `--rollout-parallelism auto`."""


class RoundAnswer(RoundSummary, RolloutAnswer):
    """The answer of a round: a rollout's answer, with the groups that the round returns."""


class RoundEvent(PartEvent):
    """A round begins. Rewards name its rollout by `id`."""

    type: Literal["round"] = "round"
    id: str
    run: str
    round: int
    kind: RoundKind
    idempotency_key: str
    num_wanted: int
    """Number of prompts that the round returns."""
    prompt_ids: list[str]
    reserve: list[str]
    rebuilt: RebuildAnswer | None = None
    """Since the round before, with `--rollout-parallelism auto`."""


class DeferredEvent(PartEvent, VoidsGroup):
    """A group waits for a long round. Earlier events of the group are void."""

    type: Literal["deferred"] = "deferred"
    prompt_id: str
    group_id: str
    reason: DeferReason


class FilteredEvent(PartEvent):
    """All rewards of a returned group are the same, so the group leaves the round."""

    type: Literal["filtered"] = "filtered"
    prompt_id: str


class RoundDoneEvent(RoundSummary, DoneEvent):
    """A round is over, and its outcome is saved."""


RoundStreamEvent = RoundEvent | GroupsEvent | DeferredEvent | FilteredEvent | RoundDoneEvent | ErrorEvent
EVENTS_AND_ANSWERS = (RoundAnswer, RoundEvent, DeferredEvent, FilteredEvent, RoundDoneEvent)
"""Classes that `vllm_rollout.answers` offers."""
