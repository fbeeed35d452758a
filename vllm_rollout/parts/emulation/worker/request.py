"""A request on an emulated device: its tokens, and its observed values.

Invariant: a token follows from the request and the number of the token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm.sampling_params import SamplingParams

from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.emulation.fate import ENDLESS, Fate, Fates
from vllm_rollout.parts.emulation.tokens import PERIOD, Vocabulary

CONFIDENCE_NATS = 12.0
"""Trace confidence of a candidate with score 0, in nats."""
NO_NUMBER = math.nan


class EmulatedRequest:
    """A request on the emulated device."""

    __slots__ = (
        "confidence",
        "cycle",
        "fate",
        "id",
        "last_token",
        "length",
        "max_tokens",
        "newest",
        "num_before",
        "num_prompt",
        "salt",
        "tail",
        "tail_at",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        fates: Fates,
        vocabulary: Vocabulary,
        marker: Sequence[int],
        tag: CandidateTag | None,
        fate: Fate | None,
    ) -> None:
        self.id = request_id
        extra_args = params.extra_args or {}
        key = request_id if params.seed is None else params.seed
        self.num_before = 0 if tag is None else tag.num_resumed
        if fate is None:
            prompt = prompt_token_ids[: len(prompt_token_ids) - self.num_before]
            fate = fates.of(prompt, key, None if tag is None else tag.index, extra_args)
        self.fate = fate
        self.salt, self.cycle = self.fate.salt, vocabulary.cycle
        self.tail = marker if self.fate.asks else (vocabulary.verdict(self.salt, self.fate.succeeds),)
        self.num_prompt = len(prompt_token_ids)
        self.max_tokens = ENDLESS if params.max_tokens is None else params.max_tokens
        stops = [] if params.eos_token_id is None else [params.eos_token_id]
        stops += params.stop_token_ids or []
        self.last_token = stops[0] if stops else 0
        self.length = self.fate.length if stops else ENDLESS
        if self.fate.asks:
            self.length = max(self.length, 1 + len(marker))
        if params.min_tokens:
            self.length = max(self.length, self.num_before + params.min_tokens + 1)
        self.tail_at = self.length - len(self.tail)
        self.confidence = NO_NUMBER
        if tag is not None and tag.observed:
            self.observe()
        self.newest = 0
        """Number of its newest output token, without tokens of earlier rounds."""

    def observe(self) -> None:
        """Have a confidence in reports from now on."""
        self.confidence = CONFIDENCE_NATS + self.fate.score

    def token(self, number: int) -> int:
        """Output token `number`, counted from 1, including tokens of earlier rounds."""
        if number < self.tail_at:
            return self.cycle[(self.salt + number) % PERIOD]
        return self.last_token if number >= self.length else self.tail[number - self.tail_at]

    def says(self, number: int, drafts: Sequence[int]) -> list[int]:
        """Output token `number`, and one more for each draft that is right."""
        said = [self.token(number)]
        for draft in drafts:
            if draft != said[-1]:
                break
            number += 1
            said.append(self.token(number))
        return said
