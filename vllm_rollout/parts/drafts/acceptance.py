"""Drafts that are made up: how many rows have some, and how likely they are accepted.

A simulation and an emulated device have them (`docs/guides/emulation.md`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_rollout.parts.drafts.rules import MAX_DRAFT_TOKENS

REFERENCE_SIBLINGS = 15
"""Number of siblings for which the shares of a file hold."""


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DraftKind(Fields):
    """Drafts of a row and step, as they come in a part of all rows."""

    share: float = Field(ge=0, le=1)
    """The share of rows that have these drafts, for a candidate with `REFERENCE_SIBLINGS` siblings."""
    accepted: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(min_length=1, max_length=MAX_DRAFT_TOKENS)
    """Probability that each draft is accepted together with all drafts before it."""

    @model_validator(mode="after")
    def _falling(self) -> DraftKind:
        if any(after > before for before, after in pairwise(self.accepted)):
            raise ValueError(
                f"accepted must not increase, since a draft counts only behind those before it, got "
                f"{list(self.accepted)}"
            )
        return self


class DraftSettings(Fields):
    """Drafts that `--enable-rollout-drafts` finds on an emulated device.

    The defaults follow answers of Qwen2.5-Coder-0.5B-Instruct at temperature 1, 16 per prompt. They had 1.38, 1.45 and
    1.58 tokens per step with 0.6, 0.8 and 1.5 drafts per row.
    """

    kinds: tuple[DraftKind, ...] = (
        DraftKind(share=0.035, accepted=(0.92, 0.85, 0.78, 0.72, 0.66, 0.6, 0.5, 0.3, 0.2, 0.15, 0.1)),
        DraftKind(share=0.1, accepted=(0.75, 0.55, 0.25, 0.15)),
        DraftKind(share=0.12, accepted=(0.6, 0.25, 0.15)),
        DraftKind(share=0.18, accepted=(0.33, 0.17)),
    )
    """The rows that are left have no drafts."""
    alone: float = Field(0.42, ge=0, le=1)
    """Part of all shares that a candidate without siblings finds, in its own text."""
    earlier_answer: float = Field(6.0, ge=0, le=1000)
    """An earlier answer of the prompt counts like so many siblings, since it is known to its end."""

    @model_validator(mode="after")
    def _at_most_all(self) -> DraftSettings:
        if (total := sum(kind.share for kind in self.kinds)) > 1:
            raise ValueError(f"the shares of kinds must sum to 1 or less, got {total:g}")
        return self


def share_factor(settings: DraftSettings, num_siblings: int, num_earlier: int) -> float:
    """Factor by which all shares grow with the known answers. No row has more than one kind of drafts.

    `num_siblings`: candidates of the same group, whether they run or have ended. `num_earlier`: of other groups.
    """
    known = num_siblings + settings.earlier_answer * num_earlier
    factor = settings.alone + (1 - settings.alone) * math.log2(1 + known) / math.log2(1 + REFERENCE_SIBLINGS)
    total = sum(kind.share for kind in settings.kinds)
    return min(factor, 1 / total) if total else factor
