"""Reports on the gain of drafts, for people and for programs.

Invariant: numbers come from `drafts.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich.table import Table

from vllm_rollout.parts.drafts.acceptance import share_factor
from vllm_rollout.simulator.drafts import BATCH_SIZES, gains
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.settings import Setting

MAX_BATCH_SIZE = 256
"""Largest batch size shown for a machine without a limit."""


class Gained(NamedTuple):
    """Table and numbers on drafts."""

    tables: list[Table]
    numbers: dict[str, Any]


def gained_of(machine: Machine, settings: Sequence[Setting], group_size: int, contexts: Iterable[float]) -> Gained:
    """Gain of drafts by batch size, for groups of `group_size`. Empty if no setting has drafts.

    `contexts`: context of each candidate half way, in tokens.
    """
    if not any(setting.drafts for setting in settings):
        return Gained([], {})
    drafts = machine.with_drafts(True).drafts
    most = machine.num_slots or MAX_BATCH_SIZE
    sizes = [size for size in BATCH_SIZES if size & (size - 1) == 0 and size <= most]
    rows = gains(machine.step_cost, drafts, share_factor(drafts, group_size - 1, 0), sizes, fmean(contexts))
    table = Table(title=f"What drafts bring, with {group_size} candidates to a prompt")
    for name in ("candidates in a step", "drafts of each", "tokens of each", "times as fast"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row.batch_size:,}", f"{row.drafts:.2f}", f"{row.tokens:.2f}", f"{row.faster:.2f}")
    return Gained([table], {"drafts": [row._asdict() for row in rows]})
