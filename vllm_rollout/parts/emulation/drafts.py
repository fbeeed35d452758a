"""Drafts of an emulated candidate, and the number of correct ones.

Invariant: draws follow from the settings, the candidate and the token's number, so a run repeats. A draft is correct as
often as its probability says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from vllm_rollout.parts.emulation.fate import chances
from vllm_rollout.parts.emulation.settings import DraftSettings

REFERENCE_SIBLINGS = 15
"""For which the shares of a file hold."""


class DrawnDrafts(NamedTuple):
    """The drafts of one row and step."""

    probabilities: Sequence[float]
    """Probability that each draft is accepted together with all drafts before it."""
    num_right: int
    """Number of correct drafts, from the first one on."""


NO_DRAFTS = DrawnDrafts((), 0)


def share_factor(settings: DraftSettings, num_siblings: int, num_earlier: int) -> float:
    """By how much all shares grow with the answers that are known; no row has more than one kind of drafts.

    `num_siblings`: candidates of the same group, whether they run or have ended. `num_earlier`: of other groups.
    """
    known = num_siblings + settings.earlier_answer * num_earlier
    factor = settings.alone + (1 - settings.alone) * math.log2(1 + known) / math.log2(1 + REFERENCE_SIBLINGS)
    total = sum(kind.share for kind in settings.kinds)
    return min(factor, 1 / total) if total else factor


def draw(settings: DraftSettings, factor: float, salt: int, number: int) -> DrawnDrafts:
    """For output token `number` and those after it, of the candidate with this `salt`."""
    place, luck, *_ = chances("drafts", salt, number)
    for kind in settings.kinds:
        place -= factor * kind.share
        if place < 0:
            return DrawnDrafts(kind.accepted, sum(probability > luck for probability in kind.accepted))
    return NO_DRAFTS
