"""The table of request fields of groups, their selection and their pruning.

A row has a field's name, type, default, allowed values, help text, and the ways by which it may arrive (`Door`). These
rows define the bodies of our endpoints (`server/body.py::of_table`) and `vllm_xargs` (`group/plans/xargs.py`). They
also define settings of the simulator, help texts of the clients and the reference of the HTTP interface.

Invariant: each of these facts is stated here, and nowhere else.
"""

# ruff: noqa: RUF009  # `row` makes a field of a dataclass

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from vllm_rollout import config
from vllm_rollout.group.plans.rows import (
    Door,
    Either,
    Flag,
    Integer,
    Names,
    Number,
    Object,
    Row,
    Several,
    Text,
    row,
    rows,
)
from vllm_rollout.group.types import Signal

OWN: tuple[Door, ...] = ("body", "own")
JOIN: tuple[Door, ...] = ("join", "session")
SESSION: tuple[Door, ...] = ("body", "session")

SelectionRule = Literal["first", "shortest", "dual_end"]
EarlyStop = bool | Literal["auto"] | None
"""None and "auto": stop early if the selection allows it."""
Migration = Literal["off", "spread", "consolidate", "auto"]
OnEngineFailure = Literal["fail", "retry"]
CutTurn = Literal["ends", "goes_on"]
HistoryRule = Literal["strict", "rewritable"]
LaunchRule = Literal["auto", "prompts"]
QueueOrder = Literal["first_in", "shortest", "longest"]
PruningRule = Literal["balance", "gradient", "paper"]
PruningMode = Literal["active", "shadow"]
AUTO = "auto"

MAX_MIN_LABELS = config.CALIBRATION_WINDOW // 2
"""Largest `min_labels`: calibration remembers at most twice as many labels."""
MAX_STRENGTH = 1000.0
"""Largest `strength` of the paper's rule that a request may name."""
MAX_NAME_CHARS = 256

_LENGTH = Integer(1, config.MAX_DETECTION_LENGTH)
SHARE = Number(0, 1, above=True)
_SIZE, _SPARE = Integer(1, config.MAX_GROUP_SIZE), Integer(0, config.MAX_GROUP_SIZE)


@dataclass(frozen=True)
class PruningFields:
    """Fields that set how candidates are scored at `detection_length`, and which are stopped there.

    Source: ARRoL 4.2 and A.4.
    """

    detection_length: int | list[int] | Literal["auto"] = row(
        Either((_LENGTH, Several(_LENGTH, config.MAX_TRIAL_LENGTHS), Names((AUTO,)))),
        "Output tokens after which a candidate is scored, L_detect; one that ends before is not scored and is kept. A "
        "list scores at each and stops nobody (mode shadow), for GET /v1/quality_head/detection_lengths to compare. "
        '"auto" is the length that is recommended there; until there is one it compares '
        f"{', '.join(map(str, config.TRIAL_LENGTHS))}.",
        flat=_LENGTH,
    )
    rule: PruningRule = row(
        Names(get_args(PruningRule)),
        'Who is kept; each rule keeps keep_ratio. "balance" steers survivors towards target_positive_ratio; "gradient" '
        'steers where a group would end without reward variance and prunes at random elsewhere; "paper" is ARRoL\'s '
        "Eq. 2 as printed.",
        default="balance",
        xarg="pruning_rule",
    )
    keep_ratio: float = row(
        SHARE,
        "Share of scored candidates to keep on average, within the bounds of survival; 1 scores and keeps everything.",
        default=0.5,
    )
    target_positive_ratio: float = row(
        Number(0, 1, above=True, below=True),
        "Success rate wanted among survivors by balance and paper, rho.",
        default=0.5,
    )
    strength: float = row(
        Number(0, MAX_STRENGTH),
        "Lambda of the paper's rule; the others find their own.",
        default=0.5,
        xarg="pruning_strength",
    )
    min_survival: float = row(SHARE, "No candidate is kept with a smaller probability.", default=0.05)
    max_survival: float = row(SHARE, "No candidate is kept with a larger probability.", default=0.95)
    mode: PruningMode = row(
        Names(get_args(PruningMode)),
        '"shadow": decide and report (would_prune), stop nothing.',
        default="active",
        xarg="pruning_mode",
    )
    signal: Signal = row(
        Names(get_args(Signal)),
        "What to judge by: the quality head (trace confidence stands in while it knows too little), or confidence.",
        default="head",
    )
    allow_fewer: bool = row(
        Flag(),
        "Prune even when fewer than group_size candidates are left to finish; the group is then complete with those.",
        default=False,
    )
    min_labels: int = row(
        Integer(1, MAX_MIN_LABELS),
        "Rewards of either kind, positive and negative, before anything is pruned.",
        default=64,
    )
    final_score: bool = row(
        Flag(),
        "Score trajectories by their last token as well, by a head of its own, which learns from the same rewards.",
        default=False,
    )


@dataclass(kw_only=True)
class DualEndFields:
    """A selection from both ends of a pool: its shortest trajectories and its longest."""

    num_longest: int | None = row(
        _SPARE,
        "L, below group_size: the longest trajectories of the pool; the other group_size - L are its shortest. Default "
        "1, and 0 with a group_size of 1.",
        *OWN,
        default=None,
    )
    patience: float | None = row(
        Number(1, config.MAX_PATIENCE),
        "Once group_size valid candidates have finished, the others get this many times the tokens of the longest of "
        "those, then they are stopped. Default: the whole pool runs to its end.",
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
        "lambda of DARTS Eq. 8, what time is worth, in costs of a rollout without redundancy: more, fewer candidates.",
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
        "Spare candidates beyond group_size (M' - M); the sum is at most the server's --max-num-seqs. \"auto\": up to "
        "group_size of them for each prompt, more where lengths vary more (DARTS).",
        *OWN,
        default=0,
        flat=_SPARE,
    )
    early_stop: EarlyStop = row(
        Either((Flag(), Names((AUTO,)))),
        'Stop a group\'s other candidates when group_size valid ones have finished. "auto", the default: wherever the '
        "selection allows it, which dual_end does not.",
        *OWN,
        *JOIN,
        default=None,
    )
    selection: Literal["first", "shortest"] | DualEndSelectionFields = row(
        Either((Names(("first", "shortest")), Object(DualEndSelectionFields, '{"dual_end": {"num_longest": 1}}'))),
        "Which finished candidates make the group.",
        *OWN,
        default="first",
        flat=Names(get_args(SelectionRule)),
    )
    pruning: PruningFields | None = row(
        Object(PruningFields, '{"detection_length": 512, "keep_ratio": 0.5}'),
        "Score candidates at a detection length and stop those that will not help. Default: no pruning.",
        "body",
        default=None,
    )
    migration: Migration = row(
        Names(get_args(Migration)),
        'What groups may move to other ranks for, when that pays: "spread", away from a rank that lags; "consolidate", '
        'the tail of a rollout on fewer ranks; "auto", both. Needs a profile.',
        "body",
        default="off",
    )
    scale_down: Literal["off", "auto"] = row(
        Names(("off", AUTO)),
        '"auto": when 20 to 50 % of the candidates have ended and the others fit on half of the ranks, the other half '
        "is emptied and kept empty until the rollout is over; a stream has a `ranks_free` event.",
        "body",
        default="off",
    )
    on_engine_failure: OnEngineFailure = row(
        Names(get_args(OnEngineFailure)),
        'What becomes of groups whose data-parallel rank dies while others live: "fail", what had not ended of them '
        'has failed; "retry", they run again on another rank, and a stream has a `restarted` event.',
        "body",
        default="fail",
    )
    max_candidates: int | None = row(
        Integer(1, 8 * config.MAX_GROUP_SIZE),
        "Candidates that a group may ever have: those it begins with, and those in the place of void ones. Default: "
        "twice what it begins with.",
        "body",
        default=None,
    )


@dataclass(kw_only=True)
class GroupFields(RaceFields):
    """Fields of the groups of a rollout."""

    group_size: int = row(_SIZE, "Trajectories you want for each prompt (M, OpenAI's n).", "body", *JOIN)
    order: LaunchRule = row(
        Names(get_args(LaunchRule)),
        'Which groups start first where not all candidates can run at once: "auto", the longest, or the shortest, by '
        'the lengths of each prompt\'s earlier answers, where that is expected to end the rollout sooner; "prompts", '
        "as they stand.",
        "body",
        default=AUTO,
    )
    priority: int = row(
        Integer(-config.MAX_PRIORITY, config.MAX_PRIORITY),
        "Of rollouts that wait for places, groups with the lowest number start first, as in vLLM; with "
        "--scheduling-policy priority they also overtake what waits in the engine, and are preempted last.",
        "body",
        default=0,
    )
    audit_ratio: float | None = row(
        Number(0, 1),
        "Share of groups in which nobody is stopped, so that what is learned stays true. Default: the server's "
        "--rollout-audit-ratio with pruning or redundancy auto, which learn; otherwise 0.",
        default=None,
    )
    audit_unit: Literal["auto", "group", "rollout"] = row(
        Names((AUTO, "group", "rollout")),
        'What is audited: each "group" by chance, or by count the whole "rollout", since one audited group holds up an '
        'answer as long as all of them would; "auto", groups of a stream, and rollouts otherwise.',
        "body",
        default=AUTO,
        flat=Names(("group", "rollout")),
    )


@dataclass(kw_only=True)
class JoinFields:
    """Fields of a request that joins a group, beside those of other tables."""

    group_id: str | None = row(
        Text(MAX_NAME_CHARS), "The group's name. Default: whichever group of the prompt is open.", *JOIN, default=None
    )
    namespace: str | None = row(
        Text(MAX_NAME_CHARS), "Your run's name: two trainers at one server may use the same ids.", "join", default=None
    )
    num_candidates: int | None = row(
        Integer(1, 2 * config.MAX_GROUP_SIZE),
        "How many siblings there are. Default: rollout_group_size.",
        *JOIN,
        default=None,
    )


@dataclass(kw_only=True)
class SessionFields:
    """Fields of groups whose candidates are sessions."""

    max_turns: int | None = row(
        Integer(1, config.MAX_TURNS),
        "Turns of a session; after so many it is over, as truncated. Default: no limit.",
        *SESSION,
        default=None,
    )
    max_tokens: int | None = row(
        Integer(1, config.MAX_SESSION_TOKENS),
        "Tokens that the policy generates in all turns of a session; then it is over, as truncated. Default: no limit.",
        *SESSION,
        default=None,
    )
    idle_timeout_s: float = row(
        Number(0, config.MAX_SESSION_IDLE_S, above=True),
        "A session of which nobody hears for so many seconds between two turns is void.",
        *SESSION,
        default=config.SESSION_IDLE_S,
    )
    cut_turn: CutTurn = row(
        Names(get_args(CutTurn)),
        'What a turn means that was cut at its own max_tokens: "ends", the session is over, as truncated; "goes_on".',
        *SESSION,
        default="ends",
    )
    history: HistoryRule = row(
        Names(get_args(HistoryRule)),
        'What happens to a turn whose messages tell another history than the turns before: "strict", it is refused; '
        '"rewritable", it begins a new segment of the trajectory.',
        *SESSION,
        default="strict",
    )


@dataclass(kw_only=True)
class TurnFields:
    """Fields of a request that is one turn of a session."""

    session: str | None = row(
        Text(MAX_NAME_CHARS), "The session. Default: the header X-Session-ID.", "session", default=None
    )
    last: bool = row(Flag(), "No turn follows: when this one ends the session has finished.", "session", default=False)


@dataclass(frozen=True)
class RunFields:
    """Fields of the rounds of a run."""

    group_size: int = row(_SIZE, "Trajectories you want for each prompt (R0).", "body")
    prompts_per_round: int = row(Integer(1, config.MAX_PROMPTS), "Prompts that a round returns (P0).", "body")
    prompt_speculation: float = row(
        Number(1, config.MAX_SPECULATION),
        "eta for prompts: a short round runs this many times prompts_per_round and returns those that complete first.",
        "body",
        default=config.DEFAULT_SPECULATION,
    )
    response_speculation: float | None = row(
        Number(1, config.MAX_SPECULATION),
        "eta for responses: in a short round a prompt has this many times group_size candidates. Default: "
        f"{config.DEFAULT_SPECULATION:g}, or what redundancy says.",
        "body",
        default=None,
    )
    queue_order: QueueOrder = row(
        Names(get_args(QueueOrder)),
        "Which of the waiting prompts a long round takes: by age, or by predicted length.",
        "body",
        default="first_in",
    )


PLAN_FIELDS = tuple(
    field for table in (RaceFields, DualEndFields) for field, r in rows(table).items() if "own" in r.doors
)
"""Names of the fields that `group/plans/plan.py::make_plan` takes from a request."""

ROWS: Mapping[str, Row] = {
    field: row
    for table in (GroupFields, DualEndFields, AutoFields, JoinFields, PruningFields, SessionFields, TurnFields)
    for field, row in rows(table).items()
}
"""All rows by field name."""
