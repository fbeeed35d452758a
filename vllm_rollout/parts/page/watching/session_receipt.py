"""Receipt of groups of sessions.

Invariant: it counts and predicts nothing. The rest of a stopped session would depend on its tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vllm_rollout.parts.page.recording.session_rows import STOPPED_STATES, SessionGroupRow

COLUMNS = (
    *("status", "seconds", "tokens", "returned", "wasted", "sessions", "stopped", "stopped\ntokens", "void"),
    *("turns", "tool\nseconds", "cached"),
)
MAX_NAME = 24


@dataclass(frozen=True, slots=True)
class SessionReceipt:
    """Cost of groups of sessions. Tokens are output tokens, except for prompts. None: unknown."""

    seconds: float
    """Seconds in which at least one group ran."""
    generated_tokens: int
    returned_tokens: int
    wasted_tokens: int
    num_sessions: int
    num_stopped: int
    """Surplus, pruned and deferred sessions."""
    stopped_tokens: int
    """Tokens of the stopped sessions."""
    num_void: int
    num_turns: int
    tool_seconds: float | None
    """Seconds between turns, over all sessions."""
    prompt_tokens: int | None
    """Prompt tokens of all turns."""
    cached_tokens: int | None
    """Prompt tokens of all turns that were in the prefix cache."""


def receipt_of_sessions(groups: Sequence[SessionGroupRow]) -> SessionReceipt:
    """The receipt of one group, or the sum of several."""
    sessions = [session for group in groups for session in group.sessions]
    stopped = [session for session in sessions if session.state in STOPPED_STATES]
    turns = [turn for session in sessions for turn in session.turns]
    generated = sum(session.num_tokens for session in sessions)
    returned = sum(group.sessions[index].num_tokens for group in groups for index in group.selected)
    is_whole = all(len(session.turns) == session.num_turns for session in sessions)
    return SessionReceipt(
        seconds=_covered((group.began, group.began + (group.seconds or 0.0)) for group in groups),
        generated_tokens=generated,
        returned_tokens=returned,
        wasted_tokens=generated - returned,
        num_sessions=len(sessions),
        num_stopped=len(stopped),
        stopped_tokens=sum(session.num_tokens for session in stopped),
        num_void=sum(session.state == "void" for session in sessions),
        num_turns=sum(session.num_turns for session in sessions),
        tool_seconds=sum(gap for session in sessions for gap in session.gaps_s) if is_whole else None,
        prompt_tokens=_sum_of(turn.num_prompt_tokens for turn in turns) if is_whole else None,
        cached_tokens=_sum_of(turn.num_cached_tokens for turn in turns) if is_whole else None,
    )


def _sum_of(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are covered by at least one of the spans."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def table_of_sessions(groups: Sequence[SessionGroupRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("group of sessions", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "status" else "right", no_wrap=True)
    for group in groups:
        name = group.id[:MAX_NAME].encode("unicode_escape").decode()
        table.add_row(escape(name), group.status, *_cells(receipt_of_sessions([group])))
    table.add_section()
    num_complete = sum(group.status == "complete" for group in groups)
    said = f"{num_complete:,} complete"
    table.add_row(f"sum of {len(groups):,}", said, *_cells(receipt_of_sessions(groups)), style="bold")
    return table


def _cells(its: SessionReceipt) -> Iterator[str]:
    yield f"{its.seconds:,.1f}"
    for count in (its.generated_tokens, its.returned_tokens, its.wasted_tokens, its.num_sessions, its.num_stopped):
        yield f"{count:,}"
    yield from (f"{its.stopped_tokens:,}", f"{its.num_void:,}", f"{its.num_turns:,}")
    yield "-" if its.tool_seconds is None else f"{its.tool_seconds:,.1f}"
    yield f"{its.cached_tokens / its.prompt_tokens:.0%}" if its.cached_tokens is not None and its.prompt_tokens else "-"
