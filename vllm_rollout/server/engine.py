"""What the service asks of an engine. Invariant: no type here belongs to vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from vllm_rollout.group.judging.advice import Advice
from vllm_rollout.group.judging.known_prompts import KnownPrompt
from vllm_rollout.group.judging.ledger import NamedReward, Reward, RewardStatus
from vllm_rollout.group.judging.length_trial import TriedCandidate
from vllm_rollout.group.judging.race_bias import AuditReport
from vllm_rollout.group.judging.report import HeadInfo, ShadowReport, SignalReport
from vllm_rollout.group.lengths.cost import CostModel
from vllm_rollout.group.lengths.history import ObservedLength
from vllm_rollout.group.lengths.moments import LengthMoments, LengthStatistics
from vllm_rollout.group.plans.fields import Migration
from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.racing.race import RacePlace
from vllm_rollout.group.ranks.drift import StepDrift
from vllm_rollout.group.ranks.load import EngineLoad
from vllm_rollout.group.ranks.placement import ALL_OWNERS, TRAINER
from vllm_rollout.group.ranks.scaling import Progress, ScaleDown
from vllm_rollout.group.ranks.work import Work
from vllm_rollout.group.types import BASE_MODEL, Assessment, Ending, HeadKey, HeldGroups, Signal


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
        """When it is worth trying again; None: not said."""


class EngineStopped(RequestError):
    """The engine, or the rank that was asked, is dead, and says so everywhere else."""


class GroupLost(Exception):
    """The part of the engine that a group ran on has died; other groups go on."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt as the client wrote it; exactly one of the three forms is set."""

    id: str
    position: int
    """Where it stands in the request."""
    messages: Sequence[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt the engine has accepted."""

    id: str
    token_ids: Sequence[int]
    handle: Any
    """The engine's own form of the prompt together with its sampling parameters."""
    max_tokens: int | None = None
    """Output tokens its candidates may have; None: not known."""
    resume_refusal: RequestError | None = None
    """Why candidates of this prompt cannot go on in a later round; None: they can."""


@dataclass(frozen=True, slots=True)
class Beginnings:
    """What candidates of a group generated in an earlier round."""

    token_ids: Mapping[int, Sequence[int]]
    """The tokens of the candidates that run, by index; empty for one that starts."""
    next_index: int
    """The index of a candidate that takes the place of a lost one."""
    survival: Mapping[int, float] = field(default_factory=dict)
    """The probability with which each was kept; 1 where it is not here."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What several ranks have to know of a group: when it will be over, and whether it may move."""

    lengths: LengthMoments | None
    """The lengths of its prompt, else of the data set, as known before its rollout began; None: nothing was. What ends
    first is short, so that later they would predict too little."""
    prompt_tokens: int
    max_tokens: int | None
    """Output tokens its candidates may have; None: not known."""
    migration: Migration = "off"
    """What it may move for when nobody drains its rank."""

    def work(self, num_tokens: Iterable[int]) -> Work:
        """The work of candidates that have so many output tokens."""
        return Work.of(num_tokens, self.lengths, self.max_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """A group that is to run."""

    group_id: str
    rollout_id: str
    """With the prompt's id and an index it names a candidate of a group with pruning, for rewards."""
    plan: GroupPlan
    prompt: PreparedPrompt
    seed_name: str
    """Candidates of a seeded request sample by its seed, this and their index only (`seed_for`)."""
    pruning_seed: int
    """Chance of pruning depends on it, the prompt's id and the index only."""
    prompt_key: str = ""
    """Under which it is remembered what rewards say of the prompt."""
    stream_tokens: int | None = None
    """New tokens of a candidate that are worth telling; None: its end only."""
    place: RacePlace | None = None
    beginnings: Beginnings | None = None
    """Where candidates go on, as many as `plan` says. What is yielded is what comes after: tokens, counts and spans
    begin with the first new token. They have no text, for which see `text_of`."""
    outlook: Outlook | None = None
    """Its rank is chosen by the work that is predicted, and it may move to another when that pays, the latter only
    without a refusal of its moves."""
    trace_headers: Mapping[str, str] | None = None
    """W3C trace context, of which its candidates are; None: nobody traces."""
    priority: int = 0
    """What the engine's own queue goes by, if it goes by priorities: a lower number is earlier."""


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
    """Mean and standard deviation of its token confidences, in nats; None where the engine did not observe them."""
    weight_versions: Sequence[dict[str, Any]]
    """Spans `{"version", "start", "end"}` over the output tokens."""
    assessment: Assessment | None = None
    """None: never scored (no pruning, or it ended before `detection_length`)."""
    final: Assessment | None = None
    """By its last token, where that was asked for."""
    is_replaced: bool = False
    """It was lost, and another candidate takes its place."""
    group_lost: bool = False
    """Its group completed in the step of its end, but after as many others as its race wanted."""
    survival_before: float = 1.0
    """Probability with which it was kept in an earlier round."""
    error: str | None = None
    """Why it failed, where that is known."""


Happening = CandidateTokens | CandidateEnd
"""To a candidate of a group."""


@dataclass(frozen=True, slots=True)
class RewardsReceipt:
    """What became of a list of rewards."""

    statuses: Sequence[RewardStatus]
    """One per reward, in their order."""
    num_training: int
    """Labels the quality head is going to train on now; fewer than accepted when features were evicted."""
    head_versions: Mapping[HeadKey, int]
    """The heads that the rollouts teach, as far as they are known: the version before that training."""


@dataclass(frozen=True, slots=True)
class LearningReport:
    """What one detection length's calibration and head are worth."""

    detection_length: int
    head: HeadInfo | None
    """None while no head is trained."""
    signals: Mapping[Signal, SignalReport]
    num_awaiting: int
    """Scored candidates whose reward has not come."""
    num_evicted: int
    """Features dropped before their reward came: enlarge the ring."""
    losses: Sequence[float]
    """Mean training loss of each version of the head, oldest first, in nats."""
    active: ShadowReport
    shadow: ShadowReport
    audit: AuditReport
    advice: Advice
    adapter: str = BASE_MODEL
    """The LoRA adapter's name; "": the base model."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What came of emptying a rank."""

    is_held: bool
    """Nothing new is sent to it. False: it was restored meanwhile."""
    num_moved: int
    """Groups that go on elsewhere."""
    num_left: int
    """Requests that still run or wait there."""
    reasons: Mapping[str, int]
    """Why groups stayed: how many for which."""
    seconds: float


KeepState = Callable[[str], Awaitable[None]]
"""Awaited when a state has been checked, and nothing has changed: writes what belongs to it, with the name under which
the state lies on disk, empty where there is none. What it raises leaves everything as it was."""


class LearningPart(Protocol):
    """What an engine learns from rewards."""

    @property
    def pruning_refusal(self) -> str | None:
        """Why this engine cannot score candidates, with the remedy; None when it can."""

    async def post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        """Learn from rewards: calibration at once, the quality head in the background.

        Returns None when no rollout of that id with pruning is known. Raises: RequestError (503) for a dead engine.
        """

    async def post_named_rewards(self, rewards: Sequence[NamedReward]) -> RewardsReceipt:
        """The same for candidates of any rollouts, groups and requests; each has a status of its own."""

    async def quality_head(self, detection_length: int | None, adapter: str = BASE_MODEL) -> tuple[HeadInfo, bytes]:
        """A quality head of an adapter as safetensors; None: the only one there is.

        Raises: RequestError (404 without a head, 409 when the length must be named).
        """

    async def set_quality_head(self, weights: bytes, adapter: str = BASE_MODEL) -> HeadInfo:
        """Put a quality head in place of the adapter's one for its detection length.

        Raises: RequestError (400 not a head; 409 other hidden size or model, with both values).
        """

    async def learning_report(self, detection_length: int | None, adapter: str = BASE_MODEL) -> LearningReport:
        """What calibration and head are worth so far. Raises: RequestError as `quality_head` does."""

    async def tried_lengths(self, adapter: str = BASE_MODEL) -> list[TriedCandidate]:
        """Candidates that were scored at several lengths, and rewarded. Raises: RequestError (503), a dead engine."""

    async def known_prompts(self, adapter: str = BASE_MODEL) -> list[KnownPrompt]:
        """What is known of each prompt, the last seen first. Raises: RequestError (503) for a dead engine."""

    async def learning_state(self) -> bytes:
        """Everything learned, to be restored by `set_learning_state`: calibration, heads and their optimizers."""

    async def set_learning_state(self, state: bytes, keep: KeepState | None = None) -> None:
        """Take a state's place, in the engine and on disk: whole, or not at all.

        Raises: RequestError (400 unreadable; 409 another model, with both values; 507 when the disk does not take it),
        and whatever `keep` raises; then nothing has changed.
        """


class ShapingPart(Protocol):
    """What an engine knows of lengths and of what its steps cost."""

    @property
    def cost_model(self) -> CostModel | None:
        """What a step costs here; None without a profile."""

    async def observe_lengths(self, key: str, lengths: Sequence[ObservedLength], adapter: str = BASE_MODEL) -> None:
        """A group of that prompt is over. Raises: RequestError (503) for a dead engine."""

    async def length_history(self, keys: Sequence[str], adapter: str = BASE_MODEL) -> LengthStatistics:
        """What is known of these prompts' lengths under an adapter. Raises: RequestError (503) for a dead engine."""

    async def step_drift(self) -> Sequence[StepDrift]:
        """Live step times against the profile's, as far as there are any; of several ranks the one furthest off."""


class MovesPart(Protocol):
    """The ranks of an engine, and groups that move between them."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks that groups are spread over."""

    def refusal(self, *, priced: bool) -> str | None:
        """Why groups cannot move without a drain here, with the remedy; None when they can. `priced`: if it pays."""

    async def engine_loads(self) -> Sequence[EngineLoad]:
        """By rank. Raises: RequestError (503) for a dead engine."""

    async def drain(self, rank: int, timeout_s: float, owner: str = TRAINER) -> Drained:
        """Move all groups of a rank elsewhere and send it nothing more; waits so long until it is empty.

        It is kept so for `owner`.

        Raises: RequestError (409) for the last rank that is not held; (503) for a dead engine.
        """

    async def restore(self, rank: int, owner: str = ALL_OWNERS) -> None:
        """`owner` does not keep it empty any more; when nobody does, groups are sent to it again.

        Raises: RequestError (503) for a dead engine.
        """

    async def plan_scale_down(self, progress: Progress) -> ScaleDown:
        """Whether to free half of the ranks after so much of a rollout.

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
        """Candidates that can run at once on one rank."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer."""

    @property
    def num_launch_places(self) -> int:
        """Candidates of rollouts that this process may have in the engine at once, running or waiting."""

    def adapter_name(self, model: str | None) -> str:
        """The LoRA adapter that is served under this name; `BASE_MODEL` for the base model, and for None.

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
        """Check model, sampling parameters and prompts; returns the model's name and the prompts in order.

        Raises: RequestError that names the field.
        """

    def run_group(self, order: GroupOrder) -> AsyncGenerator[Happening, None]:
        """Launch the candidates and yield what happens to them, ending with one CandidateEnd each.

        Closing the generator aborts what still runs. Raises: GroupLost, after the end of each candidate; RequestError
        (503) for a dead engine.
        """

    def text_of(self, prompt: PreparedPrompt, token_ids: Sequence[int], *, stopped: bool) -> str:
        """The text of output tokens of a candidate; `stopped`: the last one ended it, and says nothing."""

    def prompt_text(self, prompt: PreparedPrompt) -> str:
        """The text of its tokens."""

    async def current_weight_version(self) -> str | None:
        """The version of the weights in use; None when nobody has named them. Raises: RequestError (503) for a dead
        engine."""

    async def recompute(self, request_ids: Sequence[str] | None) -> int:
        """Candidates of groups compute their KV again where older weights have computed it. Returns how many do.

        request_ids: of the requests that made the groups, as clients know them. None: all groups.

        Raises: RequestError (503) for a dead engine.
        """
        ...

    async def cancel_groups(self, group_ids: Sequence[str]) -> None:
        """Nobody wants the rest of these groups: what runs, or still comes, ends as `deferred`.

        One that the engine does not know (yet, or any more) is passed over. Raises: RequestError (503) for a dead
        engine.
        """

    async def give_up(self, candidates: Mapping[str, Sequence[int]]) -> None:
        """Nobody needs these candidates, by group: those that run end as `surplus`.

        One that the engine does not know is passed over. Raises: RequestError (503) for a dead engine.
        """

    async def cut_race(self, race_id: str) -> None:
        """Enough groups of that race are complete, of all ranks: the others end as `deferred`.

        Raises: RequestError (503) for a dead engine, as do the next two.
        """

    async def widen_race(self, race_id: str, num_wanted: int | None) -> None:
        """So many groups have to complete now (None: `cut_race` says it again); those that were cut stay so."""

    async def forget_race(self, race_id: str) -> None:
        """No more groups will take part."""

    async def last_tokens(self, group_id: str) -> list[CandidateTokens]:
        """What candidates of a group that have not ended said last, without log probabilities.

        Raises: RequestError (503) for a dead engine.
        """
        ...

    async def held_groups(self) -> HeldGroups:
        """Groups in the engine, of all ranks. Raises: RequestError (503) for a dead engine."""
