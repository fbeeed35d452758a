"""Events of a feed since its last batch. Invariant: each is in one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_rollout.parts.feeds.http.answers import FailedPrompt

MAX_WARNINGS = 16


@dataclass(slots=True)
class SinceBatch:
    """Events since the last batch that the next one reports."""

    dropped: list[str] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    filtered: list[str] = field(default_factory=list)
    failed: list[FailedPrompt] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def state(self) -> dict[str, Any]:
        """The events so far."""
        return {name: [*getattr(self, name)] for name in self.__slots__}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> SinceBatch:
        """Raises: TypeError, ValueError."""
        failed = [FailedPrompt.model_validate(each) for each in state.get("failed", [])]
        return cls(**{**state, "failed": failed})

    def warn(self, warning: str) -> None:
        """Add a warning that is not there yet, if there are not too many."""
        if warning not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(warning)
