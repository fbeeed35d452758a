"""The interface between the service and an engine. Invariant: no type here belongs to vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from vllm_rollout.kernel.rules.fields import Migration
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward, RewardStatus
from vllm_rollout.kernel.rules.types import BASE_MODEL, Assessment, Ending, HeadKey, RankCounts, Signal
from vllm_rollout.parts.moving.rules.load import RankState
from vllm_rollout.parts.moving.rules.placement import ALL_OWNERS, TRAINER
from vllm_rollout.parts.moving.rules.scaling import Progress, ScaleDown
from vllm_rollout.parts.moving.rules.work import Work
from vllm_rollout.parts.pruning.rules.advice import Advice
from vllm_rollout.parts.pruning.rules.known_prompts import KnownPrompt
from vllm_rollout.parts.pruning.rules.length_trial import TriedCandidate
from vllm_rollout.parts.pruning.rules.race_bias import AuditReport
from vllm_rollout.parts.pruning.rules.report import HeadInfo, ShadowReport, SignalReport
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.shaping.rules.cost import CostModel
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, LengthStatistics


class RequestError(Exception):
    """A request that cannot be served. Becomes an OpenAI error body."""

    def __init__(
        self,
        message: str,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s
        """Seconds after which to try again. None if unknown."""


class EngineStopped(RequestError):
    """The engine, or the rank that was asked, is dead. This is also reported elsewhere."""


class GroupLost(Exception):
    """The part of the engine that ran a group has died. Other groups go on."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt as the client wrote it, in exactly one of the three forms."""

    id: str
    position: int
    """Position in the request."""
    messages: Sequence[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt that the engine has accepted."""

    id: str
    token_ids: Sequence[int]
    handle: Any
    """The engine's own form of the prompt together with its sampling parameters."""
    max_tokens: int | None = None
    """Most output tokens of its candidates. None if unknown."""
    resume_refusal: RequestError | None = None
    """Reason why candidates of this prompt cannot go on in a later round. None: they can."""


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Output of a group's candidates from an earlier round."""

    token_ids: Mapping[int, Sequence[int]]
    """Tokens of the candidates that run, by index. Empty for a new candidate."""
    next_index: int
    """Index of the first candidate that replaces a lost one."""
    survival: Mapping[int, float] = field(default_factory=dict)
    """Probability with which each candidate was kept, by index. 1 for a missing index."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected lengths of a group and its permission to move, for engines with several ranks."""

    lengths: LengthMoments | None
    """Lengths of its prompt, else of the data set, as known before its rollout began. None if unknown.

    Lengths from the rollout itself would predict too little, since short candidates end first.
    """
    prompt_tokens: int
    max_tokens: int | None
    """Most output tokens of its candidates. None if unknown."""
    migration: Migration = "off"
    """Purpose for which the group may move while its rank is not drained."""

    def work(self, num_tokens: Iterable[int]) -> Work:
        """The work of candidates that have these numbers of output tokens so far."""
        return Work.of(num_tokens, self.lengths, self.max_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """An order to run a group."""

    group_id: str
    rollout_id: str
    """Rewards name a candidate of a group with pruning by this, the prompt's id and an index."""
    plan: GroupPlan
    prompt: PreparedPrompt
    seed_name: str
    """In a seeded request, a candidate's samples depend only on the seed, this name and its index (`seed_for`)."""
    pruning_seed: int
    """Random choices of pruning depend only on this, the prompt's id and the index."""
    prompt_key: str = ""
    """Name under which rewards of the prompt are remembered."""
    stream_tokens: int | None = None
    """Fewest new tokens of a candidate per report. None: only its end is reported."""
    place: RacePlace | None = None
    beginnings: Beginnings | None = None
    """Candidates that continue from an earlier round, as many as `plan` has.

    Reports are about new output only: tokens, counts and spans begin with the first new token. They have no text (see
    `text_of`).
    """
    outlook: Outlook | None = None
    """Chooses the group's rank by predicted work. The group may then move to another rank when that pays, unless its
    moves are refused."""
    trace_headers: Mapping[str, str] | None = None
    """W3C trace context for its candidates. None if nothing is traced."""
    priority: int = 0
    """Priority in the engine's own queue, if that uses priorities. A lower number is earlier."""


@dataclass(frozen=True, slots=True)
class CandidateTokens:
    """New tokens of a running candidate."""

    index: int
    offset: int
    """Number of output tokens before these."""
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None


@dataclass(frozen=True, slots=True)
class CandidateEnd:
    """The end of a candidate, with everything it generated."""

    ending: Ending
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    """Natural logarithm of each sampled token's probability, [num_tokens]."""
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None
    confidence: tuple[float, float] | None
    """Mean and standard deviation of its token confidences, in nats. None if the engine did not observe them."""
    weight_versions: Sequence[dict[str, Any]]
    """Spans `{"version", "start", "end"}` over the output tokens."""
    assessment: Assessment | None = None
    """None if never scored: without pruning, or because it ended before `detection_length`."""
    final: Assessment | None = None
    """Assessment at its last token, if that was requested."""
    is_replaced: bool = False
    """True if it was lost and another candidate takes its place."""
    group_lost: bool = False
    """True if its group completed in the step of its end, but after as many groups as its race wanted."""
    survival_before: float = 1.0
    """Probability with which it was kept in earlier rounds."""
    error: str | None = None
    """The error, if it failed for a known reason."""


Happening = CandidateTokens | CandidateEnd
"""New tokens or the end of a candidate."""


@dataclass(frozen=True, slots=True)
class RewardsReceipt:
    """The engine's answer to a list of rewards."""

    statuses: Sequence[RewardStatus]
    """One status per reward, in their order."""
    num_training: int
    """Labels that the quality head trains on now. Fewer than were accepted if features were evicted."""
    head_versions: Mapping[HeadKey, int]
    """Versions, before that training, of the known heads that learn from these rewards."""


@dataclass(frozen=True, slots=True)
class LearningReport:
    """The quality of one detection length's calibration and head."""

    detection_length: int
    head: HeadInfo | None
    """None while no head is trained."""
    signals: Mapping[Signal, SignalReport]
    num_awaiting: int
    """Scored candidates whose reward has not come."""
    num_evicted: int
    """Features dropped before their reward came. A larger ring keeps more."""
    losses: Sequence[float]
    """Mean training loss of each version of the head, oldest first, in nats."""
    active: ShadowReport
    shadow: ShadowReport
    audit: AuditReport
    advice: Advice
    adapter: str = BASE_MODEL
    """Name of the LoRA adapter. Empty for the base model."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of emptying a rank."""

    is_held: bool
    """True if nothing new is sent to the rank. False if it was restored meanwhile."""
    num_moved: int
    """Groups that moved to other ranks."""
    num_left: int
    """Requests that still run or wait there."""
    reasons: Mapping[str, int]
    """Reasons why groups stayed -> number of groups."""
    seconds: float


KeepState = Callable[[str], Awaitable[None]]
"""Writes what belongs to a state. Awaited when the state was checked, before anything changes. The argument is the
state's file name, empty if it is not on disk. An exception leaves everything unchanged."""


class LearningPart(Protocol):
    """The part of an engine that learns from rewards."""

    @property
    def pruning_refusal(self) -> str | None:
        """Reason why this engine cannot score candidates, with the remedy. None if it can."""

    async def post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        """Learn from rewards: calibration at once, the quality head in the background.

        Returns None when no rollout of that id with pruning is known. Raises: RequestError (503) for a dead engine.
        """

    async def post_named_rewards(self, rewards: Sequence[NamedReward]) -> RewardsReceipt:
        """Learn from rewards for candidates of any rollouts, groups and requests. Each reward gets its own status."""

    async def quality_head(self, detection_length: int | None, adapter: str = BASE_MODEL) -> tuple[HeadInfo, bytes]:
        """An adapter's quality head as safetensors. `detection_length` None: the only head there is.

        Raises: RequestError (404 without a head, 409 when the length must be named).
        """

    async def set_quality_head(self, weights: bytes, adapter: str = BASE_MODEL) -> HeadInfo:
        """Put a quality head in place of the adapter's one for its detection length.

        Raises: RequestError (400 not a head; 409 other hidden size or model, with both values).
        """

    async def learning_report(self, detection_length: int | None, adapter: str = BASE_MODEL) -> LearningReport:
        """The quality of calibration and head so far. Raises: RequestError as `quality_head` does."""

    async def tried_lengths(self, adapter: str = BASE_MODEL) -> list[TriedCandidate]:
        """Candidates that were scored at several lengths and have a reward. Raises: RequestError (503) for a dead
        engine."""

    async def known_prompts(self, adapter: str = BASE_MODEL) -> list[KnownPrompt]:
        """Results of each known prompt, most recent first. Raises: RequestError (503) for a dead engine."""

    async def learning_state(self) -> bytes:
        """Everything learned: calibration, heads and their optimizers. `set_learning_state` restores it."""

    async def set_learning_state(self, state: bytes, keep: KeepState | None = None) -> None:
        """Take a state's place, in the engine and on disk: whole, or not at all.

        Raises: RequestError (400 unreadable; 409 another model, with both values; 507 when the disk does not take it),
        and whatever `keep` raises; then nothing has changed.
        """


class ShapingPart(Protocol):
    """The part of an engine that knows lengths and the cost of steps."""

    @property
    def cost_model(self) -> CostModel | None:
        """The cost of a step on this engine. None without a profile."""

    async def observe_lengths(self, key: str, lengths: Sequence[ObservedLength], adapter: str = BASE_MODEL) -> None:
        """Record the lengths of a finished group of a prompt. Raises: RequestError (503) for a dead engine."""

    async def length_history(self, keys: Sequence[str], adapter: str = BASE_MODEL) -> LengthStatistics:
        """Known lengths of these prompts under an adapter. Raises: RequestError (503) for a dead engine."""

    async def step_drift(self) -> Sequence[StepDrift]:
        """Live step times against the profile's, as far as there are any. With several ranks: of the rank that is
        furthest off."""


class MovesPart(Protocol):
    """The ranks of an engine, and groups that move between them."""

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks that groups are spread over."""

    def refusal(self, *, priced: bool) -> str | None:
        """Reason why groups cannot move here without a drain, with the remedy. None if they can. `priced`: for moves
        that have to pay."""

    async def rank_states(self) -> Sequence[RankState]:
        """State by rank. Raises: RequestError (503) for a dead engine."""

    async def drain(self, rank: int, timeout_s: float, owner: str = TRAINER) -> Drained:
        """Move all groups of a rank elsewhere, and send it nothing more. Waits up to `timeout_s` seconds until it is
        empty.

        The rank is kept empty for `owner`.

        Raises: RequestError (409) for the last rank that is not held, (503) for a dead engine.
        """

    async def restore(self, rank: int, owner: str = ALL_OWNERS) -> None:
        """End `owner`'s hold on a rank. Without any hold, groups are sent to the rank again.

        Raises: RequestError (503) for a dead engine.
        """

    async def plan_scale_down(self, progress: Progress) -> ScaleDown:
        """Decide if half of the ranks should be freed at this progress.

        Raises: RequestError (503) for a dead engine.
        """


class Engine(Protocol):
    """An engine that runs groups, and its parts."""

    @property
    def learning(self) -> LearningPart: ...

    @property
    def shaping(self) -> ShapingPart: ...

    @property
    def moves(self) -> MovesPart: ...

    @property
    def max_num_seqs(self) -> int:
        """Most candidates that run at once on one rank."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def num_launch_places(self) -> int:
        """Most candidates of rollouts that this process may have in the engine at once, running or waiting."""

    def adapter_name(self, model: str | None) -> str:
        """The LoRA adapter that is served under this name. `BASE_MODEL` for the base model and for None.

        Raises: RequestError (404) for a name that is not served.
        """

    async def prepare(
        self,
        prompts: Sequence[PromptInput],
        model: str | None,
        sampling: dict[str, Any],
        *,
        want_logprobs: bool,
        want_text: bool,
    ) -> tuple[str, list[PreparedPrompt]]:
        """Check model, sampling parameters and prompts. Returns the model's name and the prompts in order.

        Raises: RequestError that names the field.
        """

    def run_group(self, order: GroupOrder) -> AsyncGenerator[Happening, None]:
        """Launch the candidates of a group. Yields their new tokens and ends, at last one CandidateEnd each.

        Closing the generator aborts running candidates. Raises: GroupLost, after the end of each candidate.
        RequestError (503) for a dead engine.
        """

    def text_of(self, prompt: PreparedPrompt, token_ids: Sequence[int], *, stopped: bool) -> str:
        """Text of a candidate's output tokens. `stopped`: the last token ended it and has no text."""

    def prompt_text(self, prompt: PreparedPrompt) -> str:
        """Text of the prompt's tokens."""

    async def current_weight_version(self) -> str | None:
        """Version of the weights in use. None if they have no name. Raises: RequestError (503) for a dead engine."""

    async def recompute(self, request_ids: Sequence[str] | None) -> int:
        """Compute KV of older weights again, for candidates of groups. Returns the number of candidates that do.

        `request_ids`: requests that made the groups, by the ids that clients know. None: all groups.

        Raises: RequestError (503) for a dead engine.
        """
        ...

    async def cancel_groups(self, group_ids: Sequence[str]) -> None:
        """Stop groups: candidates that run or still come end as `deferred`.

        Groups that the engine does not know (yet, or any more) are passed over. Raises: RequestError (503) for a dead
        engine.
        """

    async def give_up(self, candidates: Mapping[str, Sequence[int]]) -> None:
        """Stop candidates, given by group: those that run end as `surplus`.

        Candidates that the engine does not know are passed over. Raises: RequestError (503) for a dead engine.
        """

    async def cut_race(self, race_id: str) -> None:
        """End a race, since enough of its groups are complete over all ranks: its other groups end as `deferred`.

        Raises: RequestError (503) for a dead engine, as do the next two.
        """

    async def widen_race(self, race_id: str, num_wanted: int) -> None:
        """Change the number of groups of a race that have to complete. Groups that were cut stay cut."""

    async def forget_race(self, race_id: str) -> None:
        """Forget a race, in which no more groups will take part."""

    async def last_tokens(self, group_id: str) -> list[CandidateTokens]:
        """Most recent tokens of a group's running candidates, without log probabilities.

        Raises: RequestError (503) for a dead engine.
        """
        ...

    async def rank_counts(self) -> Mapping[int, RankCounts]:
        """Groups and counts of each living rank, by rank. Raises: RequestError (503) for a dead engine."""
