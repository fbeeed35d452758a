"""Tokens of running candidates, for viewers."""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.engine.core import EngineCore

from vllm_rollout.kernel.core.ports import Answers, CorePart
from vllm_rollout.parts.page.calls import LAST_TOKENS, LastTokens

MOST_LAST_TOKENS = 512
"""Most tokens of a candidate that a viewer gets: a screen of text, at no noticeable time of a step."""


def _last_tokens(core: EngineCore, group_id: str) -> list[LastTokens]:
    told = []
    for candidate in core.scheduler.candidates_of(group_id):
        token_ids = candidate.request.output_token_ids
        offset = max(0, len(token_ids) - MOST_LAST_TOKENS)
        told.append(LastTokens(candidate.id.index, offset, token_ids[offset:]))
    return told


class PageCore(CorePart):
    answers: ClassVar[Answers] = {LAST_TOKENS: _last_tokens}
