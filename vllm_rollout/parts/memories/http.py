"""Served names in metrics of what is learned."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.rules.types import BASE_MODEL


class KnownAdapters:
    """Names that gauges have a series for: the base model's, which is empty, and the first adapters.

    A trainer may name each step's weights anew, so there is a limit.
    """

    def __init__(self) -> None:
        self._adapters: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return iter((BASE_MODEL, *self._adapters))

    def know(self, name: str) -> bool:
        """Note a name for which something was learned. True if it has series."""
        if name not in self and len(self._adapters) < MAX_ADAPTERS:
            self._adapters.append(name)
        return name in self
