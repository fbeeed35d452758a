"""The interface between the service and an engine. Invariant: no type here belongs to vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from vllm_rollout.kernel.call_table import Argument, Operation, Result
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import Ending, RankCounts

Kind = TypeVar("Kind")


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


class NoRankTakes(RequestError):
    """No rank of the engine takes groups: those that live are drained."""


class GroupLost(Exception):
    """The part of the engine that ran a group has died. Other groups go on."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt as the client wrote it. Token ids come before the other forms."""

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
    """The expected lengths of a group, for engines with several ranks."""

    lengths: Any
    """Lengths of its prompt, else of the data set, as a part knew them before its rollout began. None if unknown.

    Lengths from the rollout itself would predict too little, since short candidates end first.
    """
    prompt_tokens: int
    max_tokens: int | None
    """Most output tokens of its candidates. None if unknown."""


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """An order to run a group."""

    group_id: str
    plan: GroupPlan
    prompt: PreparedPrompt
    seed_name: str
    """In a seeded request, a candidate's samples depend only on the seed, this name and its index (`seed_for`)."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """Values that each candidate carries for parts, by part."""
    said_once: Mapping[str, Any] = field(default_factory=dict)
    """Values of the group for parts. Candidates that are launched for it later do not repeat them."""
    stream_tokens: int | None = None
    """Fewest new tokens of a candidate per report. None: only its end is reported."""
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
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Values that parts say of its end, by part."""
    is_replaced: bool = False
    """True if it was lost and another candidate takes its place."""
    survival_before: float = 1.0
    """Probability with which it was kept in earlier rounds."""
    error: str | None = None
    """The error, if it failed for a known reason."""


Happening = CandidateTokens | CandidateEnd
"""New tokens or the end of a candidate."""


class CoreCalls(Protocol):
    """Calls of an API process to its engine cores, by the call table."""

    async def call_all(self, operation: Operation[Argument, Result], argument: Argument) -> list[Result]:
        """Run one operation on every rank. Returns the results of living ranks. Raises: EngineStopped."""
        ...

    async def tell_groups(self, operation: Operation[Argument, Result], argument: Argument) -> list[Result]:
        """`call_all` while no group moves: it would miss a group that is in no engine core.

        Raises: EngineStopped.
        """


class Engine(Protocol):
    """An engine that runs groups."""

    @property
    def calls(self) -> CoreCalls: ...

    def part(self, kind: type[Kind]) -> Kind:
        """The part's object in this API process, by its class. Raises: LookupError if there is none."""
        ...

    def find(self, kind: type[Kind]) -> Kind | None:
        """The part's object in this API process, by its class. None if the part is not there."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks that groups are spread over."""

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

        Closing the generator aborts running candidates. Raises: GroupLost or NoRankTakes, after the end of each
        candidate. EngineStopped.
        """

    def text_of(self, prompt: PreparedPrompt, token_ids: Sequence[int], *, stopped: bool) -> str:
        """Text of a candidate's output tokens. `stopped`: the last token ended it and has no text."""

    def prompt_text(self, prompt: PreparedPrompt) -> str:
        """Text of the prompt's tokens."""

    async def current_weight_version(self, model: str | None = None) -> str | None:
        """Version of a served model's weights in use: of an adapter, or of the base model. None if they have no name.

        Raises: EngineStopped.
        """

    async def name_adapter(self, adapter: str, version: str) -> None:
        """Name the newest weights of an adapter. `adapter`: as `adapter_name` returns it. Raises: EngineStopped."""

    async def rank_counts(self) -> Mapping[int, RankCounts]:
        """Groups and counts of each living rank, by rank. Raises: EngineStopped."""
