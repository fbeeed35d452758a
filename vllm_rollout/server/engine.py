"""What the service asks of an engine. Invariant: no type here belongs to vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_rollout.group.plan import GroupPlan
from vllm_rollout.group.types import Ending


class RequestError(Exception):
    """A request that cannot be served. Becomes an OpenAI error body."""

    def __init__(self, message: str, *, status: int = 422, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


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
    mean_confidence: float | None
    weight_versions: Sequence[dict[str, Any]]
    """Spans `{"version", "start", "end"}` over the output tokens."""


class Engine(Protocol):
    """An engine that runs groups."""

    @property
    def max_num_seqs(self) -> int:
        """Candidates that can run at once on one rank."""
        ...

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
        ...

    def run_group(
        self, group_id: str, plan: GroupPlan, prompt: PreparedPrompt, *, stream_tokens: int | None
    ) -> AsyncGenerator[CandidateTokens | CandidateEnd, None]:
        """Launch the candidates and yield what happens to them, ending with one CandidateEnd each.

        Closing the generator aborts what still runs.
        """
        ...
