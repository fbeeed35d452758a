"""Trajectories to grade, and grades of failures. Grading processes get trajectories as MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from vllm_rollout.kernel.rules.rewards import Grade

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
