"""Trajectories and their grades. Both are sent to and from grading processes, as MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

RewardStatus = Literal["ok", "timeout", "error", "void"]
"""`timeout`: grading took longer than the test case may, and the reward is 0. `error`: the grader failed, and there is
no reward. `void`: the fault is not the policy's, and the trajectory does not count."""

VOID: None = None
"""Return value of a reward function for a trajectory that must not count."""

Message = dict[str, Any]
"""A message of a chat: `{"role": …, "content": …}`."""


class Trajectory(msgspec.Struct, frozen=True):
    """A trajectory to grade."""

    prompt: str | list[Message]
    text: str
    """Answer of the policy."""
    data: Any = None
    """Data of the prompt, any JSON: an answer or tests. TRL's columns and verl's ground truth are taken from it."""
    token_ids: Sequence[int] = ()
    """Tokens of the text, if the caller has them: TRL's `completion_ids`."""


class Grade(msgspec.Struct, frozen=True):
    """Result of grading one trajectory."""

    status: RewardStatus
    reward: float | None = None
    """A finite number with `ok`, 0 with `timeout`, else None."""
    reason: str | None = None
    """Reason why the status is not `ok`, in a sentence."""
    parts: dict[str, float] | None = None
    """Parts of the reward by name, if the function gives them."""
    seconds: float = 0.0
    """Duration of grading, without the time spent waiting for a free core."""


MAX_REASON = 500
"""Characters of a reason: an exception's text may be a gigabyte."""


def failed(reason: str, seconds: float = 0.0) -> Grade:
    return Grade("error", reason=written(reason), seconds=seconds)


def written(text: str) -> str:
    """Text that can be sent: short, and without halves of surrogate pairs."""
    return text[:MAX_REASON].encode(errors="backslashreplace").decode()


def case_of(trajectory: Trajectory, test: bytes = b"") -> str:
    """Key of the test case for which a time limit is learned: this prompt with its data, and this test of it."""
    named = msgspec.json.encode([trajectory.prompt, trajectory.data])
    return blake2b(named + b"\0" + test, digest_size=16).hexdigest()
