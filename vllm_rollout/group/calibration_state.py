"""States of calibrators as earlier versions wrote them. Invariant: what is no such state is given back as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_rollout.group.checks import MAX_SCORE, fields_of, integer, listed, number
from vllm_rollout.group.scale import GUESS, UNKNOWN, Estimate, Scale, estimate

FIELDS_WITHOUT_VERSIONS = ("signal", "labels", "recent", "scale", "num_since_scale")


def current_form(state: Any) -> Any:
    """Earlier versions took scores of all versions of a head alike, and counted labels in the window only.

    Raises: ValueError.
    """
    if not isinstance(state, Mapping) or "scale" not in state:
        return state
    fields_of(state, FIELDS_WITHOUT_VERSIONS, "a calibrator of an earlier version")
    labels = listed(state["labels"], "labels of a calibrator")
    recent = listed(state["recent"], "recent scores of a calibrator")
    return {
        "signal": state["signal"],
        "labels": [[*listed(label, "a label of a calibrator", length=3), 0] for label in labels],
        "recent": [[score, 0] for score in recent],
        "scales": [_scale(state, [number(score, "a recent score", -MAX_SCORE, MAX_SCORE) for score in recent])],
        "num_versions": 1,
        "present": 0,
        "num_seen": [0, 0],  # those in the window count anyway
    }


def _scale(state: Mapping[str, Any], recent: list[float]) -> list[float]:
    center, width = listed(state["scale"], "scale of a calibrator", length=2)
    num_new = integer(state["num_since_scale"], "num_since_scale of a calibrator")
    if state["signal"] == "head":
        if (center, width) != (0.0, 1.0):
            raise ValueError(f"scale of the head's calibrator must be [0, 1], got [{center!r:.40}, {width!r:.40}]")
        return Scale(UNKNOWN, GUESS, estimate(recent, GUESS), len(recent)).to_state()
    return Scale(0, GUESS, Estimate(center, width, float(min(len(recent), 256))), len(recent), num_new).to_state()
