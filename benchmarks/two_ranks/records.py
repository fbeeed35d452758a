"""What a client sees of a step of rollouts on two ranks, and what that says about its moves.

Invariant: everything here is worked out from what was seen; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import NamedTuple

from vllm_rollout.group.cost import CostModel
from vllm_rollout.group.load import GroupLoad, TransferCost, price_s

STANDSTILL = 1.5
"""A pause between two tokens is one that a move made if it is longer than so many usual ones."""
NUM_USUAL = 10
"""Pauses of which the usual one is the median."""
LOOK_S = 0.05
"""Between two looks at the ranks."""
WINDOW_S = 0.5
"""Moves that are not further apart are one: each group waits for the one before it."""

Candidate = tuple[str, int]
"""Prompt id and index."""


class Look(NamedTuple):
    """What `GET /v1/engines` said."""

    at_s: float
    is_busy: Sequence[bool]
    """Of each rank."""
    num_moved: int
    """Groups, since the server started."""
    moving_s: float
    """That the ranks together have spent on moves, since they started."""
    transfers: Sequence[TransferCost | None]
    """What KV costs each rank."""


class MovedGroup(NamedTuple):
    """A line of the server's log."""

    group_id: str
    target: int
    seconds: float
    """From asking the one rank for it until the other has it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rollout, from the request to the end of the answer; times are of one clock."""

    started_s: float
    ended_s: float
    arrivals: Mapping[Candidate, Sequence[float]]
    """Of each token."""
    token_ids: Mapping[Candidate, Sequence[int]]
    prompt_tokens: Mapping[str, int]
    group_ids: Mapping[str, str]
    """By prompt id."""
    looks: Sequence[Look]
    moved: Sequence[MovedGroup]
    """In their order."""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s

    @property
    def busy_s(self) -> list[float]:
        """Of each rank, from the start to the middle between the last look that found it busy and the next one."""
        return [self._busy_s(rank) for rank in range(len(self.looks[0].is_busy))]

    @property
    def freed_rank_s(self) -> float:
        """From when a rank is empty to the end, summed over ranks."""
        return sum(self.seconds - busy_s for busy_s in self.busy_s)

    @property
    def moving_s(self) -> float:
        """Of both engine cores, between two steps."""
        return self.looks[-1].moving_s - self.looks[0].moving_s

    def _busy_s(self, rank: int) -> float:
        last = max((n for n, look in enumerate(self.looks[:-1]) if look.is_busy[rank]), default=None)
        if last is None:
            return 0.0
        empty_at_s = (self.looks[last].at_s + self.looks[last + 1].at_s) / 2
        return min(empty_at_s, self.ended_s) - self.started_s


@dataclass(frozen=True, slots=True)
class Consolidation:
    """Groups that moved one after the other."""

    at_s: float
    """Since the start."""
    num_groups: int
    num_candidates: int
    kv_tokens: int
    """Siblings share their prompt."""
    move_s: float
    """The longest of them, from asking the one rank until the other has it."""
    total_s: float
    """All of them."""
    moved_lost_s: float
    """What a moved candidate waited beyond its usual steps, median."""
    sibling_lost_s: float | None
    """The same of those that were on the target; None where there were none."""
    predicted_s: float
    """That the target stands still, by the profile and what transfers have cost."""


def consolidations(step: Step, cost: CostModel) -> list[Consolidation]:
    return [_consolidation(step, cost, window) for window in _windows(step)]


def decoding_lost_share(step: Step) -> float:
    """Candidate-seconds that were lost around moves, over all that were spent."""
    windows = [(window.start, window.end) for window in _windows(step)]
    lost = sum(standstill_s(times, start, end) for times in step.arrivals.values() for start, end in windows)
    return lost / sum(times[-1] - step.started_s for times in step.arrivals.values())


def undisturbed_lost_s(step: Step) -> float:
    """What a median candidate seems to lose where nothing moves, in the middle of a step: the noise of the machine."""
    middle = step.started_s + step.seconds / 2
    window = (middle - WINDOW_S / 2, middle + WINDOW_S / 2)
    running = [times for times in step.arrivals.values() if times[0] < window[0] and times[-1] > window[1]]
    return _median(standstill_s(times, *window) for times in running) or 0.0


def standstill_s(times: Sequence[float], start: float, end: float) -> float:
    """What the pauses of a candidate that touch a window are longer than its usual ones, as far as they stand out."""
    pauses = list(pairwise(times))
    touching = [(a, b) for a, b in pauses if b > start and a < end]
    if not touching:
        return 0.0
    after = [b - a for a, b in pauses if a >= end][:NUM_USUAL]
    before = [b - a for a, b in pauses if b <= start][-NUM_USUAL:]
    if not (usual := max(after, before, key=len)):
        return 0.0
    usual_s = median(usual)
    return sum(b - a - usual_s for a, b in touching if b - a > STANDSTILL * usual_s)


class _Window(NamedTuple):
    start: float
    end: float
    moved: list[MovedGroup]
    before: Look
    """The last one before the first of them."""


def _windows(step: Step) -> list[_Window]:
    """When groups moved: each between two looks, since the log has no fractions of a second."""
    windows: list[_Window] = []
    moved = iter(step.moved)
    for before, after in pairwise(step.looks):
        for group in islice(moved, after.num_moved - before.num_moved):
            start = before.at_s - group.seconds
            if windows and start - windows[-1].end < WINDOW_S:
                windows[-1].moved.append(group)
                windows[-1] = windows[-1]._replace(end=after.at_s)
            else:
                windows.append(_Window(start, after.at_s, [group], before))
    return windows


def _consolidation(step: Step, cost: CostModel, window: _Window) -> Consolidation:
    start, end, moved, before = window
    prompts = {group_id: prompt for prompt, group_id in step.group_ids.items()}
    running = {candidate: times for candidate, times in step.arrivals.items() if times[0] < start and times[-1] > start}
    groups = [_load(step, prompts[group.group_id], running, start) for group in moved if group.group_id in prompts]
    gone = {prompts[group.group_id] for group in moved}
    lost = {candidate: standstill_s(times, start, end) for candidate, times in running.items() if times[-1] > end}
    return Consolidation(
        at_s=start - step.started_s,
        num_groups=len(moved),
        num_candidates=sum(group.num_candidates for group in groups),
        kv_tokens=sum(group.kv_tokens for group in groups),
        move_s=max(group.seconds for group in moved),
        total_s=sum(group.seconds for group in moved),
        moved_lost_s=_median(lost[candidate] for candidate in lost if candidate[0] in gone) or 0.0,
        sibling_lost_s=_median(lost[candidate] for candidate in lost if candidate[0] not in gone),
        predicted_s=sum(
            price_s(cost, load, before.transfers[group.target]) for group, load in zip(moved, groups, strict=True)
        ),
    )


def _load(step: Step, prompt: str, running: Mapping[Candidate, Sequence[float]], at_s: float) -> GroupLoad:
    lengths = [
        sum(arrived < at_s for arrived in times) for candidate, times in running.items() if candidate[0] == prompt
    ]
    return GroupLoad.of(step.group_ids[prompt], step.prompt_tokens[prompt], lengths)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
