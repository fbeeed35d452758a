"""Jobs of an engine whose groups move to another one.

Invariant: jobs bypass vLLM's front end, so that nothing waits for tokens of another engine. Tokens are taken from the
engine core's outputs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.moving.calls import GroupToAdopt, GroupToRelease
from vllm_rollout.parts.moving.core.moving import GroupMoves
from vllm_rollout.parts.moving.wire import Parcel

EPOCH = 1
"""Every group moves only once."""


class MovingJobs:
    """Mixed into a child; `self.llm` holds the engine in this process."""

    llm: Any
    _core: Any

    @cached_property
    def _said(self) -> dict[str, list[int]]:
        """Tokens generated here, by request."""
        return defaultdict(list)

    def begin(self, group: str, prompt: list[int], sampling: list[dict[str, Any]]) -> None:
        """Add a group of one candidate per sampling."""
        terms = GroupTerms(len(sampling), len(sampling), early_stop=False)
        for index, fields in enumerate(sampling):
            tag = CandidateTag(group, index, terms, OUTPUT_INTERVAL_TOKENS)
            params = SamplingParams(**fields, ignore_eos=True, detokenize=False, extra_args=tag.to_extra_args())
            request = EngineCoreRequest(f"{group}-{index}", prompt, None, params, None, time.time(), None, None, None)
            self._core.add_request(*self._core.preprocess_add_request(request))

    def until(self, group: str, num_tokens: int) -> float:
        """Run steps until every candidate has `num_tokens` output tokens. Returns the mean seconds of a step."""
        started, num_steps = time.perf_counter(), 0
        while min(self._lengths(group)) < num_tokens:
            self._step()
            num_steps += 1
        return (time.perf_counter() - started) / max(1, num_steps)

    def release(self, group: str) -> dict[str, Any]:
        moves, wanted = self._core.scheduler.part(GroupMoves), GroupToRelease(group, EPOCH)
        started = time.perf_counter()
        while (released := moves.release(self._core, wanted)).outcome == "in_flight":
            self._step()
        seconds = time.perf_counter() - started
        kv = Parcel.decode(released.parcel).kv
        return {
            "parcel": released.parcel,
            "release_s": seconds,
            "ways": [] if kv is None else [segment.way for segment in kv.segments],
            "num_blocks": 0 if kv is None else kv.segments[0].num_blocks,
            "said": self._said_of(group),
        }

    def adopt(self, group: str, parcel: bytes, with_kv: bool) -> dict[str, Any]:
        """Adopt a group. Returns the seconds until it is here, and until all its candidates have their next token."""
        content = parcel if with_kv else replace(Parcel.decode(parcel), kv=None).encode()
        moves = self._core.scheduler.part(GroupMoves)
        num_before = moves.kv.num_blocks_in
        started = time.perf_counter()
        moves.adopt(self._core, GroupToAdopt(group, EPOCH, content))
        adopted = time.perf_counter()
        self.until(group, min(self._lengths(group)) + 1)
        return {
            "adopt_s": adopted - started,
            "first_token_s": time.perf_counter() - started,
            "num_blocks_in": moves.kv.num_blocks_in - num_before,
        }

    def confirm(self, group: str) -> None:
        self._core.scheduler.part(GroupMoves).confirm(self._core, GroupToRelease(group, EPOCH))

    def end(self, group: str) -> dict[str, list[int]]:
        """Run to the end. Returns the tokens that each candidate generated here."""
        while self._core.scheduler.has_requests():
            self._step()
        self.llm.reset_prefix_cache()
        return self._said_of(group)

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        for each in (outputs or {}).values():
            for output in each.outputs:
                self._said[output.request_id] += output.new_token_ids

    def _lengths(self, group: str) -> list[int]:
        requests = self._core.scheduler.requests
        return [request.num_output_tokens for id, request in requests.items() if id.startswith(f"{group}-")]

    def _said_of(self, group: str) -> dict[str, list[int]]:
        """Tokens of the group's candidates, which are removed from `_said`."""
        return {id: self._said.pop(id) for id in list(self._said) if id.startswith(f"{group}-")}
