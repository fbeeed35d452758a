"""Chooses ranks to free for training while the others finish a rollout, from the rollout's progress.

Half of the ranks are freed, once, when between 20 % and 50 % of the responses are complete, checked every 5 %. The rest
of the rollout, at its predicted peak, must have room in the KV cache of the other half.

Invariant: a rank is a whole engine, so that no tensor-parallel group is ever split.

Source: RollPacker 4.4, Algorithm 1 (lines 13 to 21) and its scaling criteria. Ours: the other half also has to run all
candidates at once, and the least loaded ranks go first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_rollout.parts.moving.rules.load import RankLoad
from vllm_rollout.parts.moving.rules.migration import PlannedMove, place_all

FIRST_CHECK = 0.20
LAST_CHECK = 0.50
CHECK_EVERY = 0.05
"""Shares of complete responses, in [0, 1], between which and at which interval to check (RollPacker 4.4)."""

ScaleReason = Literal["free", "scaled_down", "too_early", "too_late", "between_checks", "too_few_ranks", "no_room"]
"""Reason why ranks are freed, or not.

free            half of the ranks can be freed
scaled_down     ranks were freed already: once in a rollout
too_early       less than 20 % of the responses are complete
too_late        more than 50 % of the responses are complete
between_checks  less than 5 % more responses are complete than at the last check
too_few_ranks   half of the ranks is less than one, or too few ranks can be emptied
no_room         the predicted peak of the running candidates does not fit the other half
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one rollout."""

    num_responses: int
    num_complete: int
    num_complete_at_check: int = 0
    """Complete responses at the last check (`ScaleDown.was_checked`)."""
    is_scaled_down: bool = False

    @property
    def share(self) -> float:
        return self.num_complete / max(1, self.num_responses)

    @property
    def explanation(self) -> str:
        return f"{self.num_complete} of {self.num_responses} responses ({self.share:.0%}) are complete"


@dataclass(frozen=True, slots=True)
class ScaleDown:
    """Decision whether to free ranks."""

    reason: ScaleReason
    explanation: str
    """The reason with its numbers, for people."""
    ranks: tuple[int, ...] = ()
    """Ranks to free."""
    moves: tuple[PlannedMove, ...] = ()
    """The moves that empty these ranks."""

    @property
    def was_checked(self) -> bool:
        """True if this decision counts as a check, so that the next check comes 5 % later."""
        return self.reason in ("free", "too_few_ranks", "no_room")


def plan_scale_down(progress: Progress, loads: Sequence[RankLoad]) -> ScaleDown:
    """Decide whether to free half of the ranks now, and which. `loads`: of every rank. Held ranks are not counted."""
    if (wait := not_now(progress)) is not None:
        return wait
    usable = [load for load in loads if not load.is_held]
    movable = [load for load in usable if not load.other_requests]
    num_freed = len(usable) // 2
    if not 1 <= num_freed <= len(movable):
        return ScaleDown(
            "too_few_ranks", f"{len(movable)} of {len(usable)} ranks can be emptied; {num_freed} would have to be"
        )
    by_load = sorted(movable, key=lambda load: load.room.remaining_tokens)
    freed = tuple(sorted(load.rank for load in by_load[:num_freed]))
    staying = [load for load in usable if load.rank not in freed]
    moves = place_all([load for load in usable if load.rank in freed], staying)
    peak = sum(load.peak_kv_tokens for load in usable)
    capacity = sum(math.inf if load.kv_capacity_tokens is None else load.kv_capacity_tokens for load in staying)
    explanation = (
        f"{progress.explanation}; the rest has a predicted peak of {peak:.0f} tokens of KV cache, ranks "
        f"{[load.rank for load in staying]} have {capacity:.0f}"
    )
    if moves is None or any(load.room.kv_tokens < 0 for load in staying):
        return ScaleDown("no_room", explanation)
    return ScaleDown("free", explanation, freed, tuple(moves))


def not_now(progress: Progress) -> ScaleDown | None:
    """The decision not to free ranks because of the progress alone. None if progress allows it."""
    newly = progress.num_complete - progress.num_complete_at_check
    if progress.is_scaled_down:
        return ScaleDown("scaled_down", "ranks of this rollout have been freed already")
    if progress.share < FIRST_CHECK:
        return ScaleDown("too_early", f"{progress.explanation}: the first check is at {FIRST_CHECK:.0%}")
    if progress.share > LAST_CHECK:
        return ScaleDown("too_late", f"{progress.explanation}: the last check is at {LAST_CHECK:.0%}")
    if newly / max(1, progress.num_responses) < CHECK_EVERY:
        return ScaleDown("between_checks", f"{progress.explanation}, {newly} more than at the last check")
    return None
