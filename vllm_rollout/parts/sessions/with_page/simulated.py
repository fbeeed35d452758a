"""Recorded groups of sessions, as input of `--sessions`: their tokens as a trace, and the behaviour of their tools.

Invariant: a session that was stopped counts as longer than its stop. A tool that ran at that moment counts as longer,
too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from vllm_rollout.config import MAX_TRACED_TOKENS
from vllm_rollout.kernel.rules.types import SessionState
from vllm_rollout.parts.page.recording.file import rows_of
from vllm_rollout.parts.page.recording.rows import RolloutRow
from vllm_rollout.parts.page.recording.session_rows import STOPPED_STATES, SessionGroupRow, SessionRow
from vllm_rollout.parts.sessions.with_shaping.simulated import MAX_TOOL_SECONDS, MAX_TURNS, SessionTerms
from vllm_rollout.parts.shaping.rules.censoring import fit_log_lengths
from vllm_rollout.parts.shaping.rules.trace import End, Trace, TracedCandidate, TracedPrompt, TracedRollout

ENDS: dict[SessionState, End] = {
    "finished": "stop", "truncated": "length", "surplus": "surplus", "pruned": "pruned", "deferred": "deferred",
}  # fmt: skip
"""End in a trace, by a session's state. A void session is left out, like a candidate that failed."""
MS = 1000
MOST_FAILURES = 0.99


class RecordedGroups(NamedTuple):
    """Contents of a recording."""

    groups: list[SessionGroupRow]
    """Groups of sessions in the order of their ends."""
    num_rollouts: int
    """Number of rollouts of answers."""
    broken: list[str]
    """Fault of each broken row. The last row may still have been in writing."""

    def trace(self, prompts_per_step: int | None) -> Trace:
        """Trace of the groups, by `trace_of_sessions`."""
        return trace_of_sessions(self.groups, prompts_per_step, self.num_rollouts, self.broken)

    def terms(self, *, in_steps: bool) -> SessionTerms:
        """Terms learned from the groups, by `learned_terms`."""
        return learned_terms(self.groups, in_steps=in_steps)


def read_session_groups(path: Path) -> RecordedGroups:
    """Face `recorded`: the groups of sessions of a recording. Raises: OSError."""
    groups, num_rollouts = [], 0
    broken: list[str] = []
    for row in rows_of(path, broken):
        groups += [row] if isinstance(row, SessionGroupRow) else []
        num_rollouts += isinstance(row, RolloutRow)
    return RecordedGroups(groups, num_rollouts, broken)


def trace_of_sessions(
    groups: Sequence[SessionGroupRow],
    prompts_per_step: int | None = None,
    num_rollouts: int = 0,
    skipped: Sequence[str] = (),
) -> Trace:
    """Trace in which each group is a prompt.

    A group that began after all groups before it were over begins another rollout, unless `prompts_per_step` sets their
    size. `num_rollouts`: rollouts of answers, which are left out. `skipped`: faults of broken rows.

    Raises: ValueError if nothing is left to replay.
    """
    rollouts: list[dict[str, TracedPrompt]] = []
    num_empty, over = 0, -math.inf
    for group in groups:
        is_full = prompts_per_step is not None and rollouts and len(rollouts[-1]) == prompts_per_step
        if not rollouts or is_full or (prompts_per_step is None and group.began >= over):
            rollouts.append({})
        over = max(over, group.began + (group.seconds or 0.0))
        id = group.name if group.id in rollouts[-1] else group.id
        prompt = _prompt(id, group)
        if prompt.has_tokens:
            rollouts[-1][id] = prompt
        else:
            num_empty += 1
    whole = tuple(TracedRollout(tuple(each.values()), f"sessions-{n}") for n, each in enumerate(rollouts) if each)
    if not whole:
        raise ValueError("none of the recorded sessions has generated a token. Record groups that have.")
    sizes = {group.group_size for group in groups}
    num_void = sum(session.state == "void" for group in groups for session in group.sessions)
    return Trace(
        whole,
        group_size=sizes.pop() if len(sizes) == 1 else None,
        num_failed=num_void,
        num_empty=num_empty,
        others=f"{num_rollouts:,} rollout{'s' * (num_rollouts != 1)} of answers: leave --sessions out to replay them"
        if num_rollouts
        else "",
        skipped=tuple(skipped),
    )


def _prompt(id: str, group: SessionGroupRow) -> TracedPrompt:
    candidates = [
        TracedCandidate(session.num_tokens, ENDS[session.state], None, session.reward)
        for session in group.sessions
        if session.state in ENDS and (session.num_tokens or session.state in STOPPED_STATES)
    ]
    first = (session.turns[0].num_prompt_tokens for session in group.sessions if session.turns)
    return TracedPrompt(id, tuple(candidates), next(first, None) or 0, group.max_tokens)


def learned_terms(groups: Sequence[SessionGroupRow], *, in_steps: bool) -> SessionTerms:
    """Terms estimated from recorded sessions.

    `in_steps`: tools take steps, as on a machine without a profile. One step is the mean time of a turn per token.
    """
    sessions = [session for group in groups for session in group.sessions]
    turns = [turn for session in sessions for turn in session.turns if turn.ended_s is not None]
    ran = [gap for session in sessions for gap in session.gaps_s]
    failed, cut = _last_tools(sessions, ("void",)), _last_tools(sessions, STOPPED_STATES)
    num_ended = sum(session.state in ("finished", "truncated") for session in sessions)
    num_tools = len(ran) + len(failed) + len(cut)
    said = [num for session in sessions for num in _tool_tokens(session)]
    default = SessionTerms()
    seconds, sigma = 0.0, default.tool_sigma
    if ran or failed:
        fit = fit_log_lengths(*([round(MS * gap) for gap in gaps] for gaps in (ran + failed, cut)), default.tool_sigma)
        seconds, sigma = math.exp(fit.location + fit.std**2 / 2) / MS, fit.std
    if in_steps and (num_tokens := sum(turn.num_tokens or 0 for turn in turns)):
        seconds *= num_tokens / max(1 / MS, math.fsum(turn.ended_s - turn.began_s for turn in turns))
    return SessionTerms(
        turns=min(MAX_TURNS, 1 + num_tools / num_ended) if num_ended else default.turns,
        tool_seconds=min(seconds, MAX_TOOL_SECONDS),
        tool_sigma=sigma,
        tool_tokens=min(round(fmean(said)), MAX_TRACED_TOKENS) if said else default.tool_tokens,
        tool_failures=min(MOST_FAILURES, len(failed) / num_tools) if num_tools else 0.0,
    )


def _tool_tokens(session: SessionRow) -> Iterator[int]:
    """Tokens that the tool added to each turn's prompt, for turns that extend the turn before."""
    for (_, _, num, prompt, _, _), after in pairwise(session.turns):
        if after.history in ("extended", "mended") and None not in (num, prompt, after.num_prompt_tokens):
            yield max(0, after.num_prompt_tokens - prompt - num)


def _last_tools(sessions: Sequence[SessionRow], states: Sequence[SessionState]) -> list[float]:
    """Seconds from a session's last turn to its end, for sessions that ended in one of `states` between turns."""
    ended = ((each.ended_s, each.turns[-1].ended_s) for each in sessions if each.state in states and each.turns)
    return [
        over_s - turn_s for over_s, turn_s in ended if over_s is not None and turn_s is not None and over_s > turn_s
    ]
