"""Calls to an engine core about groups that move to another, and ranks that are kept empty (`kernel/call_table.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.rules.detached import StayReason
from vllm_rollout.parts.moving.rules.load import RankState


class Hold(NamedTuple):
    """Begin or end of a hold, which keeps an engine core empty (`parts/moving/rules/placement.py`)."""

    owner: str
    held: bool


class GroupToRelease(NamedTuple):
    group_id: str
    epoch: int
    """Number of the move. A repeated call has the same number and gets the same answer."""


class Released(NamedTuple):
    """Result of a call to release a group from an engine core."""

    outcome: Literal["released", "in_flight", "refused"] | StayReason
    """`released`: the group is packed. `in_flight`: it has stopped, but has a token in flight, so ask again."""
    parcel: bytes = b""
    request_ids: Sequence[str] = ()
    """Ids of the packed requests."""
    reason: str = ""
    """Reason of a refusal."""


class GroupToAdopt(NamedTuple):
    group_id: str
    epoch: int
    parcel: bytes


RANK_STATE: Operation[None, RankState] = Operation("rank_state", None, RankState)
HOLD: Operation[Hold, None] = Operation("hold", Hold, None)
"""Keep this engine core empty, or end that. It stores the owner, and no API process sends it groups while
it is held.
"""
RELEASE_GROUP: Operation[GroupToRelease, Released] = Operation("release_group", GroupToRelease, Released)
"""Stop a group between two steps and pack it. Unless it is `released`, it continues here (`keep_group`)."""
KEEP_GROUP: Operation[GroupToRelease, None] = Operation("keep_group", GroupToRelease, None)
"""Continue a group that does not leave, even after it was released."""
ADOPT_GROUP: Operation[GroupToAdopt, None] = Operation("adopt_group", GroupToAdopt, None)
"""Continue a group of another engine core."""
CONFIRM_MOVE: Operation[GroupToRelease, None] = Operation("confirm_move", GroupToRelease, None)
"""Drop the packed group: it has arrived elsewhere."""
