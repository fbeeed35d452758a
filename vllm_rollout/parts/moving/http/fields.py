"""The fields of moving in the body of a rollout."""

# ruff: noqa: RUF009  # `row` makes a field of a dataclass

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from vllm_rollout.kernel.http.body import PartFields, of_table
from vllm_rollout.kernel.http.engine import Outlook
from vllm_rollout.kernel.rules.rows import Names, row

Migration = Literal["off", "spread", "consolidate", "auto"]


@dataclass(kw_only=True)
class MovingFields:
    """Fields of groups that may move."""

    migration: Migration = row(
        Names(get_args(Migration)),
        'When groups may move to another rank: with "spread", if their rank lags, with "consolidate", if the tail of a '
        "rollout fits on fewer ranks. Groups move only if that pays by the profile, which is required. With "
        '"auto" both are possible.',
        "body",
        default="off",
    )
    scale_down: Literal["off", "auto"] = row(
        Names(("off", "auto")),
        '"auto": free half of the ranks once 20 to 50 % of the candidates have ended and the others fit on the other '
        "half. The freed ranks stay empty until the rollout is over. A stream has a `ranks_free` event.",
        "body",
        default="off",
    )


@of_table
class MovedFields(PartFields, MovingFields):
    pass


@dataclass(frozen=True, slots=True)
class MovingOutlook(Outlook):
    """The expected lengths of a group, and its permission to move."""

    migration: Migration = "off"
    """Purpose for which the group may move while its rank is not drained."""
