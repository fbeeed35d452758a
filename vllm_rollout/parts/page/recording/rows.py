"""Rows of a file of traces (`parts/shaping/rules/trace.py`).

JSON lines of three forms. A rollout row is one rollout, which is one training step:
    {"rollout_id": "rollout-1", "model": "m", "group_size": 2, "max_tokens": 1024, "prompts": [{"id": "q1",
     "prompt_tokens": 31, "lengths": [412, 77, 1024], "ends": ["stop", "stop", "length"], "scores": [0.7, null, 0.1]}]}
A reward row brings rewards that came after it:
    {"rollout_id": "rollout-1", "rewards": [{"prompt_id": "q1", "index": 0, "reward": 1.0}]}
A prompt row is shorthand. Rows that follow each other are one rollout, unless they say otherwise in "step":
    {"prompt_id": "q1", "lengths": [412, 77, 1024]}
Rows of groups of sessions are in `parts/page/recording/session_rows.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictInt, StrictStr, model_validator

from vllm_rollout.config import HISTORY_KEY_CHARS, MAX_DETECTION_LENGTH, MAX_TRACED_TOKENS
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.parts.shaping.rules.trace import End

GroupFate = Literal["running", "complete", "incomplete", "deferred", "filtered"]
"""`running` is in no file."""
RolloutState = Literal["running", "over", "left"]
"""`left`: its client went away before its end."""


Length = Annotated[StrictInt, Field(ge=0, le=MAX_TRACED_TOKENS)]
MAX_ROW_NAME_CHARS = 256
Name = Annotated[StrictStr, Field(min_length=1, max_length=MAX_ROW_NAME_CHARS)]
Key = Annotated[StrictStr, Field(max_length=HISTORY_KEY_CHARS)]


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LengthsRow(Row):
    """Fields that rollout rows and prompt rows share: one entry per candidate."""

    lengths: Annotated[list[Length], Field(min_length=1)]
    ends: list[End] | None = None
    scores: list[FiniteFloat | None] | None = None
    rewards: list[FiniteFloat | None] | None = None
    prompt_tokens: Length = 0
    key: Key = ""

    @model_validator(mode="after")
    def _consistent(self) -> LengthsRow:
        num = len(self.lengths)
        for name in ("ends", "scores", "rewards", "ended_s", "reward_status"):
            values = getattr(self, name, None)
            if values is not None and len(values) != num:
                raise ValueError(f"{name} has {len(values)} entries, lengths has {num}; they must be equally long")
        ends = self.ends or ["stop"] * num
        for index, (length, end) in enumerate(zip(self.lengths, ends, strict=True)):
            if length == 0 and end in ("stop", "length"):
                raise ValueError(f"lengths.{index} is 0, but a candidate that ended by itself has at least 1 token")
        return self


class RolloutPrompt(LengthsRow):
    """One prompt of a rollout row. Times are for a page, in seconds after its rollout began. `simulate` reads none."""

    id: Name
    position: Annotated[StrictInt, Field(ge=0)] | None = None
    """Place among the prompts that the client gave."""
    rank: StrictInt | None = None
    moves: list[tuple[FiniteFloat, StrictInt]] | None = None
    """(Unix seconds, rank) from which the group ran on that rank, if it ever moved."""
    status: GroupFate | None = None
    reason: StrictStr | None = None
    """Reason why the group is not complete."""
    audit: bool = False
    started_s: FiniteFloat | None = None
    over_s: FiniteFloat | None = None
    ended_s: list[FiniteFloat | None] | None = None
    selected: list[StrictInt] | None = None
    """Indices of the returned trajectories, ascending."""
    reward_status: list[StrictStr | None] | None = None

    @model_validator(mode="after")
    def _selected_exist(self) -> RolloutPrompt:
        num = len(self.lengths)
        if wrong := [index for index in self.selected or () if not 0 <= index < num]:
            raise ValueError(f"selected names candidate {wrong[0]}, and there are {num}")
        return self


class RolloutRow(Row):
    rollout_id: Name
    model: StrictStr | None = None
    group_size: Annotated[StrictInt, Field(ge=1)] | None = None
    max_tokens: Annotated[Length, Field(ge=1)] | None = None
    detection_length: Annotated[StrictInt, Field(ge=1, le=MAX_DETECTION_LENGTH)] | None = None
    """Number of tokens after which scores were taken."""
    began: FiniteFloat | None = None
    """Unix seconds at which the group began."""
    seconds: FiniteFloat | None = None
    num_prompts: StrictInt | None = None
    num_candidates: StrictInt | None = None
    """Number of candidates that the group began with."""
    run: StrictStr | None = None
    round: StrictInt | None = None
    kind: Literal["short", "long"] | None = None
    setting: StrictStr | None = None
    """Setting of the simulation. None if the rollout has run."""
    state: RolloutState | None = None
    receipt: Receipt | None = None
    weight_versions: list[StrictStr] | None = None
    """Weights versions that sampled at least one token."""
    prompts: Annotated[list[RolloutPrompt], Field(min_length=1)]


class _Reward(Row):
    prompt_id: Name
    index: Annotated[StrictInt, Field(ge=0)]
    reward: FiniteFloat


class RewardRow(Row):
    rollout_id: Name
    rewards: list[_Reward]


class PromptRow(LengthsRow):
    prompt_id: Name
    step: StrictInt | None = None


def reward_row(rollout_id: str, rewards: Iterable[tuple[str, int, float]]) -> str:
    """A reward row of (prompt id, index, reward), without a line end."""
    named = [_Reward(prompt_id=prompt_id, index=index, reward=reward) for prompt_id, index, reward in rewards]
    return RewardRow(rollout_id=rollout_id, rewards=named).model_dump_json()
