"""Groups of sessions in a trace (docs/guides/agents.md), as their race left them.

A session row is one group. Times are seconds after it began. A turn is [began, ended, tokens, tokens of its prompt,
cached tokens of its prompt, relation to the turn before]. Between two turns a tool ran:
    {"name": "sessions-5c", "id": "mine", "group_size": 1, "num_candidates": 2, "status": "complete", "seconds": 4.2,
     "sessions": [{"id": "mine.0", "state": "finished", "num_turns": 2, "num_tokens": 64, "ended_s": 4.2,
     "turns": [[0.1, 1.9, 40, 31, 0, "first"], [3.0, 4.1, 24, 90, 71, "extended"]]}], "selected": [0]}
A reward row of sessions brings rewards that came after it:
    {"name": "sessions-5c", "rewards": [{"index": 0, "reward": 1.0}]}
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, StrictBool, StrictInt, StrictStr, model_validator

from vllm_rollout.kernel.rules.fields import SelectionRule
from vllm_rollout.kernel.rules.types import EndedBy, GroupStatus, SessionState
from vllm_rollout.parts.page.recording.rows import Length, Name, Row

STOPPED_STATES: tuple[SessionState, ...] = ("surplus", "pruned", "deferred")
"""States of sessions that somebody or something stopped."""


class TurnRow(NamedTuple):
    """A turn. None: it runs, or nobody knows."""

    began_s: FiniteFloat
    ended_s: FiniteFloat | None = None
    num_tokens: Length | None = None
    """Number of tokens that the turn generated."""
    num_prompt_tokens: Length | None = None
    num_cached_tokens: Length | None = None
    """Number of prompt tokens whose KV was cached."""
    history: StrictStr | None = None
    """Relation of the turn's prompt to the previous turn."""


class SessionRow(Row):
    id: StrictStr
    state: SessionState
    ended_by: EndedBy | None = None
    num_turns: Annotated[StrictInt, Field(ge=0)]
    num_tokens: Length
    """Number of tokens that the policy generated."""
    reward: FiniteFloat | None = None
    ended_s: FiniteFloat | None = None
    turns: list[TurnRow] = Field(default_factory=list)
    """A file has all of them, a feed the last ones."""

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive turns, in which tools ran."""
        return [after.began_s - turn.ended_s for turn, after in pairwise(self.turns) if turn.ended_s is not None]


class SessionGroupRow(Row):
    name: Name
    """The server's name of the group, which is unique."""
    id: StrictStr
    """The session's id, as its client names it."""
    model: StrictStr | None = None
    rank: StrictInt | None = None
    """Rank on which its last turn ran."""
    group_size: Annotated[StrictInt, Field(ge=1)]
    num_candidates: StrictInt | None = None
    """Number of sessions that the group began with. None from a server that is older than rows of sessions."""
    max_sessions: StrictInt | None = None
    max_turns: StrictInt | None = None
    max_tokens: StrictInt | None = None
    early_stop: StrictBool = True
    selection: SelectionRule = "first"
    detection_length: StrictInt | None = None
    """Number of tokens after which its sessions were scored, counted in `pruning_turn`."""
    pruning_turn: StrictInt | None = None
    """Turn in which `detection_length` was counted."""
    audit: StrictBool = False
    began: FiniteFloat
    """Unix seconds at which the group began."""
    seconds: FiniteFloat | None = None
    status: GroupStatus | Literal["running"]
    """`running` is in no file."""
    reason: StrictStr | None = None
    """Reason why the group is not complete."""
    num_to_begin: StrictInt = 0
    sessions: list[SessionRow]
    """Sessions of the group, ascending by index."""
    selected: list[Annotated[StrictInt, Field(ge=0)]] = Field(default_factory=list)
    """Indices of the returned sessions, ascending."""

    @model_validator(mode="before")
    @classmethod
    def _without_until(cls, row: Any) -> Any:
        """Drop a field of earlier versions that nothing reads."""
        return {name: row[name] for name in row if name != "until"} if isinstance(row, dict) else row

    @model_validator(mode="after")
    def _consistent(self) -> SessionGroupRow:
        if self.selected and max(self.selected) >= len(self.sessions):
            raise ValueError(f"selected names session {max(self.selected)}, and there are {len(self.sessions)}")
        return self


class SessionReward(Row):
    index: Annotated[StrictInt, Field(ge=0)]
    reward: FiniteFloat


class SessionRewardRow(Row):
    name: Name
    rewards: list[SessionReward]


def add_session_rewards(row: SessionGroupRow, posted: Iterable[SessionRewardRow]) -> SessionGroupRow:
    """The row with rewards that came after it. What names no session of it is left."""
    for reward in (reward for each in posted for reward in each.rewards):
        if reward.index < len(row.sessions):
            row.sessions[reward.index].reward = reward.reward
    return row
