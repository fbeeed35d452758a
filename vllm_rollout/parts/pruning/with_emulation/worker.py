"""Quality heads on an emulated device: real heads, on hidden states that are made up.

Invariant: a candidate's state at a length depends on its seed and its score only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_rollout.kernel.wire import CandidateTag, RunnerReport
from vllm_rollout.parts.emulation.worker.ports import EmulatedPart, SaidRow
from vllm_rollout.parts.emulation.worker.request import NO_NUMBER, EmulatedRequest
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey
from vllm_rollout.parts.pruning.rules.step import TERMS
from vllm_rollout.parts.pruning.wire import LastLogits, ScoreReport
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey
from vllm_rollout.parts.pruning.worker.features import attach, detach
from vllm_rollout.parts.pruning.worker.last_states import EndedStates
from vllm_rollout.parts.pruning.worker.operators import quality_head
from vllm_rollout.parts.pruning.worker.quality_heads import QualityHeads
from vllm_rollout.parts.pruning.worker.scored_rows import DUE_COLUMNS
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead

HIDDEN_SIZE = 16
"""Size of a made-up hidden state: the score, and noise."""
NUM_IN_FLIGHT = 1
"""Tokens of a candidate that may be in flight when it has ended."""


class Scored(NamedTuple):
    """A candidate with scores."""

    request: EmulatedRequest
    lengths: tuple[int, ...]
    """Output tokens after which it is scored."""
    is_final: bool
    """True if it is scored at its end, too."""


class EmulatedHeads(EmulatedPart):
    """Takes the place of the scorer of a worker's quality heads."""

    def __init__(self, ring: FeatureRing, num_last_states: int) -> None:
        """`num_last_states`: number of a candidate's newest tokens that may be its last one when it ends."""
        self.num_last_states = num_last_states
        self.heads: dict[HeadKey, PublishedHead] = {}
        """Published quality heads."""
        self._ring = ring
        self._scored: dict[str, Scored] = {}
        """Candidates with scores, by request id."""

    def begin(self, request: EmulatedRequest, tag: CandidateTag, prompt: Sequence[int]) -> None:
        if (terms := TERMS.of(tag.terms.parts)) is not None:
            request.observe()
            self._scored[request.id] = Scored(request, terms.plan.scored_lengths, terms.plan.final_score)

    def end(self, request: EmulatedRequest) -> None:
        if (its := self._scored.pop(request.id, None)) is not None:
            self._keep_last(its)

    def take(self, request: EmulatedRequest) -> bytes:
        lengths = self._scored[request.id].lengths if request.id in self._scored else ()
        return detach(self._ring, request.id, lengths)

    def put(self, request: EmulatedRequest, data: bytes) -> None:
        if data:
            attach(self._ring, request.id, data)

    def take_last_states(self, request_ids: Sequence[str]) -> EndedStates | None:
        """The states as a scorer gives them. Here they are made on demand."""
        for request_id in request_ids:
            if request_id in self._scored:
                self._keep_last(self._scored[request_id])
        return None

    def see_rows(self, rows: Sequence[SaidRow], report: RunnerReport) -> RunnerReport:
        scored = [(place, row, self._scored[row.request.id]) for place, row in enumerate(rows) if self._has(row)]
        due = [
            (its.request, at)
            for _, row, its in scored
            for at in its.lengths
            if 0 <= its.request.num_before + its.request.newest - at < row.num_said
        ]
        scores = self._due(due) if due else ScoreReport()
        last = self._last(rows, [place for place, _, its in scored if its.is_final])
        return scores._replace(last=last).added_to(report)

    def _has(self, row: SaidRow) -> bool:
        return bool(row.num_said) and row.request.id in self._scored

    def _keep_last(self, its: Scored) -> None:
        """Keep the states of tokens that may have been the last one."""
        newest = its.request.newest
        if its.is_final and newest:
            numbers = range(max(1, newest - self.num_last_states + 1), newest + 1)
            keys = [StateKey(its.request.id, number, at_end=True) for number in numbers]
            self._ring.put(keys, torch.from_numpy(np.stack([hidden_state(its.request)] * len(keys))))

    def _last(self, rows: Sequence[SaidRow], final: Sequence[int]) -> LastLogits | None:
        """Logits of the tokens of these rows, of which each may be the last one."""
        head = self.heads.get(HeadKey(WHOLE))
        if not final or head is None:
            return None
        states = torch.from_numpy(np.stack([hidden_state(rows[row].request) for row in final]))
        logits = quality_head(states, torch.arange(len(final)), *head.weights).numpy()
        num_said = np.array([row.num_said for row in rows])
        is_said = np.arange(num_said.max())[:, None] < num_said  # [num_tokens, num_rows]
        tokens, places = np.nonzero(is_said[:, final])
        return LastLogits(np.array(final)[places], tokens, logits[places], np.full(len(tokens), head.version))

    def _due(self, due: Sequence[tuple[EmulatedRequest, int]]) -> ScoreReport:
        values = np.empty((len(due), DUE_COLUMNS), dtype=np.float32)
        versions = []
        states = torch.from_numpy(np.stack([hidden_state(request) for request, _ in due]))
        for row, (request, length) in enumerate(due):
            head = self.heads.get(HeadKey(length))
            logit = NO_NUMBER
            if head is not None:
                logit = quality_head(states, torch.tensor([row]), *head.weights).item()
            values[row] = logit, request.confidence, request.confidence, request.confidence
            versions.append(0 if head is None else head.version)
        ids, lengths = [request.id for request, _ in due], [length for _, length in due]
        self._ring.put([StateKey(*key) for key in zip(ids, lengths, strict=True)], states)
        return ScoreReport(ids, values, versions, lengths)


def hidden_state(request: EmulatedRequest) -> np.ndarray:
    """Made-up hidden state, float32 [HIDDEN_SIZE]."""
    noise = np.random.default_rng(request.fate.salt).standard_normal(HIDDEN_SIZE, dtype=np.float32)
    noise[0] = request.fate.score
    return noise


def emulated_heads(worker: Any) -> EmulatedHeads:
    """Face `emulated`: the heads of a worker."""
    ring = FeatureRing.of(worker.vllm_config, HIDDEN_SIZE, torch.float32)
    heads = EmulatedHeads(ring, 1 + (worker.vllm_config.num_speculative_tokens or NUM_IN_FLIGHT))
    worker.quality_heads = QualityHeads(
        heads,
        ring,
        hidden_size=HIDDEN_SIZE,
        model=worker.model_config.served_model_name or worker.model_config.model,
        device=worker.device,
    )
    return heads
