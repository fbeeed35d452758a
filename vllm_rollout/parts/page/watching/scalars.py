"""Turns a recorded rollout, or group of sessions, into the numbers that curves are drawn from.

Invariant: an unknown value has no number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median, pstdev
from typing import get_args

from vllm_rollout.config import MAX_REWARD, REWARD_THRESHOLD
from vllm_rollout.parts.page.recording.rows import RewardRow, RolloutRow
from vllm_rollout.parts.page.recording.session_rows import STOPPED_STATES, SessionGroupRow
from vllm_rollout.parts.page.watching.receipt import told_of
from vllm_rollout.parts.page.watching.session_receipt import receipt_of_sessions
from vllm_rollout.parts.shaping.rules.trace import End

TOKENS = ("generated", "returned", "wasted", "resumed", "stopped", "saved")
ENDED_STATES = ("finished", "truncated", "void", *STOPPED_STATES)
SECONDS = ("waiting_seconds", "saved_seconds", "queue_seconds")


def scalars(row: RolloutRow, threshold: float = REWARD_THRESHOLD) -> dict[str, float]:
    """Numbers of a rollout by name. `threshold`: a reward above it is a success.

    Lengths are those of candidates that were not stopped. Rewards are those of all candidates that have one.
    """
    return dict(_scalars(row, threshold))


def _scalars(row: RolloutRow, threshold: float) -> Iterator[tuple[str, float]]:
    receipt = told_of(row).receipt
    counted = {f"tokens/{name}": getattr(receipt, f"{name}_tokens") for name in TOKENS}
    timed = {f"time/{name}": getattr(receipt, name) for name in SECONDS}
    seconds = receipt.seconds if row.seconds is None else row.seconds
    told = {"time/seconds": seconds, **timed, "time/bubble": receipt.bubble, **counted}
    told["tokens/saved_error"] = receipt.saved_tokens_error
    yield from ((name, value) for name, value in told.items() if value is not None)
    yield from _of_lengths(known_lengths(row))
    yield from _of_rewards([prompt.rewards or () for prompt in row.prompts], threshold)
    ends = Counter(end for prompt in row.prompts for end in _ends(prompt.ends, prompt.lengths))
    yield from ((f"ends/{end}", ends[end]) for end in get_args(End))
    yield "ends/num_stopped", receipt.num_stopped
    yield "groups/moves", sum(len(prompt.moves or (0,)) - 1 for prompt in row.prompts)
    statuses = Counter(prompt.status for prompt in row.prompts if prompt.status is not None)
    yield from ((f"groups/{status}", number) for status, number in statuses.items())


def session_scalars(row: SessionGroupRow, threshold: float = REWARD_THRESHOLD) -> dict[str, float]:
    """Numbers of a group of sessions by name. Lengths are all tokens of a session that was not stopped."""
    return dict(_session_scalars(row, threshold))


def _session_scalars(row: SessionGroupRow, threshold: float) -> Iterator[tuple[str, float]]:
    receipt = receipt_of_sessions([row])
    yield "time/seconds", receipt.seconds
    yield from ((f"tokens/{name}", getattr(receipt, f"{name}_tokens")) for name in ("generated", "returned", "wasted"))
    yield "tokens/stopped", receipt.stopped_tokens
    if receipt.cached_tokens is not None and receipt.prompt_tokens:
        yield "tokens/cached_share_of_prompts", receipt.cached_tokens / receipt.prompt_tokens
    ended = [session for session in row.sessions if session.state in ("finished", "truncated")]
    yield from _of_lengths(session.num_tokens for session in ended)
    if ended:
        yield "sessions/turns", sum(session.num_turns for session in ended) / len(ended)
    if gaps := [gap for session in row.sessions for gap in session.gaps_s]:
        yield "sessions/seconds_between_turns", math.fsum(gaps) / len(gaps)
    yield from _of_rewards([[session.reward for session in row.sessions]], threshold)
    ends = Counter(session.state for session in row.sessions)
    yield from ((f"ends/{state}", ends[state]) for state in ENDED_STATES)
    yield "ends/num_stopped", receipt.num_stopped


def _of_lengths(known: Iterable[int]) -> Iterator[tuple[str, float]]:
    if lengths := sorted(known):
        yield "lengths/median", median(lengths)
        yield "lengths/p99", lengths[math.ceil(0.99 * len(lengths)) - 1]
        yield "lengths/max", lengths[-1]


def _of_rewards(by_group: Sequence[Sequence[float | None]], threshold: float) -> Iterator[tuple[str, float]]:
    # A recording of an earlier version may have larger rewards, whose squares no float holds.
    bounded = [[r and max(-MAX_REWARD, min(MAX_REWARD, r)) for r in group] for group in by_group]
    groups = [[reward for reward in group if reward is not None] for group in bounded]
    if rewards := [reward for group in groups for reward in group]:
        yield "rewards/mean", math.fsum(rewards) / len(rewards)
        yield "rewards/std", pstdev(rewards)
        yield "rewards/success", sum(reward > threshold for reward in rewards) / len(rewards)
        graded = [len(set(group)) > 1 for group in groups if group]  # rewards that are all equal teach nothing
        yield "rewards/groups_that_teach", sum(graded) / len(graded)


def known_lengths(row: RolloutRow) -> Iterator[int]:
    """Lengths of candidates that ended by themselves, or at `max_tokens`."""
    for prompt in row.prompts:
        for length, end in zip(prompt.lengths, _ends(prompt.ends, prompt.lengths), strict=True):
            if end in ("stop", "length"):
                yield length


def add_rewards(row: RolloutRow, posted: Iterable[RewardRow]) -> RolloutRow:
    """The row with rewards that came after it. A candidate's last reward counts. Rewards of unknown candidates are left
    out."""
    prompts = {prompt.id: prompt for prompt in row.prompts}
    for reward in (reward for each in posted for reward in each.rewards):
        prompt = prompts.get(reward.prompt_id)
        if prompt is not None and reward.index < len(prompt.lengths):
            prompt.rewards = prompt.rewards or [None] * len(prompt.lengths)
            prompt.rewards[reward.index] = reward.reward
    return row


def _ends(ends: Sequence[End] | None, lengths: Sequence[int]) -> Sequence[End]:
    return ends or ["stop"] * len(lengths)
