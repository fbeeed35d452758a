"""Calls to an engine core about rewards, heads and learned state (`kernel/call_table.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.rules.rewards import NamedReward, RewardStatus
from vllm_rollout.parts.pruning.rules.judge import Label
from vllm_rollout.parts.pruning.rules.length_trial import TriedCandidate
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.rules.race_bias import AuditReport
from vllm_rollout.parts.pruning.rules.report import HeadInfo, RewardedCandidate


class Features(NamedTuple):
    """Hidden states, [num_states, hidden_size]."""

    data: bytes
    """The bytes row by row."""
    dtype: Literal["float32", "float16", "bfloat16"]


class Refusal(NamedTuple):
    """Reason why a head or a state was refused. Nothing has changed."""

    kind: Literal["mismatch", "invalid"]
    """`mismatch`: it is of another model or hidden size. `invalid`: any other reason."""
    message: str


class PostedRewards(NamedTuple):
    """Rewards for all engine cores that may have run the candidates."""

    rewards: list[NamedReward]
    share: bool
    """True: return labels with their features, for other engine cores to learn. False: learn them here."""


@dataclass(slots=True)
class RewardsProgress:
    """Result of an engine core's call for rewards. If its time ran out, it has accounted for the first ones only."""

    heads: set[HeadKey]
    """Heads that learn from the rewards' rollouts and groups, as far as these are known here."""
    statuses: list[RewardStatus]
    num_training: int = 0
    """Number of labels that a head learns."""
    labels: list[Label] = field(default_factory=list)
    """Labels for other engine cores to learn."""
    features: dict[HeadKey, LabelledFeatures] = field(default_factory=dict)
    """Features with labels for other engine cores, by the head that trains on them."""


@dataclass(frozen=True, slots=True)
class LabelledFeatures:
    """Training data of a head."""

    head: HeadKey
    features: Features
    positives: list[bool]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Learned:
    """Counts of one engine core for one head."""

    head: HeadKey
    num_awaiting: int
    num_evicted: int
    num_judged: int
    """Newest verdicts of active pruning."""
    num_pruned: int


@dataclass(frozen=True, slots=True)
class LearningWindow:
    """Data of one head for a report."""

    outcomes: list[RewardedCandidate] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    audit: AuditReport = field(default_factory=AuditReport)


class Piece(NamedTuple):
    """The next bytes of a reading."""

    data: bytes
    is_last: bool


class HeadToRead(NamedTuple):
    reader: str
    head: HeadKey


class HeadToPut(NamedTuple):
    data: bytes
    """Bytes of the head. They contain its detection length."""
    adapter: str


class StateToPut(NamedTuple):
    data: bytes
    only_check: bool
    """True: only check whether the state would be taken."""


class PromptsToRead(NamedTuple):
    reader: str
    adapter: str


# -- rewards, labels and training
POST_REWARDS: Operation[PostedRewards, RewardsProgress] = Operation("post_rewards", PostedRewards, RewardsProgress)
"""Account for rewards until the time of a call is used up."""
LEARN_LABELS: Operation[list[Label], None] = Operation("learn_labels", list[Label], None)
"""Labels of another engine core's candidates, for calibration."""
LEARN_FEATURES: Operation[LabelledFeatures, None] = Operation("learn_features", LabelledFeatures, None)
"""Features of another engine core's candidates, for the head. Rank 0 only, because it trains."""
TRAIN: Operation[float, int] = Operation("train", float, int)
"""Train for this many seconds. Returns the number of optimizer steps that are left."""
# -- data that is read in pieces
READ: Operation[str, Piece | None] = Operation("read", str, Piece | None)
"""The next piece for a reader. None if newer readings have replaced it."""
# -- quality heads
HEADS: Operation[None, list[HeadInfo]] = Operation("heads", None, list[HeadInfo])
PUT_HEAD: Operation[HeadToPut, HeadInfo | Refusal] = Operation("put_head", HeadToPut, HeadInfo | Refusal)
OPEN_HEAD: Operation[HeadToRead, bool] = Operation("open_head", HeadToRead, bool)
"""Begin to read a trained head. False if there is none."""
# -- report and state
LEARNED: Operation[None, list[Learned]] = Operation("learned", None, list[Learned])
LEARNING_WINDOW: Operation[HeadKey, LearningWindow | None] = Operation(
    "learning_window", HeadKey, LearningWindow | None
)
"""Data learned for one head. None if there is none."""
OPEN_STATE: Operation[str, None] = Operation("open_state", str, None)
"""Begin to read the whole learned state, under the name of a reader."""
TRIED_LENGTHS: Operation[str, list[TriedCandidate]] = Operation("tried_lengths", str, list[TriedCandidate])
"""Candidates of a served name that were scored at several lengths, and rewarded."""
OPEN_PROMPTS: Operation[PromptsToRead, None] = Operation("open_prompts", PromptsToRead, None)
"""Begin to read the known prompts: lines of JSON, lists of rows (`parts/pruning/rules/known_prompts.py`)."""
PUT_STATE: Operation[StateToPut, Refusal | None] = Operation("put_state", StateToPut, Refusal | None)
