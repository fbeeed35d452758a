"""Answer bodies, events and error bodies of our endpoints (docs/reference/http.md).

Invariant: server and client read the same classes, so what one writes the other can parse.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from vllm_rollout.group.lengths.receipt import Receipt
from vllm_rollout.group.plans.fields import SelectionRule
from vllm_rollout.group.ranks.planner import Reason
from vllm_rollout.group.rewards.estimates import Estimator
from vllm_rollout.group.rounds.round_progress import DeferReason
from vllm_rollout.group.rounds.rounds import RoundKind
from vllm_rollout.group.types import CandidateState, GroupStatus, Signal
from vllm_rollout.rewards.values import RewardStatus


class ConfidenceAnswer(BaseModel):
    """Trace confidence of the first `detection_length` tokens, in nats."""

    mean: float
    lowest_window: float
    bottom_windows: float


class EndedCandidate(BaseModel):
    """What every candidate has; all that concerns scores is null without pruning."""

    index: int
    """In its group, from 0."""
    num_tokens: int
    score: float | None = None
    """The quality head's logit, or confidence: `signal` says which. Null for one that ended before
    `detection_length`."""
    success_probability: float | None = None
    """What the score is calibrated to; null also while too few rewards are known."""
    survival_probability: float | None = None
    """With pruning the probability with which it was kept; 1 where it could not be stopped: unscored, cold start,
    shadow mode."""
    signal: Signal | None = None
    head_version: int | None = None
    """0: there was no head yet."""
    confidence: ConfidenceAnswer | None = None
    score_weight_version: str | None = None
    """The version that sampled token `detection_length`."""
    would_prune: bool | None = None
    """Shadow mode only: active mode would have stopped it."""
    shadow_survival_probability: float | None = None
    """Shadow mode only: the survival probability that active mode would have given it."""


class RewardFields(BaseModel):
    """What the server's grader says of a trajectory; all null where none was asked for, or as long as it is awaited."""

    reward: float | None = None
    """0 with a timeout; null with an error or void."""
    reward_parts: dict[str, float] | None = None
    reward_status: RewardStatus | None = None
    reward_reason: str | None = None
    """Why the status is not `ok`."""
    reward_s: float | None = None
    """How long grading took, in seconds, without what it waited for a core."""


class Trajectory(EndedCandidate, RewardFields):
    """A candidate that its group returns."""

    token_ids: list[int]
    """Of the output."""
    logprobs: list[float] | None = None
    """Of the sampled tokens."""
    text: str | None = None
    """Of the output tokens alone: if the prompt ends inside a UTF-8 character, the first bytes do not complete it."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    final_score: float | None = None
    """With pruning.final_score: logit of the head for whole trajectories at its last token; null while none is trained.
    A weight for /v1/votes."""
    final_success_probability: float | None = None
    """What it is calibrated to; null while too few labels are known."""
    mean_confidence: float | None = None
    """Self-certainty in nats: mean over its tokens of -(1/V) * sum of log P over the V tokens of the vocabulary that
    a grammar allows. Null with speculative decoding and with --enable-batch-sharded-sampling."""
    std_confidence: float | None = None
    """Standard deviation over its tokens; 0 for one token."""
    weight_versions: list[dict[str, Any]] = []
    """Which version of the weights sampled which of its tokens: spans `{"version", "start", "end"}`."""
    inclusion_probability: float | None = None
    """Chance that it is among the trajectories: that of surviving pruning where whoever survives is returned, as in an
    audit group. Null where candidates race: nobody knows the chance to be among the first."""
    num_resumed_tokens: int = 0
    """The first so many are from an earlier round of its run."""
    off_policy: bool = False
    """Weights other than those of its round sampled, or may have sampled, some of its tokens."""


class Candidate(EndedCandidate):
    """A candidate that is not among the trajectories."""

    state: CandidateState
    """`finished`: it was not selected. `surplus`: it was stopped, or lost a tie. `pruned`: its score was too low.
    `deferred`: its group was stopped. `failed`: `error` says why."""
    error: str | None = None
    """Why it failed, where that is known."""


class StoppedCandidate(Candidate):
    """What `"stopped"` in `include` adds."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    text: str | None = None
    ended_by_itself: bool = False
    """Its answer is whole, and as likely right as any: it was not selected, or lost a tie."""


class GroupLengths(BaseModel):
    mean: float
    std: float
    max: int


class Allocation(BaseModel):
    """How many candidates the prompt got, and why; without redundancy "auto" only how many."""

    num_candidates: int
    weight: float | None = None
    """w of DARTS Algorithm 1, from 0 to 1: the prompt's length deviation among those of the request."""
    std_tokens: float | None = None
    """What the weight came from: deviation of the prompt's lengths, cut at `max_tokens`; None at first sight."""
    at_upper_bound: bool = False
    """The prompt got as many as there may be."""
    extreme: bool = False
    """It is among the twentieth of the prompts that spread most: its selection is "shortest", with early stop."""
    selection: SelectionRule


class RedundancyBudget(BaseModel):
    """Candidates of all prompts together, with redundancy "auto" (DARTS Eq. 8 and 9)."""

    total: int
    lower: int
    upper: int
    """Bounds of `total`: once and twice as many as trajectories are wanted, within --max-num-seqs."""
    optimum: float | None = None
    """rho * base_s / (tradeoff * seconds_per_candidate); None with source "default"."""
    rho: float | None = None
    """Deviation of all lengths over their mean, moving averages."""
    seconds_per_candidate: float | None = None
    """k of Eq. 6, from the profile."""
    base_s: float | None = None
    """Predicted time of the rollout without redundancy, from the profile."""
    tradeoff: float
    source: Literal["profile", "default", "places"]
    """"default": half as many again as wanted, because the server has no profile or has not seen any lengths. "places":
    not all candidates run at once, and this total was the fastest of some that were played."""


class GroupRewards(BaseModel):
    """What the rewards of a group's trajectories say; those without one count for nothing."""

    name: str
    """The reward's name."""
    num_rewards: int
    mean: float | None
    std: float | None
    """The sample's (n - 1); null with fewer than two rewards."""
    teaches: bool
    """They differ."""
    estimator: Estimator
    advantages: list[float | None]
    """One per trajectory, in their order."""
    num_graded: int | None = None
    """With `until` "variance": rewards that the group's end rests on, also those of trajectories that are not here."""
    success: float | None = None
    """With it: mean of the first `group_size` rewards by index. That of the trajectories here is biased by the rule."""
    weight: float | None = None
    """With it: what the group counts where each graded answer shall count the same, group_size / num_graded."""


class GroupSummary(BaseModel):
    """What is said of a group that is over, beside its candidates."""

    prompt_id: str
    group_id: str
    """Its name for POST /v1/rewards."""
    status: GroupStatus
    """`complete`: it has exactly `group_size` trajectories. `incomplete`: it has what there is."""
    reason: str | None = None
    """Why it is incomplete."""
    prompt_token_ids: list[int]
    lengths: GroupLengths
    allocation: Allocation
    off_policy: bool = False
    """One of its trajectories is."""
    weight_versions: list[str] = []
    """That sampled its trajectories. Several, and none of them off policy: its siblings differ."""
    audit: bool = False
    """Nobody was stopped: its rewards and lengths are a plain sample of the policy's."""
    rewards: GroupRewards | None = None
    """With `reward` only."""


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
    """From earlier rounds: generated + resumed = returned + wasted."""
    num_candidates: int = 0
    num_finished: int = 0
    num_pruned: int = 0
    num_surplus: int = 0
    num_deferred: int = 0
    num_failed: int = 0
    num_scored: int = 0
    num_restarted: int = 0
    """Groups that ran again after the engine lost them; what the lost ones generated is not counted."""
    num_rewards: int = 0
    """Trajectories that the server gave a reward; a timeout's is 0, and counts here too."""
    num_reward_timeouts: int = 0
    num_reward_errors: int = 0
    num_voids: int = 0


class Timing(BaseModel):
    """Seconds since the rollout began."""

    latency_s: float = 0.0
    time_to_first_group_s: float | None = None
    started_s: list[float | None] = []
    """For each prompt, when its group got its places: seconds after the rollout began. None: it did not start."""


class FreedRanks(BaseModel):
    """Ranks that were emptied while a rollout still ran, until it is over."""

    ranks: list[int]
    after_s: float
    """Since the rollout began."""
    seconds: float
    """That it took to empty them."""
    num_moved: int
    """Groups."""
    reason: str
    """The numbers of the decision."""


class RolloutSummary(BaseModel):
    """What is said of a rollout that is over, beside its groups."""

    id: str
    """`rollout-…`. It names the rollout for rewards and for vLLM's abort endpoints, as the header X-Request-Id of the
    request does."""
    created: int
    """Seconds since 1970."""
    model: str
    weight_version: str | None = None
    warnings: list[str] = []
    """What was asked for and could not be done, once per request."""
    budget: RedundancyBudget | None = None
    """With redundancy "auto" only."""
    detection_length: int | None = None
    """With pruning: where candidates were scored; the first of several. Of "auto" the one that was chosen."""
    off_policy: bool = False
    """One of its trajectories is."""
    freed: FreedRanks | None = None
    """With scale_down "auto", if ranks were freed."""
    usage: Usage
    timing: Timing
    receipt: Receipt | None = None
    """What it saved against waiting for all of its candidates (docs/guides/watching.md)."""


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
    """A trajectory that was sent before has its reward."""

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
    """Of the first of these tokens in the output."""
    token_ids: list[int]
    logprobs: list[float] | None = None


class GroupEvent(GroupSummary):
    """A group is over. Its trajectories were sent before; `selected` names them."""

    type: Literal["group"] = "group"
    selected: list[int]


class RestartedEvent(BaseModel):
    """A group runs again, since the engine lost it: what was sent of it before counts for nothing."""

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


class RebuildAnswer(BaseModel):
    """The engine was rebuilt between two rounds; a size at which none started leaves it as it was."""

    wanted_size: int
    size_before: int
    tensor_parallel_size: int
    """Since then."""
    reason: Reason
    seconds: float
    """For which requests waited."""


class RoundSummary(BaseModel):
    """What a round of a run made of its prompts."""

    run: str
    round: int
    kind: RoundKind
    idempotency_key: str
    deferred: list[str] = []
    """Prompt ids that wait for a long round."""
    filtered: list[str] = []
    """Those whose rewards were all the same: out of the run."""
    unstarted: list[str] = []
    """Those that are the first of the next short round."""
    next_round: RoundKind
    num_fresh_prompts: int
    """How many prompts the next round wants."""
    num_waiting: int
    """Prompts of the run that are not back."""
    rebuilt: RebuildAnswer | None = None
    """Since the round before, with `--rollout-parallelism auto`."""


class RoundAnswer(RoundSummary, RolloutAnswer):
    """A rollout's answer, with the groups that the round returns."""


class RoundEvent(BaseModel):
    """A round begins. Rewards name its rollout by `id`."""

    type: Literal["round"] = "round"
    id: str
    run: str
    round: int
    kind: RoundKind
    idempotency_key: str
    num_wanted: int
    """Prompts that it returns."""
    prompt_ids: list[str]
    reserve: list[str]
    rebuilt: RebuildAnswer | None = None
    """Since the round before, with `--rollout-parallelism auto`."""


class DeferredEvent(BaseModel):
    """A group waits for a long round: what was sent of it counts for nothing."""

    type: Literal["deferred"] = "deferred"
    prompt_id: str
    group_id: str
    reason: DeferReason


class FilteredEvent(BaseModel):
    """All rewards of a returned group are the same: it leaves the round."""

    type: Literal["filtered"] = "filtered"
    prompt_id: str


class RoundDoneEvent(RoundSummary, DoneEvent):
    """A round is over, and what it made of its prompts is kept."""


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


GroupsEvent = (
    TrajectoryEvent | RewardEvent | CandidateEvent | TokensEvent | GroupEvent | RestartedEvent | RanksFreeEvent
)
RolloutEvent = GroupsEvent | DoneEvent | ErrorEvent
RoundStreamEvent = RoundEvent | GroupsEvent | DeferredEvent | FilteredEvent | RoundDoneEvent | ErrorEvent
Event = RolloutEvent | RoundStreamEvent
