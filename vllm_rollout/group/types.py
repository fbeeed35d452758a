"""Values that the rules exchange. Invariant: nothing here knows an engine, a device or a request body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

CandidateState = Literal["running", "finished", "pruned", "surplus", "deferred", "failed"]
"""`running` is the only state that can change; the others are end states."""

StopState = Literal["pruned", "surplus", "deferred"]
"""End states of candidates that were stopped: by their score, because enough siblings finished, because nobody wants
the rest of the group now. Only the last is no verdict on the candidate."""
STOP_STATES: tuple[StopState, ...] = get_args(StopState)

EndReason = Literal["stop", "length", "failed"]
"""Why a candidate ended without a verdict: by itself, cut at `max_tokens`, or lost (error, client abort)."""

GroupStatus = Literal["complete", "incomplete", "deferred"]
"""`deferred`: it is not wanted now, whatever it had become."""


class CandidateId(NamedTuple):
    group_id: str
    index: int  # type: ignore[assignment]  # of a tuple's methods nobody here needs `index`


WHOLE = 0
"""What stands in place of a detection length for the whole trajectory, scored where it ended (ARRoL section 4.4)."""

BASE_MODEL = ""
"""What stands in place of an adapter's name for the base model."""


class HeadKey(NamedTuple):
    """What a quality head, and the calibration of its scores, is for."""

    detection_length: int
    adapter: str = BASE_MODEL
    """The LoRA adapter, by the name that it is served under; `BASE_MODEL`: none."""


Signal = Literal["head", "confidence"]
"""What a candidate is judged by: the quality head's logit, or its trace confidence (DeepConf)."""


class Confidence(NamedTuple):
    """Trace confidence of a candidate's first `detection_length` tokens, in nats (DeepConf; ARRoL section 3)."""

    mean: float
    lowest_window: float
    """The lowest mean of any window of consecutive tokens."""
    bottom_windows: float
    """The mean of the lowest tenth of the windows."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the worker saw of a candidate in the step that produced token `detection_length`, or its last one."""

    confidence: Confidence
    logit: float | None = None
    """The quality head's output; None while the head is untrained."""
    head_version: int = 0
    """0: untrained."""
    detection_length: int | None = None
    """The output tokens after which it was seen, or `WHOLE`; None: those of its plan."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """What was decided about a scored candidate, and why."""

    signal: Signal
    """The signal that was used: `confidence` also stands in for a head that knows too little."""
    score: float
    """The head's logit, or the confidence (`bottom_windows`)."""
    success_probability: float | None
    """The calibrated score; None during a cold start, or when no score was a number."""
    survival_probability: float
    """Probability with which the candidate was kept, given what was known of its group; 1 during a cold start."""
    keep: bool
    """False: pruned, or in shadow mode would have been."""
    head_version: int
    confidence: Confidence
    cold: bool = False
    """There were too few labels to prune by."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one candidate ended, as the engine saw it."""

    index: int
    state: CandidateState
    num_tokens: int
    truncated: bool = False
    """Cut at `max_tokens` (finish reason `length` or `repetition`) instead of ended by itself."""
    end_step: int = 0
    """The group's step in which it ended: the order of finishing."""
    ended_by_itself: bool = False
    """Its length is exact: also when it is surplus, because its ending came too late to count (a lost tie)."""
    num_resumed: int = 0
    """Those of its tokens that it had from an earlier round."""
    num_preemptions: int = 0
    """How often it had to give its KV cache to others and wait."""

    @property
    def valid(self) -> bool:
        """Ended by itself: usable without reservation."""
        return self.state == "finished" and not self.truncated


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a group that is over gives back."""

    status: GroupStatus
    reason: str | None
    """Why the group is incomplete; None when it is complete."""
    selected: tuple[int, ...]
    """Indices of the returned trajectories, ascending; exactly `group_size` of them when complete."""
    endings: tuple[Ending, ...]
    """Every candidate, ascending by index."""

    @property
    def generated_tokens(self) -> int:
        """Output tokens of all candidates, those from earlier rounds left out."""
        return sum(ending.num_tokens - ending.num_resumed for ending in self.endings)

    @property
    def resumed_tokens(self) -> int:
        """Output tokens from earlier rounds."""
        return sum(ending.num_resumed for ending in self.endings)

    @property
    def returned_tokens(self) -> int:
        """Those of the returned trajectories."""
        selected = set(self.selected)
        return sum(ending.num_tokens for ending in self.endings if ending.index in selected)

    @property
    def wasted_tokens(self) -> int:
        """generated + resumed = returned + wasted."""
        return self.generated_tokens + self.resumed_tokens - self.returned_tokens


class HeldGroups(NamedTuple):
    """Groups that an engine has not forgotten."""

    num_running: int
    """Some candidate runs or waits to run."""
    num_idle: int
    """Nothing runs: single requests that make up a group, of which some have not come."""
    num_races: int = 0
    """Rounds whose groups race each other."""
    num_unmet: int = 0
    """Joined groups, since the start, whose siblings did not come to this engine."""
