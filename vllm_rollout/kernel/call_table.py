"""The operations that an API process may call on an engine core: one row each, with the codecs of both ends.

    API process   service -> EngineCalls.call_rank(rank, OPERATION, argument)  -- encode_argument
    engine core   rollout_call(name, payload) -- decode_argument -> LearningCalls, ... -- encode_result
    API process   decode_result

Invariant: an operation has the same name in the API process, here and in the engine core. One value of the named type
travels each way. An error that concerns the client is a value (`Refusal`). An exception is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from vllm_rollout.kernel.rules.detached import StayReason
from vllm_rollout.kernel.rules.types import BASE_MODEL, HeadKey, HeldGroups
from vllm_rollout.parts.moving.rules.load import EngineLoad
from vllm_rollout.parts.pruning.rules.judge import Label
from vllm_rollout.parts.pruning.rules.ledger import NamedReward, RewardStatus
from vllm_rollout.parts.pruning.rules.length_trial import TriedCandidate
from vllm_rollout.parts.pruning.rules.race_bias import AuditReport
from vllm_rollout.parts.pruning.rules.report import HeadInfo, RewardedCandidate
from vllm_rollout.parts.shaping.rules.cost import CostModel, StepTime
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthStatistics

CALL_METHOD = "rollout_call"
"""The only method added to vLLM's EngineCore: `rollout_call(operation: str, payload: bytes) -> bytes`."""

Argument = TypeVar("Argument")
Result = TypeVar("Result")


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


class Features(NamedTuple):
    """Hidden states, [num_states, hidden_size]."""

    data: bytes
    """The bytes row by row."""
    dtype: Literal["float32", "float16", "bfloat16"]


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


class NamedChoices(NamedTuple):
    """Candidates of a group that are choices in a request's answer."""

    name: str
    """Name of the request."""
    group_id: str
    choices: dict[int, int]
    """Index of the candidate, by choice."""


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


class Piece(NamedTuple):
    """The next bytes of a reading."""

    data: bytes
    is_last: bool


class ObservedGroup(NamedTuple):
    """Lengths of a group that has ended."""

    key: str
    lengths: list[ObservedLength]
    adapter: str = BASE_MODEL


class LengthsToLookUp(NamedTuple):
    """Prompts, by the keys of their lengths."""

    keys: list[str]
    adapter: str = BASE_MODEL


class PromptsToRead(NamedTuple):
    reader: str
    adapter: str


@dataclass(frozen=True, slots=True)
class CostToCompare:
    """A profile with which real steps are compared."""

    cost: CostModel
    model: str
    profile: str
    """Path of the profile. This and the other fields are for the warning."""
    batch_sizes: Sequence[int]


class WiderRace(NamedTuple):
    race_id: str
    num_wanted: int


class LastTokens(NamedTuple):
    """The newest output tokens of a running candidate."""

    index: int
    offset: int
    """Number of the candidate's output tokens before these."""
    token_ids: list[int]


class Hold(NamedTuple):
    """Begin or end of a hold, which keeps an engine core empty (`parts/moving/rules/placement.py`)."""

    owner: str
    held: bool


class GroupToRelease(NamedTuple):
    group_id: str
    epoch: int
    """Number of the move. A repeated call has the same number and gets the same answer."""


class Released(NamedTuple):
    """Result of a call to release a group from an engine core."""

    outcome: Literal["released", "in_flight", "refused"] | StayReason
    """`released`: the group is packed. `in_flight`: it has stopped, but has a token in flight, so ask again."""
    parcel: bytes = b""
    request_ids: Sequence[str] = ()
    """Ids of the packed requests."""
    reason: str = ""
    """Reason of a refusal."""


class GroupToAdopt(NamedTuple):
    group_id: str
    epoch: int
    parcel: bytes


class Operation(Generic[Argument, Result]):
    """One row: an operation's name, the type of its argument and the type of its result."""

    def __init__(self, name: str, argument: Any, result: Any) -> None:
        self.name = name
        self._encoder = msgspec.msgpack.Encoder()
        self._argument = msgspec.msgpack.Decoder(argument)
        self._result = msgspec.msgpack.Decoder(result)

    def encode_argument(self, argument: Argument) -> bytes:
        return self._encoder.encode(argument)

    def decode_argument(self, payload: bytes) -> Argument:
        return self._argument.decode(payload)

    def encode_result(self, result: Result) -> bytes:
        return self._encoder.encode(result)

    def decode_result(self, payload: bytes) -> Result:
        return self._result.decode(payload)


# -- rewards, labels and training
POST_REWARDS: Operation[PostedRewards, RewardsProgress] = Operation("post_rewards", PostedRewards, RewardsProgress)
"""Account for rewards until the time of a call is used up."""
NAME_CHOICES: Operation[NamedChoices, None] = Operation("name_choices", NamedChoices, None)
"""Names for the candidates of a group, by which clients refer to them from now on."""
LEARN_LABELS: Operation[list[Label], None] = Operation("learn_labels", list[Label], None)
"""Labels of another engine core's candidates, for calibration."""
LEARN_FEATURES: Operation[LabelledFeatures, None] = Operation("learn_features", LabelledFeatures, None)
"""Features of another engine core's candidates, for the head. Rank 0 only, because it trains."""
TRAIN: Operation[float, int] = Operation("train", float, int)
"""Train for this many seconds. Returns the number of optimizer steps that are left."""
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
READ: Operation[str, Piece | None] = Operation("read", str, Piece | None)
"""The next piece for a reader. None if newer readings have replaced it."""
TRIED_LENGTHS: Operation[str, list[TriedCandidate]] = Operation("tried_lengths", str, list[TriedCandidate])
"""Candidates of a served name that were scored at several lengths, and rewarded."""
OPEN_PROMPTS: Operation[PromptsToRead, None] = Operation("open_prompts", PromptsToRead, None)
"""Begin to read the known prompts: lines of JSON, lists of rows (`parts/pruning/rules/known_prompts.py`)."""
PUT_STATE: Operation[StateToPut, Refusal | None] = Operation("put_state", StateToPut, Refusal | None)
# -- lengths
OBSERVE_LENGTHS: Operation[ObservedGroup, None] = Operation("observe_lengths", ObservedGroup, None)
LENGTH_HISTORY: Operation[LengthsToLookUp, LengthStatistics] = Operation(
    "length_history", LengthsToLookUp, LengthStatistics
)
# -- times of steps
RECORD_STEPS: Operation[bool, None] = Operation("record_steps", bool, None)
TAKE_STEPS: Operation[None, list[StepTime]] = Operation("take_steps", None, list[StepTime])
SET_COST_MODEL: Operation[CostToCompare | None, None] = Operation("set_cost_model", CostToCompare | None, None)
STEP_DRIFT: Operation[None, list[StepDrift]] = Operation("step_drift", None, list[StepDrift])
# -- groups
CANCEL_GROUPS: Operation[list[str], None] = Operation("cancel_groups", list[str], None)
"""Stop the running candidates of these groups as `deferred`, in the next step. Unknown groups are ignored."""
ABORT_REQUESTS: Operation[list[str], list[str]] = Operation("abort_requests", list[str], list[str])
"""Abort candidates in the next step, by the names of their requests. Returns the ids of those that ran."""
RECOMPUTE: Operation[list[str] | None, int] = Operation("recompute", list[str] | None, int)
"""Compute the KV of candidates again by the newest weights. The argument has names of requests, or is None for all
groups. Returns the number of these candidates.
"""
GIVE_UP: Operation[dict[str, list[int]], None] = Operation("give_up", dict[str, list[int]], None)
"""Stop running candidates as `surplus` in the next step, by group. Their API process needs them no more."""
CUT_RACE: Operation[str, None] = Operation("cut_race", str, None)
"""Stop the other groups of a race as `deferred` in the next step: enough groups are complete on all ranks."""
WIDEN_RACE: Operation[WiderRace, None] = Operation("widen_race", WiderRace, None)
"""Raise the number of groups that have to complete, because some complete ones were filtered."""
FORGET_RACE: Operation[str, None] = Operation("forget_race", str, None)
"""Forget a race whose round is over."""
HELD_GROUPS: Operation[None, HeldGroups] = Operation("held_groups", None, HeldGroups)
ENGINE_LOAD: Operation[None, EngineLoad] = Operation("engine_load", None, EngineLoad)
LAST_TOKENS: Operation[str, list[LastTokens]] = Operation("last_tokens", str, list[LastTokens])
"""Last tokens of a group's running candidates. Empty for a group that is not here."""
# -- groups that move from one engine core to another
HOLD: Operation[Hold, None] = Operation("hold", Hold, None)
"""Keep this engine core empty, or end that. It stores the owner, and no API process sends it groups while
it is held.
"""
RELEASE_GROUP: Operation[GroupToRelease, Released] = Operation("release_group", GroupToRelease, Released)
"""Stop a group between two steps and pack it. Unless it is `released`, it continues here (`keep_group`)."""
KEEP_GROUP: Operation[GroupToRelease, None] = Operation("keep_group", GroupToRelease, None)
"""Continue a group that does not leave, even after it was released."""
ADOPT_GROUP: Operation[GroupToAdopt, None] = Operation("adopt_group", GroupToAdopt, None)
"""Continue a group of another engine core."""
CONFIRM_MOVE: Operation[GroupToRelease, None] = Operation("confirm_move", GroupToRelease, None)
"""Drop the packed group: it has arrived elsewhere."""

OPERATIONS: Mapping[str, Operation[Any, Any]] = {
    operation.name: operation
    for operation in (
        POST_REWARDS, NAME_CHOICES, LEARN_LABELS, LEARN_FEATURES, TRAIN, HEADS, PUT_HEAD, OPEN_HEAD, LEARNED,
        LEARNING_WINDOW, OPEN_STATE, TRIED_LENGTHS, OPEN_PROMPTS, READ, PUT_STATE, CANCEL_GROUPS, ABORT_REQUESTS,
        RECOMPUTE, GIVE_UP, CUT_RACE, WIDEN_RACE, FORGET_RACE, OBSERVE_LENGTHS, LENGTH_HISTORY, RECORD_STEPS,
        TAKE_STEPS, SET_COST_MODEL, STEP_DRIFT, HELD_GROUPS, ENGINE_LOAD, LAST_TOKENS, HOLD, RELEASE_GROUP, KEEP_GROUP,
        ADOPT_GROUP, CONFIRM_MOVE,
    )
}  # fmt: skip
