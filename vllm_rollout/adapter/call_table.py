"""What an API process may ask of an engine core: one row per operation, with the codecs of both ends.

    API process   service -> EngineCalls.call_rank(rank, OPERATION, argument)  -- encode_argument
    engine core   rollout_call(name, payload) -- decode_argument -> LearningCalls, ... -- encode_result
    API process   decode_result

Invariant: an operation has the same name in the API process, here and in the engine core; what travels is one value of
the named type each way. An error that concerns the client is a value (`Refusal`); an exception is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from vllm_rollout.group.judging.judge import Label
from vllm_rollout.group.judging.ledger import NamedReward, RewardStatus
from vllm_rollout.group.judging.length_trial import TriedCandidate
from vllm_rollout.group.judging.race_bias import AuditReport
from vllm_rollout.group.judging.report import HeadInfo, RewardedCandidate
from vllm_rollout.group.lengths.cost import CostModel, StepTime
from vllm_rollout.group.lengths.history import ObservedLength
from vllm_rollout.group.lengths.moments import LengthStatistics
from vllm_rollout.group.ranks.drift import StepDrift
from vllm_rollout.group.ranks.load import EngineLoad
from vllm_rollout.group.step.moving import StayReason
from vllm_rollout.group.types import BASE_MODEL, HeadKey, HeldGroups

CALL_METHOD = "rollout_call"
"""The one method that is added to vLLM's EngineCore: `rollout_call(operation: str, payload: bytes) -> bytes`."""

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class Refusal(NamedTuple):
    """Why a head or a state is not taken; nothing has changed."""

    kind: Literal["mismatch", "invalid"]
    """It is of another model, or no state at all."""
    message: str


class PostedRewards(NamedTuple):
    """Rewards, for the engine cores that may have run their candidates."""

    rewards: list[NamedReward]
    share: bool
    """Answer labels with their features, for other engine cores to learn; else they are learned here and now."""


class Features(NamedTuple):
    """Hidden states, [num_states, hidden_size]."""

    data: bytes
    """Row by row."""
    dtype: Literal["float32", "float16", "bfloat16"]


@dataclass(slots=True)
class RewardsProgress:
    """How far an engine core got within its time: the rewards it has accounted for are the first ones."""

    heads: set[HeadKey]
    """That candidates of the rollouts and groups teach that are known here."""
    statuses: list[RewardStatus]
    num_training: int = 0
    """Labels that a head learns."""
    labels: list[Label] = field(default_factory=list)
    """To be shared, and so are these:"""
    features: dict[HeadKey, LabelledFeatures] = field(default_factory=dict)
    """By the head that trains on them."""


@dataclass(frozen=True, slots=True)
class LabelledFeatures:
    """What a head trains on."""

    head: HeadKey
    features: Features
    positives: list[bool]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Learned:
    """What one engine core has seen of one detection length of a served name."""

    head: HeadKey
    num_awaiting: int
    num_evicted: int
    num_judged: int
    """Newest verdicts of active pruning."""
    num_pruned: int


@dataclass(frozen=True, slots=True)
class LearningWindow:
    """What a report is made of."""

    outcomes: list[RewardedCandidate] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    audit: AuditReport = field(default_factory=AuditReport)


class NamedChoices(NamedTuple):
    """The candidates of a group that are choices in the answer of a request."""

    name: str
    """The request's."""
    group_id: str
    choices: dict[int, int]
    """Choice -> index of the candidate."""


class HeadToRead(NamedTuple):
    reader: str
    head: HeadKey


class HeadToPut(NamedTuple):
    data: bytes
    """It says for which detection length it is."""
    adapter: str


class StateToPut(NamedTuple):
    data: bytes
    only_check: bool
    """Say whether it would be taken; nothing changes."""


class Piece(NamedTuple):
    """The next bytes of what is read piece by piece."""

    data: bytes
    is_last: bool


class ObservedGroup(NamedTuple):
    """Lengths of a group that is over."""

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
    """A profile that live steps are compared with."""

    cost: CostModel
    model: str
    profile: str
    """Its file; this and the rest are for the warning."""
    batch_sizes: Sequence[int]


class WiderRace(NamedTuple):
    race_id: str
    num_wanted: int | None


class LastTokens(NamedTuple):
    """The newest output tokens of a candidate that has not ended."""

    index: int
    offset: int
    """Number of its output tokens before these."""
    token_ids: list[int]


class Hold(NamedTuple):
    """Whether somebody keeps an engine core empty (`group/ranks/placement.py`)."""

    owner: str
    held: bool


class GroupToRelease(NamedTuple):
    group_id: str
    epoch: int
    """The epoch of the move. A call that is repeated has the same, and is answered as before."""


class Released(NamedTuple):
    """What became of a group that was to leave an engine core."""

    outcome: Literal["released", "in_flight", "refused"] | StayReason
    """`released`: it is in the parcel. `in_flight`: it has stopped, and a token of it is on its way: ask again."""
    parcel: bytes = b""
    request_ids: Sequence[str] = ()
    """The requests that are in the parcel."""
    reason: str = ""
    """Why it was refused."""


class GroupToAdopt(NamedTuple):
    group_id: str
    epoch: int
    parcel: bytes


class Operation(Generic[Argument, Result]):
    """One row: a name, what it takes, what it answers."""

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


# -- rewards and what they teach
POST_REWARDS: Operation[PostedRewards, RewardsProgress] = Operation("post_rewards", PostedRewards, RewardsProgress)
"""Account for rewards until the time of a call is spent."""
NAME_CHOICES: Operation[NamedChoices, None] = Operation("name_choices", NamedChoices, None)
"""What a client may call the candidates of a group from now on."""
LEARN_LABELS: Operation[list[Label], None] = Operation("learn_labels", list[Label], None)
"""Labels of another engine core's candidates, for calibration."""
LEARN_FEATURES: Operation[LabelledFeatures, None] = Operation("learn_features", LabelledFeatures, None)
"""Features of another engine core's candidates, for the head; rank 0 only, which trains."""
TRAIN: Operation[float, int] = Operation("train", float, int)
"""Train for so many seconds; answers how many optimizer steps are left."""
# -- quality heads
HEADS: Operation[None, list[HeadInfo]] = Operation("heads", None, list[HeadInfo])
PUT_HEAD: Operation[HeadToPut, HeadInfo | Refusal] = Operation("put_head", HeadToPut, HeadInfo | Refusal)
OPEN_HEAD: Operation[HeadToRead, bool] = Operation("open_head", HeadToRead, bool)
"""Begin to read a trained head; false when there is none."""
# -- report and state
LEARNED: Operation[None, list[Learned]] = Operation("learned", None, list[Learned])
LEARNING_WINDOW: Operation[HeadKey, LearningWindow | None] = Operation(
    "learning_window", HeadKey, LearningWindow | None
)
"""What was learned at one detection length; None when nothing was."""
OPEN_STATE: Operation[str, None] = Operation("open_state", str, None)
"""Begin to read all that was learned, under the name of a reader."""
READ: Operation[str, Piece | None] = Operation("read", str, Piece | None)
"""The next piece for a reader; None when others have taken its place."""
TRIED_LENGTHS: Operation[str, list[TriedCandidate]] = Operation("tried_lengths", str, list[TriedCandidate])
"""Candidates of a served name that were scored at several lengths, and rewarded."""
OPEN_PROMPTS: Operation[PromptsToRead, None] = Operation("open_prompts", PromptsToRead, None)
"""Begin to read what is known of each prompt: lines of JSON, lists of rows (`group/judging/known_prompts.py`)."""
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
"""Stop what runs of these groups as `deferred`, in the next step; unknown ones are passed over."""
ABORT_REQUESTS: Operation[list[str], list[str]] = Operation("abort_requests", list[str], list[str])
"""Names of requests -> ids in the engine of their candidates that ran and end as aborted ones, in the next step."""
RECOMPUTE: Operation[list[str] | None, int] = Operation("recompute", list[str] | None, int)
"""Names of requests, or None for all groups -> how many of their candidates compute their KV again, by the newest
weights."""
GIVE_UP: Operation[dict[str, list[int]], None] = Operation("give_up", dict[str, list[int]], None)
"""Candidates, by group, that their API process needs no more: stop those that run as `surplus`, in the next step."""
CUT_RACE: Operation[str, None] = Operation("cut_race", str, None)
"""Enough groups of this race are complete on all ranks: stop the others as `deferred`, in the next step."""
WIDEN_RACE: Operation[WiderRace, None] = Operation("widen_race", WiderRace, None)
"""More groups have to complete: some of those that did were filtered."""
FORGET_RACE: Operation[str, None] = Operation("forget_race", str, None)
"""The round is over."""
HELD_GROUPS: Operation[None, HeldGroups] = Operation("held_groups", None, HeldGroups)
ENGINE_LOAD: Operation[None, EngineLoad] = Operation("engine_load", None, EngineLoad)
LAST_TOKENS: Operation[str, list[LastTokens]] = Operation("last_tokens", str, list[LastTokens])
"""What candidates of a group that have not ended say; nothing of a group that is not here."""
# -- groups that move from one engine core to another
HOLD: Operation[Hold, None] = Operation("hold", Hold, None)
"""Whether this engine core is kept empty: it remembers for whom, and all API processes send it nothing then."""
RELEASE_GROUP: Operation[GroupToRelease, Released] = Operation("release_group", GroupToRelease, Released)
"""Stop a group between two steps and hand it over. Unless it is `released` it goes on here, or will: `keep_group`."""
KEEP_GROUP: Operation[GroupToRelease, None] = Operation("keep_group", GroupToRelease, None)
"""It does not leave: take it up again, also after it was released."""
ADOPT_GROUP: Operation[GroupToAdopt, None] = Operation("adopt_group", GroupToAdopt, None)
"""Go on with a group of another engine core."""
CONFIRM_MOVE: Operation[GroupToRelease, None] = Operation("confirm_move", GroupToRelease, None)
"""It has arrived elsewhere: forget the parcel."""

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
