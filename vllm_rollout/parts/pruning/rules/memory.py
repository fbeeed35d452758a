"""Everything learned, by served name: calibrations by detection length, lengths and success of prompts.

Two LoRA adapters are two policies, whose scores, lengths and successes are unrelated. An adapter that is loaded again
under its name continues with the memory of the name, as the base model does with new weights.

A state is a sequence of rows, each of bounded size, so that a large one can be written between engine steps. The rows
of the base model come first. Then each adapter follows, the least recently used first, with its name and its rows:

    ["learning", {detection_length, calibrators, verdicts}]     one per detection length, the least recently used first
    ["outcomes", detection_length, [outcome, ...]]              after their learning, `OUTCOMES_PER_ROW` at a time
    ["prompts", [[key, *average], ...]]                         `PROMPTS_PER_ROW` at a time
    ["successes", [[key, rewarded, successful], ...]]           `PROMPTS_PER_ROW` at a time
    ["length_trial", [tried, ...]]                              `PROMPTS_PER_ROW` at a time
    ["lengths", {dataset, log_lengths, shape}]                  once, last: a state that was cut off lacks it
    ["adapter", name]                                           before the rows of an adapter

Invariants: a restored memory decides and goes on as the saved one, and any other state raises a ValueError. Labels of
one name change another name's memory only if that memory is given up for it. The base model's is never given up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.rules.checks import fields_of, listed, shown, text
from vllm_rollout.kernel.rules.types import BASE_MODEL, HeadKey
from vllm_rollout.parts.pruning.rules.learning import REPORT_WINDOW, Learning
from vllm_rollout.parts.pruning.rules.length_trial import TRIAL_WINDOW, TriedCandidate, tried_from_state
from vllm_rollout.parts.pruning.rules.success import SuccessHistory
from vllm_rollout.parts.shaping.rules.history import MAX_HISTORY_PROMPTS, TOTALS, LengthHistory

MAX_DETECTION_LENGTHS = 8
"""Detection lengths at which one server learns for each served name. Each has its own head and calibration."""

OUTCOMES_PER_ROW = 512
PROMPTS_PER_ROW = 512

LISTS = {
    "prompts": ("prompts of a length history", MAX_HISTORY_PROMPTS),
    "successes": ("prompts of a success history", MAX_HISTORY_PROMPTS),
    "length_trial": ("candidates of a trial of lengths", TRIAL_WINDOW),
}
"""Kinds of rows that come in parts: their name in errors, and their largest number of items in all."""

Row = Sequence[Any]


class Memory:
    """Memory of one engine for one served name."""

    def __init__(self) -> None:
        self.learnings: dict[int, Learning] = {}
        """Learnings by detection length, the least recently used first."""
        self.lengths = LengthHistory()
        self.successes = SuccessHistory()
        self.tried: deque[TriedCandidate] = deque(maxlen=TRIAL_WINDOW)
        """The newest rewarded candidates of all length trials."""
        self.forgotten: list[int] = []
        """Detection lengths that were given up and not yet taken from here. Their heads may be dropped too."""
        self.num_evicted: Counter[int] = Counter()
        """Labels whose features were gone when their reward came, by detection length. Not saved."""

    def learning(self, detection_length: int, awaited: Callable[[int], bool]) -> Learning | None:
        """The learning of this length, which is created if necessary and now counts as used.

        Beyond `MAX_DETECTION_LENGTHS`, the least recently used one without awaited rewards is given up. None if there
        is none.
        """
        learning = self.learnings.pop(detection_length, None)
        if learning is None:
            if self.is_full:
                spare = self.spare(awaited)
                if spare is None:
                    return None
                del self.learnings[spare]
                del self.num_evicted[spare]
                if spare not in self.forgotten:
                    self.forgotten.append(spare)
            learning = Learning(detection_length)
        self.learnings[detection_length] = learning
        return learning

    @property
    def is_full(self) -> bool:
        return len(self.learnings) >= MAX_DETECTION_LENGTHS

    def spare(self, awaited: Callable[[int], bool]) -> int | None:
        """The detection length to give up first. None when rewards are awaited for all."""
        return next((length for length in self.learnings if not awaited(length)), None)

    def to_state(self) -> Iterator[Row]:
        """JSON-able rows, made one by one.

        The memory may change in between: each learning, and each prompt, is as it is when its row is made.
        """
        for detection_length, learning in list(self.learnings.items()):
            state = learning.to_state()
            outcomes = state.pop("outcomes")
            yield ["learning", state]
            for start in range(0, len(outcomes), OUTCOMES_PER_ROW):
                yield ["outcomes", detection_length, outcomes[start : start + OUTCOMES_PER_ROW]]
        for prompts in self.lengths.prompts(PROMPTS_PER_ROW):
            yield ["prompts", prompts]
        for successes in self.successes.prompts(PROMPTS_PER_ROW):
            yield ["successes", successes]
        tried = list(self.tried)
        for start in range(0, len(tried), PROMPTS_PER_ROW):
            yield ["length_trial", tried[start : start + PROMPTS_PER_ROW]]
        yield ["lengths", self.lengths.totals()]

    @classmethod
    def from_state(cls, rows: Iterable[Any]) -> Memory:
        """Restore a memory. Raises: ValueError for a state that no memory can have."""
        learnings: dict[Any, dict[str, Any]] = {}
        lists: dict[str, list[Any]] = {kind: [] for kind in LISTS}
        totals: Mapping[str, Any] | None = None
        for row in rows:
            if totals is not None:
                raise ValueError(f"row 'lengths' of a state must be the last one, then came {shown(row)}")
            match row:
                case ["learning", {"detection_length": int(length)} as state]:
                    if length in learnings or len(learnings) == MAX_DETECTION_LENGTHS:
                        raise ValueError(
                            f"the detection lengths of a state must be at most {MAX_DETECTION_LENGTHS} different ones, "
                            f"got {shown([*learnings, length])}"
                        )
                    learnings[length] = {**state, "outcomes": []}
                case ["outcomes", int(length), list(outcomes)] if length in learnings:
                    learnings[length]["outcomes"] += outcomes
                    listed(learnings[length]["outcomes"], "outcomes of a learning", REPORT_WINDOW)
                case [str(kind), list(some)] if kind in LISTS:
                    lists[kind] += some
                    listed(lists[kind], *LISTS[kind])
                case ["lengths", state]:
                    totals = fields_of(state, TOTALS, "row 'lengths' of a state")
                case _:
                    raise ValueError(f"a row of a state is of a known kind and form, got {shown(row)}")
        if totals is None:
            raise ValueError("a state ends with the row 'lengths', but there is none: was it cut off?")
        memory = cls()
        memory.learnings = {length: Learning.from_state(state) for length, state in learnings.items()}
        memory.lengths = LengthHistory.from_state({"prompts": lists["prompts"], **totals})
        memory.successes = SuccessHistory.from_state(lists["successes"])
        memory.tried.extend(map(tried_from_state, lists["length_trial"]))
        return memory


MAX_ADAPTER_CHARS = 2**16
"""Longest name of an adapter in a state, in characters."""


class Memories:
    """Memories of one engine, by served name."""

    def __init__(self) -> None:
        self.base = Memory()
        """Memory of the base model."""
        self._adapters: dict[str, Memory] = {}
        """Memory of each adapter by name, the least recently used first."""
        self._forgotten: list[HeadKey] = []
        """Detection lengths of adapters that were given up."""

    def known(self, adapter: str) -> Memory | None:
        """The memory of this name without any use of it. None if there is none."""
        return self.base if adapter == BASE_MODEL else self._adapters.get(adapter)

    def of(self, adapter: str, awaited: Callable[[str], bool]) -> Memory | None:
        """The memory of this name, which is created if necessary and now counts as used.

        Beyond `MAX_ADAPTERS`, the least recently used one without awaited rewards is given up. None if there is none.
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
        """True if `of` would return a memory for this name."""
        is_full = len(self._adapters) >= MAX_ADAPTERS
        return self.known(adapter) is not None or not is_full or self._spare(awaited) is not None

    def all(self) -> dict[str, Memory]:
        """All memories by name, the base model's first."""
        return {BASE_MODEL: self.base, **self._adapters}

    def take_forgotten(self) -> list[HeadKey]:
        """Detection lengths and adapters that were given up since the last call. Their heads may be dropped too."""
        taken, self._forgotten = self._forgotten, []
        for adapter, memory in self.all().items():
            taken += [HeadKey(length, adapter) for length in memory.forgotten]
            memory.forgotten.clear()
        return taken

    def to_state(self) -> Iterator[Row]:
        """JSON-able rows, made one by one. The memories may change in between, as in `Memory.to_state`."""
        for adapter, memory in self.all().items():
            if adapter != BASE_MODEL:
                yield ["adapter", adapter]
            yield from memory.to_state()

    @classmethod
    def from_state(cls, rows: Iterable[Any]) -> Memories:
        """Restore memories. Raises: ValueError for a state that no memories can have."""
        parts: dict[str, list[Any]] = {BASE_MODEL: []}
        part = parts[BASE_MODEL]
        for row in rows:
            match row:
                case ["adapter", name]:
                    adapter = text(name, "the name of an adapter in a state", MAX_ADAPTER_CHARS)
                    if adapter in parts or len(parts) > MAX_ADAPTERS:
                        raise ValueError(
                            f"the adapters of a state must be at most {MAX_ADAPTERS} different ones, got "
                            f"{shown([*list(parts)[1:], adapter])}"
                        )
                    part = parts[adapter] = []
                case _:
                    part.append(row)
        memories = cls()
        memories._adapters = {adapter: Memory.from_state(part) for adapter, part in parts.items()}
        memories.base = memories._adapters.pop(BASE_MODEL)
        return memories

    def _spare(self, awaited: Callable[[str], bool]) -> str | None:
        """The adapter to give up first. None when rewards are awaited for all."""
        return next((adapter for adapter in self._adapters if not awaited(adapter)), None)

    def _forget(self, adapter: str) -> None:
        memory = self._adapters.pop(adapter)
        self._forgotten += [HeadKey(length, adapter) for length in {*memory.forgotten, *memory.learnings}]
