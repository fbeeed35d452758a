"""Bodies and answers of the endpoints of sessions (docs/guides/agents.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from vllm_rollout.config import MAX_GROUP_SIZE, MAX_TURNS
from vllm_rollout.kernel.http.body import Body, check_json, of_table
from vllm_rollout.kernel.http.protocol import OfParts, RewardField
from vllm_rollout.kernel.http.rewards import RewardValue
from vllm_rollout.kernel.rules.fields import MAX_NAME_CHARS, ROWS
from vllm_rollout.kernel.rules.rows import rows
from vllm_rollout.kernel.rules.types import EndedBy, GroupStatus, SessionState
from vllm_rollout.parts.sessions.http.fields import SessionFields
from vllm_rollout.parts.sessions.http.trajectory import History

Name = Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARS)]
DeclaredName = Annotated[StrictStr, Field(max_length=MAX_NAME_CHARS - 6, pattern=r"^[!-~]([ -~]*[!-~])?$")]
"""A group id: ASCII without a space at its ends, since sessions are named by it and a number in a header."""
Size = Annotated[StrictInt, Field(ge=1, le=MAX_GROUP_SIZE)]
SessionSelection = Literal["first", "shortest"]


@of_table
class SessionOptions(OfParts, SessionFields):
    """Options of a group of sessions. A run sets them for all its groups."""

    early_stop: StrictBool = Field(
        default=True, description="Stop a group's other sessions when group_size of them have finished."
    )
    selection: SessionSelection = Field(
        default="first", description="Rule that selects a group's sessions among its finished ones."
    )
    max_sessions: Size | None = Field(
        default=None,
        description="Upper bound of a group's sessions, with those in the place of void ones. Default: twice the "
        "number at its start.",
    )
    pruning_turn: Annotated[StrictInt, Field(ge=1, le=MAX_TURNS)] = Field(
        default=1, description="The turn in which detection_length counts tokens."
    )
    reward: RewardField | None = Field(
        default=None,
        description="Reward that grades a finished session whose finish brings no reward (docs/guides/rewards.md).",
    )

    def group(self, id: str, group_size: int, redundancy: int, data: Any = None) -> SessionGroupRequest:
        """The request for one group of a round or a feed. Audit ratio 0: audits stop nothing, and these stop whole
        groups."""
        said = self.model_dump(exclude_unset=True)
        size = {"group_size": group_size, "redundancy": redundancy, "audit_ratio": 0.0}
        return SessionGroupRequest.model_validate({**said, **size, "id": id, "data": data})

    def check_beside(self, said: Mapping[str, Any], what: str) -> None:
        """Check the fields of a rollout that a request sets beside `sessions`. `what`: the thing that is requested.

        Raises: ValueError for fields that sessions do not have, or set themselves.
        """
        for name in said:
            if name != "redundancy":
                raise ValueError(
                    f"{name}: cannot be said of {what}: each turn says how it samples, and sessions takes "
                    f"{', '.join(type(self).model_fields)}. Leave {name} out here."
                )
        if not isinstance(redundancy := said.get("redundancy", 0), int):
            raise ValueError(
                f"redundancy: must be an integer for sessions, got {redundancy!r}: their lengths are not learned. "
                "Say how many spare ones a prompt has."
            )


@of_table
class SessionGroupRequest(SessionOptions):
    """Declare a group of sessions before they begin."""

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


SCORES_SESSIONS = "Score each session in one of its turns, and stop sessions that will not help training."
for _body in (SessionOptions, SessionGroupRequest):
    if (_row := rows(_body).get("pruning")) is not None:
        _body.model_fields["pruning"].description = replace(_row, help=SCORES_SESSIONS).description
        _body.model_rebuild(force=True)


class FinishRequest(Body):
    """Finish a session, with its reward or as void."""

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
    """Tokens that the policy generated in all turns."""
    reward: float | None


class SessionGroupAnswer(BaseModel):
    """A group of sessions as it is now."""

    object: Literal["session.group"] = "session.group"
    id: str
    status: GroupStatus | Literal["running"]
    reason: str | None
    """Reason why the group is not complete. Null for a running or complete group."""
    group_size: int
    sessions: list[SessionAnswer]
    to_begin: list[str]
    """Ids of sessions that have not begun. Empty if the group was not declared, because then the client names its
    sessions."""
    num_to_begin: int
    selected: list[str]
    """Ids of the sessions that the group returns."""
    generated_tokens: int
    returned_tokens: int
    seconds: float
    """Seconds since the group began. After its end, the seconds that it took."""


class FinishAnswer(SessionAnswer):
    object: Literal["session"] = "session"
    group_id: str
    group_status: GroupStatus | Literal["running"]
    wanted: list[str]
    """Ids of sessions to begin now, to replace void ones."""
    num_wanted: int
    reward_status: str | None = None
    """Status of the server's own grade. Null if the server did not grade the session."""


class SegmentAnswer(BaseModel):
    """A stretch of a session's history. Each token was generated or read right after the tokens before it."""

    token_ids: list[int]
    mask: list[int]
    """1 if the policy generated the token, else 0."""
    logprobs: list[float] | None
    """Log probability of each token, 0 for tokens that the policy did not generate. Null if a turn did not ask for
    log probabilities."""


class TurnAnswer(BaseModel):
    history: History
    segment: int
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str | None
    waited_s: float
    """Seconds before the turn, for tools or other work of the harness."""
    seconds: float
    weight_versions: list[dict[str, Any]] = []
    """Weight versions that sampled the turn's tokens: spans `{"version", "start", "end"}`."""


class TrajectoryAnswer(SessionAnswer):
    """A session with the tokens of all its turns."""

    object: Literal["session.trajectory"] = "session.trajectory"
    group_id: str
    turns: list[TurnAnswer]
    off_policy: bool = False
    """True if its tokens were sampled by several versions of the weights."""
    segments: list[SegmentAnswer] | None
    """Null if the server no longer holds the tokens."""


class SessionEvent(BaseModel):
    """A session has ended, or is wanted (state `wanted`)."""

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


class DeclaredEvent(BaseModel):
    """The sessions of a prompt are to begin."""

    type: Literal["declared"] = "declared"
    prompt_id: str
    group_id: str
    to_begin: list[str]
    """Ids of the prompt's sessions."""
    prompt: dict[str, Any]
    """The prompt as it was handed in."""


class PromptSessions(BaseModel):
    """An ended group with its prompt and its sessions."""

    prompt_id: str
    group_id: str
    prompt: dict[str, Any] = {}
    """The prompt as it was handed in."""
    status: GroupStatus
    reason: str | None
    """Reason why the group is not complete. Null if it is."""
    trajectories: list[TrajectoryAnswer]
    sessions: list[SessionAnswer]
    """Sessions that had begun and are not among the trajectories."""
    generated_tokens: int
    returned_tokens: int
    seconds: float
