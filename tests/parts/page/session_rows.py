"""Rows of groups of sessions, as a recording has them."""

from __future__ import annotations

from typing import Any

WON = {
    "id": "a", "state": "finished", "ended_by": "finish", "num_turns": 2, "num_tokens": 60, "reward": 1.0,
    "ended_s": 9.0, "turns": [[1.0, 3.0, 40, 100, 0, "first"], [5.0, 8.0, 20, 160, 128, "extended"]],
}  # fmt: skip
LOST = {
    "id": "b", "state": "surplus", "ended_by": "race", "num_turns": 1, "num_tokens": 30, "ended_s": 9.0,
    "turns": [[2.0, 9.5, 30, 100, 96, "first"]],
}  # fmt: skip
VOID = {"id": "c", "state": "void", "ended_by": "finish", "num_turns": 0, "num_tokens": 0, "ended_s": 4.0}


def session_group(name: str, *sessions: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One of three sessions, of which the first comes back."""
    told = {"name": name, "id": f"id of {name}", "group_size": 1, "num_candidates": 3, "began": 1000.0, "seconds": 9.0}
    return {**told, "status": "complete", "selected": [0], "sessions": list(sessions or (WON, LOST, VOID)), **more}
