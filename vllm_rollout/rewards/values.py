"""What is graded, and what comes of it. Both cross to the processes that grade, as MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

RewardStatus = Literal["ok", "timeout", "error", "void"]
"""`timeout`: it took longer than its test case may, and earns 0. `error`: its grader failed, it has no reward. `void`:
what went wrong was not the policy's fault, it counts for nothing."""

VOID: None = None
"""What a reward function returns for a trajectory that must not count."""

Message = dict[str, Any]
"""A message of a chat: `{"role": …, "content": …}`."""


class Trajectory(msgspec.Struct, frozen=True):
    """What a reward is for."""

    prompt: str | list[Message]
    text: str
    """What the policy answered."""
    data: Any = None
    """What came with the prompt: any JSON, an answer or tests. TRL's columns and verl's ground truth come out of it."""
    token_ids: Sequence[int] = ()
    """The text's tokens, where the caller has them: TRL's `completion_ids`."""


class Grade(msgspec.Struct, frozen=True):
    """What a grader says of one trajectory."""

    status: RewardStatus
    reward: float | None = None
    """A finite number with `ok`, 0 with `timeout`, else None."""
    reason: str | None = None
    """Why the status is not `ok`, in a sentence."""
    parts: dict[str, float] | None = None
    """What the reward is made of, by name, where the function says it."""
    seconds: float = 0.0
    """How long grading took, without the time for which it waited for a free core."""


MAX_REASON = 500
"""Characters of a reason: an exception's text may be a gigabyte."""


def failed(reason: str, seconds: float = 0.0) -> Grade:
    return Grade("error", reason=written(reason), seconds=seconds)


def written(text: str) -> str:
    """As it can be sent: short, and without halves of surrogate pairs."""
    return text[:MAX_REASON].encode(errors="backslashreplace").decode()


def case_of(trajectory: Trajectory, test: bytes = b"") -> str:
    """The test case that a time limit is learned for: this prompt with its data, and this test of it."""
    named = msgspec.json.encode([trajectory.prompt, trajectory.data])
    return blake2b(named + b"\0" + test, digest_size=16).hexdigest()
