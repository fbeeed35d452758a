"""The report of what an engine has learned at one detection length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_rollout.kernel.rules.types import BASE_MODEL, Signal
from vllm_rollout.parts.pruning.rules.advice import Advice
from vllm_rollout.parts.pruning.rules.race_bias import AuditReport
from vllm_rollout.parts.pruning.rules.report import HeadInfo, ShadowReport, SignalReport


@dataclass(frozen=True, slots=True)
class LearningReport:
    """The quality of one detection length's calibration and head."""

    detection_length: int
    head: HeadInfo | None
    """None while no head is trained."""
    signals: Mapping[Signal, SignalReport]
    num_awaiting: int
    """Scored candidates whose reward has not come."""
    num_evicted: int
    """Features dropped before their reward came. A larger ring keeps more."""
    losses: Sequence[float]
    """Mean training loss of each version of the head, oldest first, in nats."""
    active: ShadowReport
    shadow: ShadowReport
    audit: AuditReport
    advice: Advice
    adapter: str = BASE_MODEL
    """Name of the LoRA adapter. Empty for the base model."""
