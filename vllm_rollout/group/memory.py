"""All that is learned of one served name: calibrations by detection length; lengths and success of prompts. One state
for all of it, in rows.

A state is a sequence of rows, each of bounded size, so that a large one can be written between engine steps:

["learning", {detection_length, calibrators, verdicts}]     one per detection length, the least recently used first
["outcomes", detection_length, [outcome, ...]]              after their learning, `OUTCOMES_PER_ROW` at a time
["prompts", [[key, *average], ...]]                         `PROMPTS_PER_ROW` at a time
["successes", [[key, rewarded, successful], ...]]           `PROMPTS_PER_ROW` at a time
["length_trial", [tried, ...]]                              `PROMPTS_PER_ROW` at a time
["lengths", {dataset, log_lengths, shape}]                  once, last: a state that was cut off lacks it

Invariant: a memory restored from its state decides and goes on as the saved one; whatever else is put is a ValueError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_rollout.config import MAX_DETECTION_LENGTHS
from vllm_rollout.group.checks import fields_of, listed, shown
from vllm_rollout.group.history import MAX_HISTORY_PROMPTS, TOTALS, LengthHistory
from vllm_rollout.group.learning import REPORT_WINDOW, Learning
from vllm_rollout.group.length_trial import TRIAL_WINDOW, LengthTrial, tried_from_state
from vllm_rollout.group.success import SuccessHistory

OUTCOMES_PER_ROW = 512
PROMPTS_PER_ROW = 512

Row = Sequence[Any]


class Memory:
    """What one engine has learned of one served name."""

    def __init__(self) -> None:
        self.learnings: dict[int, Learning] = {}
        """By detection length, the least recently used first."""
        self.lengths = LengthHistory()
        self.successes = SuccessHistory()
        self.length_trial = LengthTrial()
        self.forgotten: list[int] = []
        """Detection lengths that were given up since somebody last took them out of here: their heads may go too."""
        self.num_evicted: Counter[int] = Counter()
        """Labels whose features were gone when their reward came, by detection length; not saved."""

    def learning(self, detection_length: int, awaited: Callable[[int], bool]) -> Learning | None:
        """What was learned at this length, which counts as used.

        Beyond `MAX_DETECTION_LENGTHS` the least recently used one goes, of those that nobody awaits rewards for; None
        when there is no such.
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
        """The detection length to give up first; None when rewards are awaited for all."""
        return next((length for length in self.learnings if not awaited(length)), None)

    def to_state(self) -> Iterator[Row]:
        """JSON-able rows, made as they are taken.

        The memory may go on in between: each learning is as it is when it is reached, and so is each prompt.
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
        tried = self.length_trial.candidates()
        for start in range(0, len(tried), PROMPTS_PER_ROW):
            yield ["length_trial", tried[start : start + PROMPTS_PER_ROW]]
        yield ["lengths", self.lengths.totals()]

    @classmethod
    def from_state(cls, rows: Iterable[Any]) -> Memory:
        """Raises: ValueError for what no memory can have been."""
        learnings: dict[Any, dict[str, Any]] = {}
        prompts: list[Any] = []
        successes: list[Any] = []
        tried: list[Any] = []
        totals: Mapping[str, Any] | None = None
        for row in rows:
            if totals is not None:
                raise ValueError(f"row 'lengths' of a state must be the last one, then came {shown(row)}")
            match row:
                case ["learning", {"detection_length": int(length)} as state]:
                    if length in learnings or len(learnings) == MAX_DETECTION_LENGTHS:
                        raise _wrong_lengths([*learnings, length])
                    learnings[length] = {**state, "outcomes": []}
                case ["outcomes", int(length), list(outcomes)] if length in learnings:
                    learnings[length]["outcomes"] += outcomes
                    listed(learnings[length]["outcomes"], "outcomes of a learning", REPORT_WINDOW)
                case ["prompts", list(some)]:
                    prompts += some
                    listed(prompts, "prompts of a length history", MAX_HISTORY_PROMPTS)
                case ["successes", list(some)]:
                    successes += some
                    listed(successes, "prompts of a success history", MAX_HISTORY_PROMPTS)
                case ["length_trial", list(some)]:
                    tried += some
                    listed(tried, "candidates of a trial of lengths", TRIAL_WINDOW)
                case ["lengths", state]:
                    totals = fields_of(state, TOTALS, "row 'lengths' of a state")
                case _:
                    raise ValueError(f"a row of a state is of a known kind and form, got {shown(row)}")
        if totals is None:
            raise ValueError("a state ends with the row 'lengths', but there is none: was it cut off?")
        memory = cls()
        memory.learnings = {length: Learning.from_state(state) for length, state in learnings.items()}
        memory.lengths = LengthHistory.from_state({"prompts": prompts, **totals})
        memory.successes = SuccessHistory.from_state(successes)
        memory.length_trial = LengthTrial(map(tried_from_state, tried))
        return memory


def _wrong_lengths(lengths: Sequence[int]) -> ValueError:
    return ValueError(
        f"the detection lengths of a state must be at most {MAX_DETECTION_LENGTHS} different ones, got {shown(lengths)}"
    )
