"""Everything learned, by served name: a memory has a section of each part that learns.

Two LoRA adapters are two policies, whose scores, lengths and successes are unrelated. An adapter that is loaded again
under its name continues with the memory of the name, as the base model does with new weights.

A state is a sequence of rows, each of bounded size, so that a large one can be written between engine steps. A row
begins with its kind, which belongs to one part. The rows of the base model come first. Then each adapter follows, the
least recently used first, with its name and its rows:

    ["adapter", name]     before the rows of an adapter

Invariants: restored memories decide and go on as the saved ones, and any other state raises a ValueError. What is
learned of one name changes another name's memory only if that memory is given up for it. The base model's is never
given up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Protocol, Self

from vllm_rollout.checks import shown, text
from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.rules.types import BASE_MODEL

MAX_HISTORY_PROMPTS = 131_072
"""Most prompts in a history, about 30 MB. The prompts seen last are kept. Usual training sets have fewer."""
PROMPTS_PER_ROW = 512
MAX_ADAPTER_CHARS = 2**16
"""Longest name of an adapter in a state, in characters."""

Row = Sequence[Any]


class Section(Protocol):
    """One part's knowledge of one served name. Empty when it is made."""

    KINDS: ClassVar[Collection[str]]
    """Kinds of its rows."""

    def to_rows(self) -> Iterator[Row]:
        """JSON-able rows, made one by one. The section may change in between."""

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> Self:
        """Restore a section. Raises: ValueError for rows that no section can have."""


Memory = Mapping[str, Any]
"""Memory of one served name: sections by part."""


class Memories:
    """Memories of one engine, by served name."""

    def __init__(self, sections: Mapping[str, type[Section]]) -> None:
        """`sections`: of the parts that learn."""
        self._sections = sections
        self.base = self.new()
        """Memory of the base model."""
        self._adapters: dict[str, Memory] = {}
        """Memory of each adapter by name, the least recently used first."""
        self.awaits: list[Callable[[str], bool]] = []
        """Each returns True if something is awaited for an adapter, so that its memory is not given up."""
        self.on_given_up: list[Callable[[str, Memory], None]] = []
        """Called with each adapter that is given up."""

    def new(self) -> Memory:
        """An empty memory."""
        return {part: section() for part, section in self._sections.items()}

    def known(self, adapter: str) -> Memory | None:
        """The memory of this name without any use of it. None if there is none."""
        return self.base if adapter == BASE_MODEL else self._adapters.get(adapter)

    def of(self, adapter: str) -> Memory | None:
        """The memory of this name, which is created if necessary and now counts as used.

        Beyond `MAX_ADAPTERS`, the least recently used one without anything awaited is given up. None if there is none.
        """
        if adapter == BASE_MODEL:
            return self.base
        memory = self._adapters.pop(adapter, None)
        if memory is None:
            if len(self._adapters) >= MAX_ADAPTERS:
                spare = self._spare()
                if spare is None:
                    return None
                self._give_up(spare)
            memory = self.new()
        self._adapters[adapter] = memory
        return memory

    def has_place(self, adapter: str) -> bool:
        """True if `of` would return a memory for this name."""
        is_full = len(self._adapters) >= MAX_ADAPTERS
        return self.known(adapter) is not None or not is_full or self._spare() is not None

    def all(self) -> dict[str, Memory]:
        """All memories by name, the base model's first."""
        return {BASE_MODEL: self.base, **self._adapters}

    def to_state(self) -> Iterator[Row]:
        """JSON-able rows, made one by one. The memories may change in between: each section says how."""
        for adapter, memory in self.all().items():
            if adapter != BASE_MODEL:
                yield ["adapter", adapter]
            for section in memory.values():
                yield from section.to_rows()

    def restored(self, rows: Iterable[Any]) -> Memories:
        """Memories of the same sections, from a state. Raises: ValueError for a state that no memories can have."""
        names: list[str] = []
        memories: dict[str, dict[str, list[Any]]] = {BASE_MODEL: self._no_rows()}
        here = memories[BASE_MODEL]
        part_of = {kind: part for part, section in self._sections.items() for kind in section.KINDS}
        for row in rows:
            match row:
                case ["adapter", name]:
                    adapter = text(name, "the name of an adapter in a state", MAX_ADAPTER_CHARS)
                    if adapter in memories or len(names) == MAX_ADAPTERS:
                        raise ValueError(
                            f"the adapters of a state must be at most {MAX_ADAPTERS} different ones, got "
                            f"{shown([*names, adapter])}"
                        )
                    names.append(adapter)
                    here = memories[adapter] = self._no_rows()
                case [str(kind), *_] if kind in part_of:
                    here[part_of[kind]].append(row)
                case _:
                    raise ValueError(f"a row of a state is of a known kind and form, got {shown(row)}")
        restored = Memories(self._sections)
        restored._adapters = {
            adapter: {part: self._sections[part].from_rows(its) for part, its in by_part.items()}
            for adapter, by_part in memories.items()
        }
        restored.base = restored._adapters.pop(BASE_MODEL)
        return restored

    def take_over(self, other: Memories) -> None:
        """Replace all that is learned by that of others."""
        self.base, self._adapters = other.base, other._adapters

    def _no_rows(self) -> dict[str, list[Any]]:
        return {part: [] for part in self._sections}

    def _spare(self) -> str | None:
        """The adapter to give up first. None when something is awaited for all."""
        return next((name for name in self._adapters if not any(awaits(name) for awaits in self.awaits)), None)

    def _give_up(self, adapter: str) -> None:
        memory = self._adapters.pop(adapter)
        for told in self.on_given_up:
            told(adapter, memory)


def rows_in_parts(prompts: Mapping[str, tuple[Any, ...]], size: int) -> Iterator[list[list[Any]]]:
    """Rows [key, *fields] of the prompts, up to `size` at a time, each as it is when its part is read.

    Prompts that are forgotten, or first seen, in the meantime are left out.
    """
    keys = iter(list(prompts))
    while some := list(islice(keys, size)):
        found = [(key, prompts.get(key)) for key in some]
        yield [[key, *fields] for key, fields in found if fields is not None]
