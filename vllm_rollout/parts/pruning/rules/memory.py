"""Pruning's knowledge of one served name: calibrations by detection length, and success of prompts.

Rows of its state (`parts/memories/rules.py`):

    ["learning", {detection_length, calibrators, verdicts}]     one per detection length, the least recently used first
    ["outcomes", detection_length, [outcome, ...]]              after their learning, `OUTCOMES_PER_ROW` at a time
    ["successes", [[key, rewarded, successful], ...]]           `PROMPTS_PER_ROW` at a time
    ["length_trial", [tried, ...]]                              `PROMPTS_PER_ROW` at a time

Invariant: a restored memory decides and goes on as the saved one, and any other state raises a ValueError.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar

from vllm_rollout.checks import listed, shown
from vllm_rollout.kernel.rules.keys import Key
from vllm_rollout.parts.memories.rules import MAX_HISTORY_PROMPTS, PROMPTS_PER_ROW, Row
from vllm_rollout.parts.pruning.rules.learning import REPORT_WINDOW, Learning
from vllm_rollout.parts.pruning.rules.length_trial import TRIAL_WINDOW, TriedCandidate, tried_from_state
from vllm_rollout.parts.pruning.rules.success import SuccessHistory

MAX_DETECTION_LENGTHS = 8
"""Detection lengths at which one server learns for each served name. Each has its own head and calibration."""

OUTCOMES_PER_ROW = 512

LISTS = {
    "successes": ("prompts of a success history", MAX_HISTORY_PROMPTS),
    "length_trial": ("candidates of a trial of lengths", TRIAL_WINDOW),
}
"""Kinds of rows that come in parts: their name in errors, and their largest number of items in all."""


class PruningMemory:
    """Memory of one engine for one served name."""

    KINDS: ClassVar[Collection[str]] = ("learning", "outcomes", *LISTS)

    def __init__(self) -> None:
        self.learnings: dict[int, Learning] = {}
        """Learnings by detection length, the least recently used first."""
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

    def to_rows(self) -> Iterator[Row]:
        """JSON-able rows, made one by one.

        The memory may change in between: each learning, and each prompt, is as it is when its row is made.
        """
        for detection_length, learning in list(self.learnings.items()):
            state = learning.to_state()
            outcomes = state.pop("outcomes")
            yield ["learning", state]
            for start in range(0, len(outcomes), OUTCOMES_PER_ROW):
                yield ["outcomes", detection_length, outcomes[start : start + OUTCOMES_PER_ROW]]
        for successes in self.successes.prompts(PROMPTS_PER_ROW):
            yield ["successes", successes]
        tried = list(self.tried)
        for start in range(0, len(tried), PROMPTS_PER_ROW):
            yield ["length_trial", tried[start : start + PROMPTS_PER_ROW]]

    @classmethod
    def from_rows(cls, rows: Iterable[Any]) -> PruningMemory:
        """Restore a memory. Raises: ValueError for rows that no memory can have."""
        learnings: dict[Any, dict[str, Any]] = {}
        lists: dict[str, list[Any]] = {kind: [] for kind in LISTS}
        for row in rows:
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
                case _:
                    raise ValueError(f"a row of a state is of a known kind and form, got {shown(row)}")
        memory = cls()
        memory.learnings = {length: Learning.from_state(state) for length, state in learnings.items()}
        memory.successes = SuccessHistory.from_state(lists["successes"])
        memory.tried.extend(map(tried_from_state, lists["length_trial"]))
        return memory


MEMORY: Key[PruningMemory] = Key("pruning")
"""Key of this section in a memory."""
