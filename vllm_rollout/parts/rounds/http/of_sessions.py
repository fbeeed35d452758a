"""Rounds of sessions, as far as other files of rounds know them. Invariant: without sessions there are none."""

from __future__ import annotations

from typing import Any

from vllm_rollout.kernel.parts import face
from vllm_rollout.parts.rounds.http.answers import RoundAnswer, RoundStreamEvent

of_sessions: Any = face("rounds", "session_rounds")
"""The module `session_rounds` of rounds with sessions. None without sessions."""

ANY_ANSWER: Any = RoundAnswer if of_sessions is None else RoundAnswer | of_sessions.SessionRoundAnswer
ANY_EVENT: Any = RoundStreamEvent if of_sessions is None else RoundStreamEvent | of_sessions.SessionRoundEvent
