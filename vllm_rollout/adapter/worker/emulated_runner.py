"""Requests on an emulated device: what each row of a step says, and what it shows of candidates.

Invariant: what a row says follows from the request and its position, so a request that was preempted and is computed
again says the same. A step's tokens are known when it is launched; they can be read when its time is up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from vllm_rollout.adapter.parcel import MovedCandidate, WorkerState
from vllm_rollout.adapter.wire import REPORT_ATTRIBUTE, CandidateTag, LastLogits, RunnerReport
from vllm_rollout.adapter.worker.features import attach, detach
from vllm_rollout.emulation.device import StepWork
from vllm_rollout.emulation.fate import ENDLESS, Fate, Fates
from vllm_rollout.emulation.tokens import PERIOD, Vocabulary
from vllm_rollout.group.types import WHOLE, HeadKey
from vllm_rollout.tracker.feature_ring import FeatureRing, StateKey
from vllm_rollout.tracker.last_states import EndedStates
from vllm_rollout.tracker.ops import quality_head
from vllm_rollout.tracker.step_values import DUE_COLUMNS
from vllm_rollout.tracker.tracker import PublishedHead

HIDDEN_SIZE = 16
"""Numbers of a made-up hidden state: the score, and noise."""
CONFIDENCE_NATS = 12.0
"""Trace confidence of a candidate whose score is 0."""
CONFIDENCE_DEVIATION_NATS = 1.0
NO_NUMBER = math.nan
NUM_IN_FLIGHT = 1
"""Tokens of a candidate that may be on their way when it has ended."""


class EmulatedRequest:
    """A request on the device."""

    __slots__ = (
        "confidence",
        "cycle",
        "fate",
        "is_final",
        "last_token",
        "length",
        "newest",
        "num_before",
        "num_prompt",
        "observed",
        "salt",
        "scored_at",
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
        fate: Fate | None,
    ) -> None:
        extra_args = params.extra_args or {}
        tag = CandidateTag.of(extra_args)
        key = request_id if params.seed is None else params.seed
        self.num_before = 0 if tag is None else tag.num_resumed
        if fate is None:
            prompt = prompt_token_ids[: len(prompt_token_ids) - self.num_before]
            fate = fates.of(prompt, key, None if tag is None else tag.index, extra_args)
        self.fate = fate
        self.salt, self.cycle = self.fate.salt, vocabulary.cycle
        self.tail = marker if self.fate.asks else (vocabulary.verdict(self.salt, self.fate.succeeds),)
        self.num_prompt = len(prompt_token_ids)
        stops = [] if params.eos_token_id is None else [params.eos_token_id]
        stops += params.stop_token_ids or []
        self.last_token = stops[0] if stops else 0
        self.length = self.fate.length if stops else ENDLESS
        if self.fate.asks:
            self.length = max(self.length, 1 + len(marker))
        self.tail_at = self.length - len(self.tail)
        plan = None if tag is None else tag.terms.pruning
        self.observed = tag is not None and (tag.observed or plan is not None)
        self.confidence = CONFIDENCE_NATS + self.fate.score if self.observed else NO_NUMBER
        self.scored_at = () if plan is None else plan.scored_lengths
        self.is_final = plan is not None and plan.final_score
        self.newest = 0
        """Number of its newest output token, those of earlier rounds left out."""

    def end(self, number: int) -> int:
        """Output token `number`, the last one or one of those before it."""
        return self.last_token if number >= self.length else self.tail[number - self.tail_at]

    def hidden_state(self) -> np.ndarray:
        """float32 [HIDDEN_SIZE]."""
        noise = np.random.default_rng(self.fate.salt).standard_normal(HIDDEN_SIZE, dtype=np.float32)
        noise[0] = self.fate.score
        return noise


class LaunchedStep(NamedTuple):
    """A step on its way."""

    output: ModelRunnerOutput
    work: StepWork
    num_sampled: int
    goes_on: bool
    """Some of its requests were in an earlier step: the device had something to do before."""


class EmulatedRunner:
    """The requests of one engine. Keeps what vLLM's model runners keep, without a batch."""

    num_last_states = 1 + NUM_IN_FLIGHT

    def __init__(self, fates: Fates, vocab_size: int, ring: FeatureRing, marker: Sequence[int] = ()) -> None:
        """marker: the tokens with which a turn asks for a tool."""
        self.heads: dict[HeadKey, PublishedHead] = {}
        """Quality heads publish here. There are no adapters (`adapter/api/client/emulate.py`)."""
        self._fates = fates
        self._vocab_size = vocab_size
        self._marker = marker
        self._ring = ring
        self._requests: dict[str, EmulatedRequest] = {}
        self._vocabularies: dict[frozenset[int], Vocabulary] = {}
        self._logprobs: dict[str, int] = {}
        """Alternatives that are asked for, by request."""

    def detach(self, request_ids: list[str]) -> dict[str, WorkerState]:
        """What is known here of candidates that leave."""
        known = {request_id: self._requests[request_id] for request_id in request_ids if request_id in self._requests}
        features = detach(self._ring, {request_id: its.scored_at for request_id, its in known.items()})
        return {
            request_id: WorkerState(
                features=features.get(request_id, {}), fate=known[request_id].fate if request_id in known else None
            )
            for request_id in request_ids
        }

    def attach(self, candidates: Sequence[MovedCandidate]) -> None:
        """Candidates come that have run elsewhere."""
        for candidate in candidates:
            request, state = candidate.request, candidate.state
            self._admit(request.request_id, request.prompt_token_ids, request.sampling_params, state.fate)
            attach(self._ring, request.request_id, state.features)

    def take_last_states(self, request_ids: Sequence[str]) -> EndedStates | None:
        """As of a tracker. Here a state is made when somebody asks for it."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._keep_last(request_id, self._requests[request_id])
        return None

    def step(self, scheduled: SchedulerOutput) -> LaunchedStep | None:
        """What a step says; None when nothing is scheduled."""
        for request_id in scheduled.finished_req_ids:
            ended = self._requests.pop(request_id, None)
            if ended is not None:
                self._keep_last(request_id, ended)
            self._logprobs.pop(request_id, None)
        if not scheduled.total_num_scheduled_tokens:
            return None
        cached = scheduled.scheduled_cached_reqs
        positions = list(zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is None:
                request = self._admit(new.req_id, new.prompt_token_ids, new.sampling_params)
            # Model runner V2 gets a preempted request as a new one, with its output behind the prompt.
            num_output = 0 if new.prefill_token_ids is None else len(new.prefill_token_ids) - request.num_prompt
            positions.append((new.req_id, new.num_computed_tokens, num_output))
        num_scheduled, requests = scheduled.num_scheduled_tokens, self._requests
        ids: list[str] = []
        tokens: list[list[int]] = []
        confidences: list[float] = []
        due: list[tuple[str, int]] = []
        final: list[tuple[int, EmulatedRequest]] = []
        context_tokens = num_sampled = 0
        for request_id, num_computed, num_output in positions:
            request = requests[request_id]
            end = num_computed + num_scheduled[request_id]
            context_tokens += end
            ids.append(request_id)
            number = end - request.num_prompt + 1
            if number <= num_output:  # a prefill that is not over
                tokens.append([])
                confidences.append(NO_NUMBER)
                continue
            num_sampled += 1
            request.newest = number
            number += request.num_before
            if number < request.tail_at:
                tokens.append([request.cycle[(request.salt + number) % PERIOD]])
            else:
                tokens.append([request.end(number)])
            confidences.append(request.confidence)
            if number in request.scored_at:
                due.append((request_id, number))
            if request.is_final:
                final.append((len(ids) - 1, request))
        output = ModelRunnerOutput(ids, {request_id: row for row, request_id in enumerate(ids)}, tokens)
        if self._logprobs:
            output.logprobs = made_up_logprobs(tokens, 1 + max(self._logprobs.values()), self._vocab_size)
        means = np.array(confidences, dtype=np.float32)
        if not np.isnan(means).all():
            setattr(output, REPORT_ATTRIBUTE, self._report(means, due)._replace(last=self._last(len(ids), final)))
        work = StepWork(len(ids), context_tokens, scheduled.total_num_scheduled_tokens - len(ids))
        return LaunchedStep(output, work, num_sampled, bool(cached.req_ids))

    def _admit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None,
        params: SamplingParams | None,
        fate: Fate | None = None,
    ) -> EmulatedRequest:
        assert params is not None, "an emulated device generates"
        assert prompt_token_ids is not None, "requests without prompt tokens are refused"
        stops = frozenset(params.all_stop_token_ids) | {params.eos_token_id}
        if (vocabulary := self._vocabularies.get(stops)) is None:
            vocabulary = self._vocabularies[stops] = Vocabulary(self._vocab_size, stops)
        request = EmulatedRequest(request_id, prompt_token_ids, params, self._fates, vocabulary, self._marker, fate)
        self._requests[request_id] = request
        if params.logprobs is not None:
            self._logprobs[request_id] = max(0, params.logprobs)
        return request

    def _keep_last(self, request_id: str, ended: EmulatedRequest) -> None:
        """The states of what may have been its last token."""
        if ended.is_final and ended.newest:
            numbers = range(max(1, ended.newest - self.num_last_states + 1), ended.newest + 1)
            keys = [StateKey(request_id, number, at_end=True) for number in numbers]
            self._ring.put(keys, torch.from_numpy(np.stack([ended.hidden_state()] * len(keys))))

    def _last(self, num_rows: int, final: Sequence[tuple[int, EmulatedRequest]]) -> LastLogits | None:
        head = self.heads.get(HeadKey(WHOLE))
        if not final or head is None:
            return None
        states = torch.from_numpy(np.stack([request.hidden_state() for _, request in final]))
        logits = quality_head(states, torch.arange(len(final)), *head.weights).numpy()
        return LastLogits.of((1, num_rows), [row for row, _ in final], logits, head.version)

    def _report(self, means: np.ndarray, due: Sequence[tuple[str, int]]) -> RunnerReport:
        confidence = np.stack([means, np.where(np.isnan(means), means, CONFIDENCE_DEVIATION_NATS)])[:, None]
        if not due:
            return RunnerReport(confidence)
        values = np.empty((len(due), DUE_COLUMNS), dtype=np.float32)
        versions = []
        states = torch.from_numpy(np.stack([self._requests[request_id].hidden_state() for request_id, _ in due]))
        for row, (request_id, length) in enumerate(due):
            request = self._requests[request_id]
            head = self.heads.get(HeadKey(length))
            logit = NO_NUMBER
            if head is not None:
                logit = quality_head(states, torch.tensor([row]), *head.weights).item()
            values[row] = logit, request.confidence, request.confidence, request.confidence
            versions.append(0 if head is None else head.version)
        self._ring.put([StateKey(*key) for key in due], states)
        ids, lengths = zip(*due, strict=True)
        return RunnerReport(confidence, ids, values, versions, lengths)


def made_up_logprobs(tokens: Sequence[Sequence[int]], width: int, vocab_size: int) -> LogprobsLists:
    """For each row its token and `width - 1` others, less likely one after the other."""
    first = np.array([row[0] if row else 0 for row in tokens], dtype=np.int32)
    step = np.arange(width, dtype=np.int32)
    of_token = -0.1 - (first % 89) / 100
    values = of_token[:, None] - step * 0.5
    return LogprobsLists((first[:, None] + step) % vocab_size, values.astype(np.float32), np.ones_like(first))
