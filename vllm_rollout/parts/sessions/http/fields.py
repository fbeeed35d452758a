"""Tables of the fields of groups whose candidates are sessions, and of requests that are their turns."""

# ruff: noqa: RUF009  # `row` makes a field of a dataclass

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from vllm_rollout import config
from vllm_rollout.kernel.rules.fields import MAX_NAME_CHARS
from vllm_rollout.kernel.rules.rows import Door, Flag, Integer, Names, Number, Text, row

BOTH: tuple[Door, ...] = ("body", "claim")

CutTurn = Literal["ends", "goes_on"]
HistoryRule = Literal["strict", "rewritable"]


@dataclass(kw_only=True)
class SessionFields:
    """Fields of groups whose candidates are sessions."""

    max_turns: int | None = row(
        Integer(1, config.MAX_TURNS),
        "Upper bound of a session's turns. After so many turns the session is over, as truncated. Default: no limit.",
        *BOTH,
        default=None,
    )
    max_tokens: int | None = row(
        Integer(1, config.MAX_SESSION_TOKENS),
        "Upper bound of the tokens that the policy generates in all turns of a session. At the bound the session is "
        "over, as truncated. Default: no limit.",
        *BOTH,
        default=None,
    )
    idle_timeout_s: float = row(
        Number(0, config.MAX_SESSION_IDLE_S, above=True),
        "If a session gets no request for so many seconds between two turns, it is void.",
        *BOTH,
        default=config.SESSION_IDLE_S,
    )
    cut_turn: CutTurn = row(
        Names(get_args(CutTurn)),
        'Effect of a turn that was cut at its own max_tokens. "ends": the session is over, as truncated. "goes_on": '
        "the session continues.",
        *BOTH,
        default="ends",
    )
    history: HistoryRule = row(
        Names(get_args(HistoryRule)),
        'Effect of a turn whose messages change the history of earlier turns. "strict": the turn is refused. '
        '"rewritable": the turn begins a new segment of the trajectory.',
        *BOTH,
        default="strict",
    )


@dataclass(kw_only=True)
class TurnFields(SessionFields):
    """Fields of a request that is one turn of a session: the face `xargs`."""

    session: str | None = row(
        Text(MAX_NAME_CHARS), "The session's id. Default: the header X-Session-ID.", "claim", default=None
    )
    last: bool = row(
        Flag(), "No turn follows this one. When this turn ends, the session has finished.", "claim", default=False
    )
