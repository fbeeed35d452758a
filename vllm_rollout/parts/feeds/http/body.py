"""Request bodies of feeds (docs/reference/http.md)."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from vllm_rollout.config import MAX_GROUP_SIZE, MAX_PROMPTS
from vllm_rollout.kernel.http.body import Body, of_table
from vllm_rollout.kernel.http.protocol import Prompt, RolloutFields
from vllm_rollout.kernel.http.rewards import Filter
from vllm_rollout.kernel.parts import face
from vllm_rollout.parts.feeds.rules.feed import FeedTerms, OnStale, OnUpdate

Key = Annotated[StrictStr, Field(min_length=1, max_length=256)]

MAX_STALENESS = 1024
"""Largest `max_staleness`."""
SPECULATION = frozenset({"redundancy", "early_stop", "selection"})
"""Fields of spare candidates, which a long batch does not have."""
DEFAULT_TIMEOUT_S = 600.0
OF_SESSIONS: Any = face("feeds", "sessions_field")
"""Type and check of the field `sessions`. None without the part sessions."""
MAX_TIMEOUT_S = 86_400.0


@of_table
class FeedRequest(RolloutFields):
    """Create a feed."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"id": "math-7b", "group_size": 8, "batch": 128, "max_staleness": 2, "redundancy": 4},
            ]
        }
    )

    id: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")] | None = Field(
        default=None,
        description="Your name for the feed: letters, digits and . _ : -, at most 128 characters. Creating it again "
        "on the same terms is no error. Default: the server makes one.",
    )
    model: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description="Name of a served model. Default: the first."
    )
    group_size: Annotated[StrictInt, Field(ge=1, le=MAX_GROUP_SIZE)] = Field(
        description="Trajectories that a group returns for its prompt (M)."
    )
    batch: Annotated[StrictInt, Field(ge=1, le=MAX_PROMPTS)] = Field(
        description=f"Complete groups of a batch (B). (max_staleness + 1) * batch is at most {MAX_PROMPTS}."
    )
    max_staleness: Annotated[StrictInt, Field(ge=0, le=MAX_STALENESS)] = Field(
        default=1,
        description="Most weights updates between the start of a group and its batch (eta). 0: on policy, and "
        "generation stops between a batch and the next update.",
    )
    on_stale: OnStale = Field(
        default="wait",
        description='Way to keep the bound. "wait": a batch waits for older groups that would become too old. "drop": '
        'groups that are too old are stopped and dropped. "finish": they are returned over the bound. "defer": they '
        "are stopped, and their prompts run again together, in a long batch without spare candidates.",
    )
    on_update: OnUpdate = Field(
        default="keep",
        description='Running groups when the weights get a new name. "recompute": their KV is computed again by the '
        'new weights. "stop": they stop, their tokens are kept, and they go on once no complete batch waits. "keep": '
        "left to the trainer, whose `give_weights` has an option of its own.",
    )
    filter: Filter | None = Field(
        default=None,
        description='"zero_variance": groups whose rewards are all the same are in no batch, and give their place to '
        "the next prompt (DAPO). It needs a reward.",
    )
    sessions: Any = Field(
        default=None,
        description="The candidates are sessions, which a harness runs (GET /v1/feeds/{feed_id}/events). The object "
        "has the fields that its groups share, as in POST /v1/groups. {} takes all defaults.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> FeedRequest:
        if (most := self.terms.num_places) > MAX_PROMPTS:
            raise ValueError(
                f"batch: (max_staleness + 1) * batch must be at most {MAX_PROMPTS}, got {most}. Lower one of them."
            )
        if self.on_update == "stop" and face("feeds", "going_on") is None:
            raise ValueError('on_update: "stop" needs the part rounds, which is left out. Choose another value.')
        if self.sessions is not None:
            if OF_SESSIONS is None:
                raise ValueError("sessions: need the part sessions, which is left out. Leave them out.")
            OF_SESSIONS.check(self)
        elif self.filter is not None and self.reward is None:
            raise ValueError("filter: needs a reward by which the server grades, got none. Name one, or leave it out.")
        if self.filter is not None and self.group_size < 2:
            raise ValueError("filter: needs a group_size of at least 2, got 1: one reward differs from none.")
        if (field := self.allows_fewer_by) is not None:
            raise ValueError(f"{field}: groups of a feed are whole, got true. Leave it out.")
        return self

    @property
    def terms(self) -> FeedTerms:
        return FeedTerms(self.batch, self.max_staleness, self.on_stale)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings as JSON. Another request for a feed of the same id needs the same settings."""
        return self.model_dump(mode="json", exclude={"id"})

    def rollout_fields(self, *, is_long: bool = False) -> dict[str, Any]:
        """Fields of the rollout of each prompt, as JSON. `is_long`: it belongs to a long batch."""
        names = {"model", "group_size", *RolloutFields.model_fields} - (SPECULATION if is_long else frozenset())
        fields = self.model_dump(mode="json", include=names, exclude_unset=True)
        fields["on_engine_failure"] = self.on_engine_failure
        if is_long and fields.get("pruning") is not None:
            fields["pruning"]["mode"] = "shadow"
        return fields


if OF_SESSIONS is not None:
    FeedRequest.model_fields["sessions"].annotation = OF_SESSIONS.SessionOptions | None
FeedRequest.model_fields["on_engine_failure"].default = "retry"
FeedRequest.model_rebuild(force=True)


class PutRequest(Body):
    """Put prompts into a feed."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompts": [{"id": "q1", "prompt": "17 + 25 ="}]}]})

    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)] = Field(
        description=f"From 1 to {MAX_PROMPTS} prompts. A prompt without an id gets the number of its turn in the feed. "
        "An id may come again once its group was taken."
    )
    idempotency_key: Key | None = Field(
        default=None,
        description="Your name for this request. If it is repeated, the prompts are put once. With other prompts it is "
        "refused (409).",
    )

    @property
    def digest(self) -> str:
        """A digest of the prompts."""
        return hashlib.sha256(self.model_dump_json(include={"prompts"}, exclude_none=True).encode()).hexdigest()


class BatchRequest(Body):
    """Take a batch."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"idempotency_key": "step-17"}]})

    idempotency_key: Key | None = Field(
        default=None,
        description="Your name for this batch. If it is repeated, the server sends the same answer. Default: the "
        "server makes a key.",
    )
    drain: StrictBool = Field(
        default=False,
        description="True: if no prompt waits and nothing runs, answer with the groups there are, perhaps none.",
    )
    timeout_s: Annotated[StrictFloat, Field(gt=0, le=MAX_TIMEOUT_S)] = Field(
        default=DEFAULT_TIMEOUT_S,
        description=f"Seconds after which a request without a batch is answered with 504, at most {MAX_TIMEOUT_S:g}.",
    )
