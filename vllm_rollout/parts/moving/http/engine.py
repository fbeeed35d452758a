"""The ranks of an engine, as services see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.parts.moving.rules.load import RankState
from vllm_rollout.parts.moving.rules.placement import ALL_OWNERS, TRAINER
from vllm_rollout.parts.moving.rules.scaling import Progress, ScaleDown


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of emptying a rank."""

    is_held: bool
    """True if nothing new is sent to the rank. False if it was restored meanwhile."""
    num_moved: int
    """Groups that moved to other ranks."""
    num_left: int
    """Requests that still run or wait there."""
    reasons: Mapping[str, int]
    """Reasons why groups stayed -> number of groups."""
    seconds: float


class MovesPart(ApiPart):
    """The ranks of an engine, and groups that move between them."""

    def refusal(self, *, priced: bool) -> str | None:
        """Reason why groups cannot move here without a drain, with the remedy. None if they can. `priced`: for moves
        that have to pay."""
        raise NotImplementedError

    async def rank_states(self) -> Sequence[RankState]:
        """State by rank. Raises: EngineStopped."""
        raise NotImplementedError

    async def drain(self, rank: int, timeout_s: float, owner: str = TRAINER) -> Drained:
        """Move all groups of a rank elsewhere, and send it nothing more. Waits up to `timeout_s` seconds until it is
        empty.

        The rank is kept empty for `owner`.

        Raises: RequestError (409) for the last rank that is not held, EngineStopped.
        """
        raise NotImplementedError

    async def restore(self, rank: int, owner: str = ALL_OWNERS) -> None:
        """End `owner`'s hold on a rank. Without any hold, groups are sent to the rank again.

        Raises: EngineStopped.
        """
        raise NotImplementedError

    async def plan_scale_down(self, progress: Progress) -> ScaleDown:
        """Decide if half of the ranks should be freed at this progress.

        Raises: EngineStopped.
        """
        raise NotImplementedError
