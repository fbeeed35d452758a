"""The table of request fields of groups and their selection.

A row has a field's name, type, default, allowed values, help text, and the ways by which it may arrive (`Door`). These
rows define the bodies of our endpoints (`kernel/http/body.py::of_table`) and `vllm_xargs` (`kernel/xargs.py`).
They also define settings of the simulator, help texts of the clients and the reference of the HTTP interface.

Invariant: each of these facts is stated here, and nowhere else.
"""

# ruff: noqa: RUF009  # `row` makes a field of a dataclass

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from vllm_rollout import config
from vllm_rollout.kernel.rules.rows import (
    Door,
    Either,
    Flag,
    Integer,
    Names,
    Number,
    Object,
    Row,
    Text,
    row,
    rows,
)

OWN: tuple[Door, ...] = ("body", "own")
JOIN: tuple[Door, ...] = ("join", "claim")

SelectionRule = Literal["first", "shortest", "dual_end"]
EarlyStop = bool | Literal["auto"] | None
"""None and "auto": stop early if the selection allows it."""
OnEngineFailure = Literal["fail", "retry"]
LaunchRule = Literal["auto", "prompts"]
AUTO = "auto"

MAX_NAME_CHARS = 256

SIZE, _SPARE = Integer(1, config.MAX_GROUP_SIZE), Integer(0, config.MAX_GROUP_SIZE)


@dataclass(kw_only=True)
class DualEndFields:
    """A selection from both ends of a pool: its shortest trajectories and its longest."""

    num_longest: int | None = row(
        _SPARE,
        "Number of the pool's longest trajectories in the group (L), below group_size. The other group_size - L "
        "trajectories are the pool's shortest. Default: 1, and 0 with a group_size of 1.",
        *OWN,
        default=None,
    )
    patience: float | None = row(
        Number(1, config.MAX_PATIENCE),
        "Once group_size valid candidates have finished, the other candidates get this many times the tokens of the "
        "longest finished one. Then they are stopped. Default: the whole pool runs to its end.",
        *OWN,
        default=None,
    )


@dataclass(kw_only=True)
class DualEndSelectionFields:
    dual_end: DualEndFields


@dataclass(kw_only=True)
class AutoFields:
    """Fields of `redundancy` "auto": how the server distributes spare candidates."""

    tradeoff: float = row(
        Number(0, config.MAX_TRADEOFF, above=True),
        "Price of time (lambda of DARTS Eq. 8), in costs of a rollout without redundancy. A larger value means fewer "
        "candidates.",
        "body",
        default=config.DEFAULT_TRADEOFF,
    )


@dataclass(kw_only=True)
class AutoRedundancyFields:
    auto: AutoFields


@dataclass(kw_only=True)
class RaceFields:
    """Fields of groups that a rollout, a run for all its rounds, or a single round may set."""

    redundancy: int | Literal["auto"] | AutoRedundancyFields = row(
        Either((_SPARE, Names((AUTO,)), Object(AutoRedundancyFields, '{"auto": {"tradeoff": 1.0}}'))),
        "Spare candidates beyond group_size (M' - M). group_size + redundancy is at most the server's "
        '--max-num-seqs. "auto": up to group_size spare candidates for each prompt, more where lengths vary more '
        "(DARTS).",
        *OWN,
        default=0,
        flat=_SPARE,
    )
    early_stop: EarlyStop = row(
        Either((Flag(), Names((AUTO,)))),
        'Stop a group\'s other candidates when group_size valid ones have finished. "auto", the default: stop them if '
        "the selection allows it. Selection dual_end does not allow it.",
        *OWN,
        *JOIN,
        default=None,
    )
    selection: Literal["first", "shortest"] | DualEndSelectionFields = row(
        Either((Names(("first", "shortest")), Object(DualEndSelectionFields, '{"dual_end": {"num_longest": 1}}'))),
        "Rule that selects a group's trajectories among its finished candidates.",
        *OWN,
        default="first",
        flat=Names(get_args(SelectionRule)),
    )
    on_engine_failure: OnEngineFailure = row(
        Names(get_args(OnEngineFailure)),
        'If a data-parallel rank dies while others live, "fail" ends its groups: their unfinished candidates have '
        'failed. "retry" runs these groups again on another rank, and a stream has a `restarted` event.',
        "body",
        default="fail",
    )
    max_candidates: int | None = row(
        Integer(1, 8 * config.MAX_GROUP_SIZE),
        "Upper bound of a group's candidates: those at its start, and those in the place of void ones. Default: twice "
        "the number at its start.",
        "body",
        default=None,
    )


@dataclass(kw_only=True)
class GroupFields(RaceFields):
    """Fields of the groups of a rollout."""

    group_size: int = row(SIZE, "Trajectories that a group returns for its prompt (M, OpenAI's n).", "body", *JOIN)
    order: LaunchRule = row(
        Names(get_args(LaunchRule)),
        'Order in which groups start if not all candidates can run at once. "auto": the longest or the shortest '
        "groups first, if that is expected to end the rollout sooner. Lengths are predicted from each prompt's "
        'earlier answers. "prompts": the order of the prompts.',
        "body",
        default=AUTO,
    )
    priority: int = row(
        Integer(-config.MAX_PRIORITY, config.MAX_PRIORITY),
        "Priority among rollouts that wait for places. Groups with the lowest number start first, as in vLLM. With "
        "--scheduling-policy priority they also overtake requests that wait in the engine, and are preempted last.",
        "body",
        default=0,
    )
    audit_ratio: float | None = row(
        Number(0, 1),
        "Share of groups in which no candidate is stopped, so that learned estimates stay true. Default with pruning "
        "or redundancy auto, which learn: the server's --rollout-audit-ratio. Default otherwise: 0.",
        default=None,
    )
    audit_unit: Literal["auto", "group", "rollout"] = row(
        Names((AUTO, "group", "rollout")),
        'Unit of audits. "group": each group by chance. "rollout": whole rollouts by count, since one audited group '
        'delays an answer as much as audits of all groups. "auto": "group" for a stream, otherwise "rollout".',
        "body",
        default=AUTO,
        flat=Names(("group", "rollout")),
    )


@dataclass(kw_only=True)
class JoinFields:
    """Fields of a request that joins a group, beside those of other tables."""

    group_id: str | None = row(
        Text(MAX_NAME_CHARS), "The group's name. Default: the open group of the same prompt.", *JOIN, default=None
    )
    namespace: str | None = row(
        Text(MAX_NAME_CHARS),
        "Your run's name, so that two trainers at one server may use the same ids.",
        "join",
        default=None,
    )
    num_candidates: int | None = row(
        Integer(1, 2 * config.MAX_GROUP_SIZE),
        "Number of candidates in the group. Each joins by a request of its own. Default: rollout_group_size.",
        *JOIN,
        default=None,
    )


PLAN_FIELDS = tuple(
    field for table in (RaceFields, DualEndFields) for field, r in rows(table).items() if "own" in r.doors
)
"""Names of the fields that `kernel/rules/plan.py::make_plan` takes from a request."""

ROWS: Mapping[str, Row] = {
    field: row for table in (GroupFields, DualEndFields, AutoFields, JoinFields) for field, row in rows(table).items()
}
"""Rows of the kernel's fields, by field name."""
