"""What is learned, by served name: of the base model, and of each LoRA adapter by its name. One state for all of it.

Two adapters are two policies, whose scores, lengths and successes say nothing of each other. An adapter that is loaded
anew under its name goes on with what the name has learned, as the base model does with new weights.

A state is the rows of the base model's memory (`group/memory.py`), then of each adapter, the least recently used first,

["adapter", name]       and the rows of its memory.

Invariant: nothing that is told of one name changes another's memory, unless that one is given up for it; the base
model's never is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.group.checks import shown, text
from vllm_rollout.group.memory import Memory, Row
from vllm_rollout.group.types import BASE_MODEL, HeadKey

MAX_ADAPTER_CHARS = 2**16
"""Longest name of an adapter in a state."""


class Memories:
    """What one engine has learned."""

    def __init__(self) -> None:
        self.base = Memory()
        """Of the base model."""
        self._adapters: dict[str, Memory] = {}
        """By name, the least recently used first."""
        self._forgotten: list[HeadKey] = []
        """Of adapters that were given up."""

    def known(self, adapter: str) -> Memory | None:
        """What is known of this name, without using it; None when that is nothing."""
        return self.base if adapter == BASE_MODEL else self._adapters.get(adapter)

    def of(self, adapter: str, awaited: Callable[[str], bool]) -> Memory | None:
        """The memory of this name, which counts as used.

        Beyond `MAX_ADAPTERS` the least recently used one goes, of those that nobody awaits rewards for; None when there
        is no such.
        """
        if adapter == BASE_MODEL:
            return self.base
        memory = self._adapters.pop(adapter, None)
        if memory is None:
            if len(self._adapters) >= MAX_ADAPTERS:
                spare = self._spare(awaited)
                if spare is None:
                    return None
                self._forget(spare)
            memory = Memory()
        self._adapters[adapter] = memory
        return memory

    def has_place(self, adapter: str, awaited: Callable[[str], bool]) -> bool:
        """Whether `of` would have a memory for this name."""
        is_full = len(self._adapters) >= MAX_ADAPTERS
        return self.known(adapter) is not None or not is_full or self._spare(awaited) is not None

    def all(self) -> dict[str, Memory]:
        """By name, the base model's first."""
        return {BASE_MODEL: self.base, **self._adapters}

    def take_forgotten(self) -> list[HeadKey]:
        """Detection lengths and adapters that were given up since the last call: their heads may go too."""
        taken, self._forgotten = self._forgotten, []
        for adapter, memory in self.all().items():
            taken += [HeadKey(length, adapter) for length in memory.forgotten]
            memory.forgotten.clear()
        return taken

    def to_state(self) -> Iterator[Row]:
        """JSON-able rows, made as they are taken; meanwhile the memories may go on, as in `Memory.to_state`."""
        for adapter, memory in self.all().items():
            if adapter != BASE_MODEL:
                yield ["adapter", adapter]
            yield from memory.to_state()

    @classmethod
    def from_state(cls, rows: Iterable[Any]) -> Memories:
        """Raises: ValueError for what no memories can have been."""
        parts = _Parts(rows)
        memories = cls()
        memories.base = Memory.from_state(parts.next())
        while (adapter := parts.following) is not None:
            if adapter in memories._adapters or len(memories._adapters) == MAX_ADAPTERS:
                raise ValueError(
                    f"the adapters of a state must be at most {MAX_ADAPTERS} different ones, got "
                    f"{shown([*memories._adapters, adapter])}"
                )
            memories._adapters[adapter] = Memory.from_state(parts.next())
        return memories

    def _spare(self, awaited: Callable[[str], bool]) -> str | None:
        """The adapter to give up first; None when rewards are awaited for all."""
        return next((adapter for adapter in self._adapters if not awaited(adapter)), None)

    def _forget(self, adapter: str) -> None:
        memory = self._adapters.pop(adapter)
        self._forgotten += [HeadKey(length, adapter) for length in {*memory.forgotten, *memory.learnings}]


class _Parts:
    """The rows of one memory after the other."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = iter(rows)
        self.following: str | None = None
        """The adapter whose rows come next; None: the last ones were taken."""

    def next(self) -> Iterator[Any]:
        """To be taken to their end. Raises: ValueError."""
        self.following = None
        for row in self._rows:
            match row:
                case ["adapter", adapter]:
                    self.following = text(adapter, "the name of an adapter in a state", MAX_ADAPTER_CHARS)
                    return
                case _:
                    yield row
