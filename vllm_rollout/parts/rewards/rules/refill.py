"""Which candidates take the place of void ones: finished spares first, then new ones."""

from __future__ import annotations

from bisect import bisect_left

from vllm_rollout.kernel.rules.selection import Ranking
from vllm_rollout.kernel.rules.types import Ending


class SpareRanking(Ranking):
    """A ranking from which candidates are removed. No operation takes a Python loop over all of them."""

    def __len__(self) -> int:
        return len(self._valid) + len(self._truncated)

    @property
    def num_selected(self) -> int:
        return min(self._group_size, len(self))

    def drop(self, ending: Ending) -> int | None:
        """Remove a candidate. If it was selected, return the index of the candidate that is selected instead, or
        None."""
        keys, key = self._place(ending)
        at = bisect_left(keys, key)
        if key not in keys[at : at + 1]:
            return None
        gaps, num_longest = self._num_gaps, min(self._num_longest, len(self._valid))
        num_shortest = self._group_size - num_longest
        del keys[at]
        if keys is self._truncated:
            return keys[gaps - 1][-1] if at < gaps <= len(keys) else None
        if num_shortest <= at < len(keys) + 1 - num_longest:
            return None
        if gaps := self._num_gaps:
            return self._truncated[gaps - 1][-1] if gaps <= len(self._truncated) else None
        return keys[num_shortest - 1 if at < num_shortest else len(keys) - num_longest][-1]


def num_to_refill(group_size: int, max_candidates: int, num_launched: int, num_alive: int) -> int:
    """Candidates to launch in place of void ones: as many as `num_alive` is below `group_size`.

    Args:
        num_alive: candidates that are running, or have finished and are not void.
    """
    return max(0, min(max_candidates - num_launched, group_size - num_alive))
