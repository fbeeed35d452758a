"""Bodies and answers of the endpoints of sessions (docs/guides/agents.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from vllm_rollout.config import MAX_GROUP_SIZE, MAX_TURNS
from vllm_rollout.group.plans.fields import MAX_NAME_CHARS, ROWS, SessionFields, Until
from vllm_rollout.group.racing.sessions import EndedBy, SessionState
from vllm_rollout.group.types import GroupStatus
from vllm_rollout.server.body import Body, check_json, of_table
from vllm_rollout.server.grading.body import RewardField
from vllm_rollout.server.learning.body import RewardValue
from vllm_rollout.server.protocol import Pruning
from vllm_rollout.server.sessions.trajectory import History

Name = Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARS)]
DeclaredName = Annotated[StrictStr, Field(max_length=MAX_NAME_CHARS - 6, pattern=r"^[!-~]([ -~]*[!-~])?$")]
"""Sessions are called so, with a number behind it, in a header: ASCII, no space at its ends."""
Size = Annotated[StrictInt, Field(ge=1, le=MAX_GROUP_SIZE)]
SessionSelection = Literal["first", "shortest"]


@of_table
class SessionOptions(Body, SessionFields):
    """What a group of sessions says of itself, and a run of all its groups."""

    early_stop: StrictBool = Field(
        default=True, description="Stop a group's other sessions when group_size of them have finished."
    )
    selection: SessionSelection = Field(
        default="first", description="Rule that selects a group's sessions among its finished ones."
    )
    until: Until = Field(
        default="complete", description='"variance": the group is over when group_size rewards are known and differ.'
    )
    max_sessions: Size | None = Field(
        default=None,
        description="Upper bound of a group's sessions, with those in the place of void ones. Default: four times "
        'group_size with until "variance", otherwise twice the number at its start.',
    )
    pruning: Pruning | None = Field(
        default=None,
        description="Score each session in one of its turns, and stop sessions that will not help training.",
    )
    pruning_turn: Annotated[StrictInt, Field(ge=1, le=MAX_TURNS)] = Field(
        default=1, description="The turn in which detection_length counts tokens."
    )
    reward: RewardField | None = Field(
        default=None,
        description="Reward that grades a finished session whose finish brings no reward (docs/guides/rewards.md).",
    )


@of_table
class SessionGroupRequest(SessionOptions):
    """A group that is declared before its sessions begin."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": "step7-q1", "group_size": 8, "redundancy": 8, "max_turns": 10}]}
    )

    id: DeclaredName | None = Field(
        default=None,
        description="The group's name, in printable ASCII, since a header names its sessions. Default: the server "
        "makes a name.",
    )
    group_size: Size = Field(description=ROWS["group_size"].help)
    redundancy: Annotated[StrictInt, Field(ge=0, le=MAX_GROUP_SIZE)] = Field(
        default=0, description="Spare sessions beyond group_size."
    )
    audit_ratio: Annotated[StrictFloat, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Chance that no session of this group is stopped. Default with pruning: the server's "
        "--rollout-audit-ratio.",
    )
    data: Any = Field(default=None, description="Any JSON for the reward function, such as the solution.")

    @model_validator(mode="after")
    def _data_is_json(self) -> Self:
        check_json(self.data, "data")
        return self


class FinishRequest(Body):
    """A session is over."""

    reward: RewardValue | None = Field(
        default=None,
        description="Reward of the whole session. Default: the group's reward function grades the session, "
        "if the group has one.",
    )
    void: StrictBool = Field(
        default=False,
        description="If a tool or a sandbox failed, true makes the session count for nothing: it is not the policy's "
        "fault.",
    )


class SessionAnswer(BaseModel):
    """A session as it is now."""

    id: str
    state: SessionState
    ended_by: EndedBy | None
    num_turns: int
    num_tokens: int
    """That the policy generated."""
    reward: float | None


class SessionGroupAnswer(BaseModel):
    """A group as it is now."""

    object: Literal["session.group"] = "session.group"
    id: str
    status: GroupStatus | Literal["running"]
    reason: str | None
    """Why it is not complete."""
    group_size: int
    sessions: list[SessionAnswer]
    to_begin: list[str]
    """Ids of sessions that have not begun. Empty where the group was not declared: its client names them."""
    num_to_begin: int
    selected: list[str]
    """The sessions that the group returns."""
    generated_tokens: int
    returned_tokens: int
    seconds: float
    """Since the group began."""


class FinishAnswer(SessionAnswer):
    object: Literal["session"] = "session"
    group_id: str
    group_status: GroupStatus | Literal["running"]
    wanted: list[str]
    """Sessions that are to begin now, in the place of void ones or until rewards differ."""
    num_wanted: int
    reward_status: str | None = None
    """What became of a reward that the server gave."""


class SegmentAnswer(BaseModel):
    """Tokens of which each was seen after those before it."""

    token_ids: list[int]
    mask: list[int]
    """1: the policy generated this token."""
    logprobs: list[float] | None
    """Each token's, 0 for those it did not generate; null where a turn did not ask for log probabilities."""


class TurnAnswer(BaseModel):
    history: History
    segment: int
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str | None
    waited_s: float
    """Before the turn, for tools or other work of the harness."""
    seconds: float
    weight_versions: list[dict[str, Any]] = []
    """Which version of the weights sampled which of its tokens: spans `{"version", "start", "end"}`."""


class TrajectoryAnswer(SessionAnswer):
    """A session with all that it has become."""

    object: Literal["session.trajectory"] = "session.trajectory"
    group_id: str
    turns: list[TurnAnswer]
    off_policy: bool = False
    """Its tokens are of several versions of the weights."""
    segments: list[SegmentAnswer] | None
    """null: the server holds these tokens no more."""


class SessionEvent(BaseModel):
    """A session has ended, or one is wanted."""

    type: Literal["session"] = "session"
    group_id: str
    session_id: str
    state: SessionState | Literal["wanted"]
    ended_by: EndedBy | None


class GroupOverEvent(BaseModel):
    type: Literal["group"] = "group"
    group_id: str
    status: GroupStatus
    selected: list[str]
