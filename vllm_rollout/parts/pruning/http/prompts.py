"""The answer of `GET /v1/rollouts/prompts` (docs/reference/http.md), page by page.

Invariant: pages that are read one after the other while nothing runs have each prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Literal

from pydantic import BaseModel

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.rules.prompt_key import KEY_OF_ID
from vllm_rollout.parts.pruning.rules.known_prompts import KnownPrompt, PromptOrder, in_order

MAX_PAGE = 10_000
DEFAULT_PAGE = 1_000


class PromptLengths(BaseModel):
    """Lengths of a prompt's answers in tokens: moving averages over its groups."""

    mean: float
    std: float
    """Standard deviation within groups."""
    num_groups: int


class PromptRewards(BaseModel):
    """Rewards of a prompt: decaying sums over its rewarded candidates, each with the weight 1 / survival
    probability."""

    rate: float
    num_rewarded: float
    num_successful: float


class PromptAnswer(BaseModel):
    key: str
    """The server's name for the prompt. Send the last one as `after` for the next page."""
    id: str | None
    """The client's id of the prompt. Null if it gave none, and for groups of the OpenAI endpoints."""
    lengths: PromptLengths | None
    success: PromptRewards | None
    prompts_ago: int | None
    """Number of other prompts with a finished group since this prompt's newest one. Null if no lengths are known."""

    @classmethod
    def of(cls, prompt: KnownPrompt) -> PromptAnswer:
        lengths, success = prompt.lengths, prompt.success
        return cls(
            key=prompt.key,
            id=prompt.key.removeprefix(KEY_OF_ID) if prompt.key.startswith(KEY_OF_ID) else None,
            lengths=lengths and PromptLengths.model_validate(lengths, from_attributes=True),
            success=success and PromptRewards(rate=success.num_successful / success.num_rewarded, **success._asdict()),
            prompts_ago=prompt.prompts_ago,
        )


class PromptsAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[PromptAnswer]
    num_prompts: int
    """Number of known prompts, on all pages."""
    has_more: bool


def prompts_page(prompts: Sequence[KnownPrompt], limit: int, after: str | None, order: PromptOrder) -> PromptsAnswer:
    """One page of the known prompts. Raises: RequestError (404) for an unknown `after`."""
    ordered = in_order(prompts, order)
    start = 0
    if after is not None:
        place = next((i for i, prompt in enumerate(ordered) if prompt.key == after), None)
        if place is None:
            raise RequestError(
                f"after: no prompt with the key {after!r:.80} is known (any more). Give the `key` of the last prompt "
                "of the page before, or begin anew without `after`.",
                status=HTTPStatus.NOT_FOUND,
                param="after",
            )
        start = place + 1
    page = ordered[start : start + limit]
    return PromptsAnswer(
        data=[PromptAnswer.of(prompt) for prompt in page],
        num_prompts=len(ordered),
        has_more=start + len(page) < len(ordered),
    )
