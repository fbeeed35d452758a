"""The call to an engine core that asks for tokens of running candidates (`kernel/call_table.py`)."""

from __future__ import annotations

from typing import NamedTuple

from vllm_rollout.kernel.call_table import Operation


class LastTokens(NamedTuple):
    """The newest output tokens of a running candidate."""

    index: int  # type: ignore[assignment]
    offset: int
    """Number of the candidate's output tokens before these."""
    token_ids: list[int]


LAST_TOKENS: Operation[str, list[LastTokens]] = Operation("last_tokens", str, list[LastTokens])
"""Last tokens of a group's running candidates. Empty for a group that is not here."""
