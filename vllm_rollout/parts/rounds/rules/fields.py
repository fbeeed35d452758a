"""The table of fields of a run, and kinds of rounds. Invariant: as of `kernel/rules/fields.py`."""

# ruff: noqa: RUF009  # `row` makes a field of a dataclass

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from vllm_rollout import config
from vllm_rollout.kernel.rules.fields import SIZE
from vllm_rollout.kernel.rules.rows import Integer, Names, Number, row

RoundKind = Literal["short", "long"]
QueueOrder = Literal["first_in", "shortest", "longest"]


@dataclass(frozen=True)
class RunFields:
    """Fields of the rounds of a run."""

    group_size: int = row(SIZE, "Trajectories that a round returns for each of its prompts (R0).", "body")
    prompts_per_round: int = row(Integer(1, config.MAX_PROMPTS), "Prompts that a round returns (P0).", "body")
    prompt_speculation: float = row(
        Number(1, config.MAX_SPECULATION),
        "eta for prompts. A short round runs this many times prompts_per_round and returns the prompts that complete "
        "first.",
        "body",
        default=config.DEFAULT_SPECULATION,
    )
    response_speculation: float | None = row(
        Number(1, config.MAX_SPECULATION),
        "eta for responses. In a short round a prompt has this many times group_size candidates. Default: "
        f"{config.DEFAULT_SPECULATION:g}. If redundancy is set, redundancy decides.",
        "body",
        default=None,
    )
    queue_order: QueueOrder = row(
        Names(get_args(QueueOrder)),
        "Order in which a long round takes waiting prompts: by age, or by predicted length.",
        "body",
        default="first_in",
    )
