"""Answer bodies, events and error bodies of our endpoints (docs/reference/http.md).

Invariant: server and client read the same classes, so what one writes the other can parse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from vllm_rollout.kernel.rules.fields import SelectionRule
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.kernel.rules.rewards import Estimator, GradeStatus
from vllm_rollout.kernel.rules.types import CandidateState, GroupStatus, Signal


class ConfidenceAnswer(BaseModel):
    """Trace confidence of the first `detection_length` tokens, in nats."""

    mean: float
    lowest_window: float
    bottom_windows: float


class EndedCandidate(BaseModel):
    """Fields of every candidate. Fields about scores are null without pruning."""

    index: int
    """Index in its group, from 0."""
    num_tokens: int
    score: float | None = None
    """The quality head's logit, or confidence: `signal` says which. Null for one that ended before
    `detection_length`."""
    success_probability: float | None = None
    """Calibrated success probability of the score. Null also while too few rewards are known."""
    survival_probability: float | None = None
    """With pruning the probability with which it was kept; 1 where it could not be stopped: unscored, cold start,
    shadow mode."""
    signal: Signal | None = None
    head_version: int | None = None
    """0 if there was no head yet."""
    confidence: ConfidenceAnswer | None = None
    score_weight_version: str | None = None
    """Version of the weights that sampled token `detection_length`."""
    would_prune: bool | None = None
    """Shadow mode only. True if active mode would have stopped the candidate."""
    shadow_survival_probability: float | None = None
    """Shadow mode only. Survival probability that active mode would have given the candidate."""


class RewardFields(BaseModel):
    """The server's grade of a trajectory. All fields are null if no reward was requested, and while the grade is
    awaited."""

    reward: float | None = None
    """0 for a time-out. Null for an error and for a void candidate."""
    reward_parts: dict[str, float] | None = None
    reward_status: GradeStatus | None = None
    reward_reason: str | None = None
    """Reason for a status other than `ok`."""
    reward_s: float | None = None
    """Seconds of grading, without the wait for a core."""


class Trajectory(EndedCandidate, RewardFields):
    """A candidate that its group returns."""

    token_ids: list[int]
    """Token ids of the output."""
    logprobs: list[float] | None = None
    """Log probability of each sampled token."""
    text: str | None = None
    """Text of the output alone: if a prompt ends inside a UTF-8 character, the first bytes do not complete it."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    final_score: float | None = None
    """With pruning.final_score: logit of the head for whole trajectories at the last token. Null while that head is
    not trained. A weight for /v1/votes."""
    final_success_probability: float | None = None
    """Calibrated success probability of `final_score`. Null while too few labels are known."""
    mean_confidence: float | None = None
    """Self-certainty in nats: mean over its tokens of -(1/V) * sum of log P over the V tokens of the vocabulary that
    a grammar allows. Null with speculative decoding and with --enable-batch-sharded-sampling."""
    std_confidence: float | None = None
    """Standard deviation over its tokens; 0 for one token."""
    weight_versions: list[dict[str, Any]] = []
    """Weight versions that sampled its tokens: spans `{"version", "start", "end"}`."""
    inclusion_probability: float | None = None
    """Probability that the candidate is among the trajectories. If all survivors of pruning are returned, as in an
    audit group, it is the survival probability. Null if candidates race, because the chance to be among the first
    is unknown."""
    num_resumed_tokens: int = 0
    """This many tokens at the beginning come from an earlier round of the run."""
    off_policy: bool = False
    """True if weights other than those of its round sampled, or may have sampled, some of its tokens."""


class Candidate(EndedCandidate):
    """A candidate that is not among the trajectories."""

    state: CandidateState
    """`finished`: it was not selected. `surplus`: it was stopped, or lost a tie. `pruned`: its score was too low.
    `deferred`: its group was stopped. `failed`: `error` says why."""
    error: str | None = None
    """The error, if the candidate failed for a known reason."""


class StoppedCandidate(Candidate):
    """A candidate that was not selected, with its tokens. Returned if `include` has "stopped"."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    text: str | None = None
    weight_versions: list[dict[str, Any]] = []
    """As of trajectories, so that a trainer can correct each token that it learns from."""
    ended_by_itself: bool = False
    """True if the answer is whole, and as likely right as any other: the candidate was not selected, or lost a tie."""


class GroupLengths(BaseModel):
    mean: float
    std: float
    max: int


class Allocation(BaseModel):
    """Number of candidates of a prompt. With redundancy "auto" also the reasons for it."""

    num_candidates: int
    weight: float | None = None
    """Weight w of DARTS Algorithm 1, from 0 to 1: the deviation of the prompt's lengths relative to the other
    prompts of the request."""
    std_tokens: float | None = None
    """Standard deviation of the prompt's lengths in tokens, cut at `max_tokens`, from which the weight follows. Null
    for a new prompt."""
    at_upper_bound: bool = False
    """True if the prompt got as many candidates as there may be."""
    extreme: bool = False
    """True if the prompt is among the 5 % whose lengths spread most. Then its selection is "shortest", with early
    stop unless the request forbids that."""
    selection: SelectionRule


class RedundancyBudget(BaseModel):
    """Candidates of all prompts together, with redundancy "auto" (DARTS Eq. 8 and 9)."""

    total: int
    lower: int
    upper: int
    """`lower` and `upper` bound `total`: once and twice the number of wanted trajectories, within --max-num-seqs."""
    optimum: float | None = None
    """rho * base_s / (tradeoff * seconds_per_candidate). Null if the source is "default"."""
    rho: float | None = None
    """Standard deviation of all lengths over their mean, from moving averages."""
    seconds_per_candidate: float | None = None
    """k of DARTS Eq. 6, from the profile."""
    base_s: float | None = None
    """Predicted seconds of the rollout without redundancy, from the profile."""
    tradeoff: float
    source: Literal["profile", "default", "places"]
    """"default": 1.5 times the wanted trajectories, because the server has no profile or knows no lengths yet.
    "places": not all candidates run at once, and this total was the fastest of several that were simulated."""


class GroupRewards(BaseModel):
    """Statistics of the rewards of a group's trajectories. Trajectories without a reward are left out."""

    name: str
    num_rewards: int
    mean: float | None
    std: float | None
    """Sample standard deviation (n - 1). Null with fewer than two rewards."""
    teaches: bool
    """True if the rewards differ."""
    estimator: Estimator
    advantages: list[float | None]
    """One per trajectory, in their order. Null for a trajectory without a reward."""


class GroupSummary(BaseModel):
    """A finished group, without its candidates."""

    prompt_id: str
    group_id: str
    """Name of the group for POST /v1/rewards."""
    status: GroupStatus
    """`complete`: it has exactly `group_size` trajectories. `incomplete`: it has what there is."""
    reason: str | None = None
    """Why it is incomplete."""
    prompt_token_ids: list[int]
    lengths: GroupLengths
    allocation: Allocation
    off_policy: bool = False
    """True if one of its trajectories is off policy."""
    weight_versions: list[str] = []
    """Versions of the weights that sampled its trajectories. If there are several and `off_policy` is false, each
    trajectory has one version, and not all have the same."""
    audit: bool = False
    """True if no candidate was stopped. Then rewards and lengths are a plain sample of the policy's."""
    rewards: GroupRewards | None = None
    """Null without a reward."""


class GroupAnswer(GroupSummary):
    """The group of one prompt, its trajectories in the order of their indices."""

    trajectories: list[Trajectory]
    candidates: list[StoppedCandidate | Candidate]


class Usage(BaseModel):
    """Tokens and candidates of all groups."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    returned_tokens: int = 0
    wasted_tokens: int = 0
    resumed_tokens: int = 0
    """Tokens from earlier rounds. generated + resumed = returned + wasted."""
    num_candidates: int = 0
    num_finished: int = 0
    num_pruned: int = 0
    num_surplus: int = 0
    num_deferred: int = 0
    num_failed: int = 0
    num_scored: int = 0
    num_restarted: int = 0
    """Groups that ran again after the engine lost them. Tokens of lost attempts are not counted."""
    num_rewards: int = 0
    """Trajectories that the server gave a reward. A time-out has reward 0, and counts here too."""
    num_reward_timeouts: int = 0
    num_reward_errors: int = 0
    num_voids: int = 0


class Timing(BaseModel):
    """Seconds since the rollout began."""

    latency_s: float = 0.0
    time_to_first_group_s: float | None = None
    started_s: list[float | None] = []
    """For each prompt, seconds from the rollout's beginning until its group got its places. Null if it did not
    start."""


class FreedRanks(BaseModel):
    """Ranks that were emptied while a rollout still ran. They stay empty until the rollout is over."""

    ranks: list[int]
    after_s: float
    """Seconds since the rollout began."""
    seconds: float
    """Seconds that it took to empty them."""
    num_moved: int
    """Groups that moved to other ranks."""
    reason: str
    """The decision in words, with its numbers."""


class RolloutSummary(BaseModel):
    """A finished rollout, without its groups."""

    id: str
    """`rollout-…`. It names the rollout for rewards and for vLLM's abort endpoints, as the header X-Request-Id of the
    request does."""
    created: int
    """Seconds since 1970."""
    model: str
    weight_version: str | None = None
    warnings: list[str] = []
    """Requested things that could not be done, and failures. Each is named once per request."""
    budget: RedundancyBudget | None = None
    """Null without redundancy "auto"."""
    detection_length: int | None = None
    """With pruning: number of tokens at which candidates were scored, the first of several. For "auto", the chosen
    length."""
    off_policy: bool = False
    """True if one of its trajectories is off policy."""
    freed: FreedRanks | None = None
    """Null unless scale_down "auto" has freed ranks."""
    usage: Usage
    timing: Timing
    receipt: Receipt | None = None
    """Cost and savings, compared with waiting for all candidates (docs/guides/watching.md)."""


class RolloutAnswer(RolloutSummary):
    object: Literal["rollout"] = "rollout"
    groups: list[GroupAnswer]
    """One per prompt, in the order of the prompts."""


class TrajectoryEvent(BaseModel):
    """A trajectory has ended. With `reward` it comes before its reward is known."""

    type: Literal["trajectory"] = "trajectory"
    prompt_id: str
    group_id: str
    trajectory: Trajectory


class RewardEvent(RewardFields):
    """The reward of a trajectory that was sent before."""

    type: Literal["reward"] = "reward"
    prompt_id: str
    group_id: str
    index: int


class CandidateEvent(BaseModel):
    """A candidate is out: none of its tokens follow, and it will not be selected."""

    type: Literal["candidate"] = "candidate"
    prompt_id: str
    group_id: str
    candidate: StoppedCandidate | Candidate


class TokensEvent(BaseModel):
    """New tokens of a candidate. Its chunks join without a gap, also after a preemption, and make up its trajectory."""

    type: Literal["tokens"] = "tokens"
    prompt_id: str
    index: int
    offset: int
    """Position of the first of these tokens in the output."""
    token_ids: list[int]
    logprobs: list[float] | None = None


class GroupEvent(GroupSummary):
    """A group is over. Its trajectories were sent before. `selected` lists their indices."""

    type: Literal["group"] = "group"
    selected: list[int]


class VoidsGroup(BaseModel):
    """An event after which all earlier events of its group are void."""

    if TYPE_CHECKING:
        prompt_id: str


class RestartedEvent(VoidsGroup):
    """The engine has lost a group, which runs again. Earlier events of the group are void."""

    type: Literal["restarted"] = "restarted"
    prompt_id: str
    group_id: str
    reason: str


class RanksFreeEvent(FreedRanks):
    """Nothing runs on these ranks any more."""

    type: Literal["ranks_free"] = "ranks_free"


class DoneEvent(RolloutSummary):
    """The rollout is over."""

    type: Literal["done"] = "done"


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorAnswer(BaseModel):
    error: ErrorBody


class ErrorEvent(BaseModel):
    """The last event of a stream that could not be completed."""

    type: Literal["error"] = "error"
    error: ErrorBody


class PartEvent(BaseModel):
    """An event that a part adds to the stream of a rollout."""

    if TYPE_CHECKING:
        type: str


GroupsEvent = (
    TrajectoryEvent | RewardEvent | CandidateEvent | TokensEvent | GroupEvent | RestartedEvent | RanksFreeEvent
)
RolloutEvent = GroupsEvent | DoneEvent | ErrorEvent
Event = RolloutEvent | PartEvent
