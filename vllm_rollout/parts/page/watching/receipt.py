"""Receipts of a trace, of an answer or of a server: a table, and their sum.

Invariant: a recorded receipt is shown unchanged. For an older trace without receipts, it is computed from the trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_rollout.kernel.http.answers import RolloutSummary
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.kernel.rules.types import STOP_STATES, EndReason, StopState
from vllm_rollout.parts.page.recording.file import read_trace, rows_of
from vllm_rollout.parts.page.recording.rows import RolloutPrompt, RolloutRow
from vllm_rollout.parts.page.recording.session_rows import SessionGroupRow
from vllm_rollout.parts.page.rules.receipt import RanGroup, receipt_of
from vllm_rollout.parts.page.watching.session_receipt import receipt_of_sessions, table_of_sessions
from vllm_rollout.parts.page.watching.top import feed
from vllm_rollout.parts.shaping.rules.trace import Trace

MAX_NAME = 32
PLAIN_WIDTH = 150
"""Characters in a line of output that goes to a file."""
COLUMNS = (
    *("seconds", "waiting", "saved", "tokens", "returned", "wasted", "resumed", "stopped", "saved\ntokens", "error"),
    *("bubble", "queue"),
)
NOT_SAID = "What stopped sessions would still have taken is not said: it is a matter of their tools."

_WRITTEN = TypeAdapter(Receipt)


class Told(NamedTuple):
    """The receipt of one rollout."""

    name: str
    receipt: Receipt
    run: str | None = None
    round: int | None = None
    kind: str | None = None

    @property
    def in_sum(self) -> Receipt:
        return self.receipt.repaying if self.kind == "long" else self.receipt


class Found(NamedTuple):
    """Contents of a source."""

    receipts: Sequence[Told]
    groups: Sequence[SessionGroupRow]
    trace: Trace | None = None
    """None if the source has nothing to replay."""
    num_ranks: int = 1
    """Number of ranks on which the trace's groups ran."""
    skipped: tuple[str, ...] = ()
    """Reason why each broken row was skipped."""

    @property
    def sum(self) -> Receipt:
        return reduce(add, (told.in_sum for told in self.receipts))


class Next(NamedTuple):
    """A setting to try next."""

    setting: dict[str, Any]
    """Fields of a rollout request."""
    saves_seconds: float | None
    """Seconds saved, out of all seconds of the trace. None if the trace has no times."""
    text: str


def receipts_of(source: str, api_key: str | None) -> Found:
    """Receipts and groups of sessions of a file or of a server.

    Raises: ValueError, OSError and RolloutError with what to do.
    """
    return _of_server(source, api_key) if source.startswith(("http://", "https://")) else _of_file(Path(source))


def as_json(source: str, found: Found, following: Next | str | None) -> str:
    """Receipts as JSON. `following`: the setting to try next, or the reason why none is known."""
    receipts, groups = found.receipts, found.groups
    told = [{**each._asdict(), "receipt": asdict(each.receipt)} for each in receipts]
    next_setting = following._asdict() if isinstance(following, Next) else None
    of_rollouts = {"receipts": told, "sum": asdict(found.sum) if receipts else None, "next": next_setting}
    named = [{"id": group.id, "status": group.status, "reason": group.reason} for group in groups]
    each = [{**its, "receipt": asdict(receipt_of_sessions([group]))} for its, group in zip(named, groups, strict=True)]
    summed = asdict(receipt_of_sessions(groups)) if groups else None
    return json.dumps({"source": source, **of_rollouts, "sessions": each, "sum_of_sessions": summed}, indent=1)


def show(found: Found, following: Next | str | None) -> None:
    """Print receipts as tables. `following`: as of `as_json`."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if found.receipts:
        console.print(_table(found))
    if found.groups:
        console.print(table_of_sessions(found.groups))
        console.print(NOT_SAID)
    if following is not None:
        console.print(f"[bold]Next:[/] {escape(following if isinstance(following, str) else following.text)}")


def _of_server(url: str, api_key: str | None) -> Found:
    """Receipts and groups of sessions from a server. A running rollout has no receipt yet. Raises: ValueError without
    any."""
    found, groups = [], []
    for name, row in feed(url, api_key):
        if name == "rollout" and row.get("receipt"):
            found.append(Told(row["rollout_id"], _WRITTEN.validate_python(row["receipt"]), *_where(row)))
        elif name == "sessions" and row["status"] != "running":
            groups.append(SessionGroupRow.model_validate(row))
        elif name == "ranks":  # every earlier rollout has been read
            break
    if not found and not groups:
        raise ValueError(
            f"{url} has no receipts: none of its last rollouts is over, or its vllm_rollout is older than receipts. "
            "Ask for a rollout first."
        )
    return Found(found, groups)


def _of_file(path: Path) -> Found:
    """Receipts and groups of sessions of a file, and the trace if it has rollouts.

    Raises: ValueError for a file that is neither a trace nor an answer. OSError.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}. Name what `--rollout-record` wrote, a saved answer, or a server's URL (http://…)."
        ) from error
    if (answer := _answer(path, text)) is not None:
        return Found([answer], [])
    rows: list[RolloutRow] = []
    groups: list[SessionGroupRow] = []
    broken: list[str] = []
    for row in rows_of(path, broken):
        rows += [row] if isinstance(row, RolloutRow) else []
        groups += [row] if isinstance(row, SessionGroupRow) else []
    if groups and not rows:
        return Found([], groups, skipped=tuple(broken))
    trace = read_trace(path, skip_broken=True)
    if not rows:
        raise ValueError(f"{path}: holds no rollout, only single prompts. Name what `--rollout-record` wrote.")
    each = [prompt for row in rows for prompt in row.prompts]
    ranks = [rank for prompt in each for rank in (prompt.rank, *(rank for _, rank in prompt.moves or ()))]
    num_ranks = 1 + max((rank for rank in ranks if rank is not None), default=0)
    return Found([told_of(row) for row in rows], groups, trace, num_ranks, trace.skipped)


def _answer(path: Path, text: str) -> Told | None:
    """Receipt of a saved answer, or None for another file. Raises: ValueError for an answer without a receipt."""
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or "prompts" in fields or "usage" not in fields:
            return None
        summary = RolloutSummary.model_validate(fields)
    except (json.JSONDecodeError, RecursionError, ValidationError):
        return None
    if summary.receipt is None:
        raise ValueError(f"{path}: this answer has no receipt: a server older than receipts sent it. Ask a newer one.")
    return Told(summary.id, summary.receipt, *_where(fields))


def _where(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(fields.get(name) for name in ("run", "round", "kind"))


def told_of(row: RolloutRow) -> Told:
    written = row.receipt
    if written is None:
        stops = any(end in STOP_STATES for prompt in row.prompts for end in prompt.ends or ())
        groups = [_ran(row, prompt, waited=prompt.audit or not (stops or row.kind)) for prompt in row.prompts]
        written = receipt_of(groups, row.seconds)
    return Told(row.rollout_id, written, row.run, row.round, row.kind)


def _ran(row: RolloutRow, prompt: RolloutPrompt, *, waited: bool) -> RanGroup:
    ends: list[EndReason | StopState] = list(prompt.ends or ["stop"] * len(prompt.lengths))
    group_size = row.group_size or len(ends)
    selected = prompt.selected
    if selected is None:  # an older trace: a race returns the shortest
        ended = sorted((num, i) for i, (num, end) in enumerate(zip(prompt.lengths, ends, strict=True)) if end == "stop")
        selected = [] if "deferred" in ends else [i for _, i in ended[:group_size]]
    ended_s = [at for at in prompt.ended_s or () if at is not None]
    return RanGroup(
        prompt.lengths, ends, selected, group_size, row.max_tokens,
        started_s=prompt.started_s, ended_s=ended_s if len(ended_s) == len(ends) else (), waited=waited,
    )  # fmt: skip


def _table(found: Found) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("rollout", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for told in found.receipts:
        where = told.name if told.run is None else f"{told.run} round {told.round} ({told.kind})"
        name = where[:MAX_NAME].encode("unicode_escape").decode()
        table.add_row(escape(name), *_cells(told.receipt))
    table.add_section()
    table.add_row(f"sum of {len(found.receipts)}", *_cells(found.sum), style="bold")
    return table


def _cells(its: Receipt) -> Iterator[str]:
    for seconds in (its.seconds, its.waiting_seconds, its.saved_seconds):
        yield "-" if seconds is None else f"{seconds:,.1f}"
    for count in (its.generated_tokens, its.returned_tokens, its.wasted_tokens, its.resumed_tokens, its.num_stopped):
        yield f"{count:,}"
    yield "-" if its.saved_tokens is None else f"{its.saved_tokens:,}"
    yield "-" if its.saved_tokens_error is None else f"{its.saved_tokens_error:+.0%} of {its.num_checked:,}"
    yield "-" if its.bubble is None else f"{its.bubble:.0%}"
    yield "-" if its.queue_seconds is None else f"{its.queue_seconds:,.1f}"
