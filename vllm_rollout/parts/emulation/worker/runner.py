"""Requests on an emulated device: tokens of each row of a step, and observations of candidates.

Invariant: tokens of a row follow from the request and its position. So a request that is preempted and computed again
has the same tokens. A step's tokens are known when it is launched, and readable when its time is up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput

from vllm_rollout.kernel.rules.prompt_key import draft_key
from vllm_rollout.kernel.rules.types import WHOLE, HeadKey
from vllm_rollout.kernel.tracker.ops import quality_head
from vllm_rollout.kernel.tracker.step_values import DUE_COLUMNS
from vllm_rollout.kernel.tracker.tracker import PublishedHead
from vllm_rollout.kernel.tracker.verified import NO_POSITION
from vllm_rollout.kernel.weights import Changes
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, CandidateTag, LastLogits, RunnerReport, nothing_seen
from vllm_rollout.parts.drafts.worker.emulated import EmulatedDrafts, SaidRow
from vllm_rollout.parts.emulation.device import StepWork
from vllm_rollout.parts.emulation.fate import Fate, Fates
from vllm_rollout.parts.emulation.tokens import Vocabulary
from vllm_rollout.parts.emulation.worker.request import NO_NUMBER, EmulatedRequest
from vllm_rollout.parts.moving.wire import MovedCandidate, WorkerState
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey
from vllm_rollout.parts.pruning.worker.features import attach, detach
from vllm_rollout.parts.pruning.worker.last_states import EndedStates

CONFIDENCE_DEVIATION_NATS = 1.0
NUM_IN_FLIGHT = 1
"""Tokens of a candidate that may be in flight when it has ended."""


class LaunchedStep(NamedTuple):
    """A launched step that is not over."""

    output: ModelRunnerOutput
    work: StepWork
    rows: Sequence[SaidRow]
    num_sampled: int
    goes_on: bool
    """True if some of its requests were in an earlier step: the device was busy before."""


class EmulatedRunner:
    """The requests of one engine. Keeps the same data as vLLM's model runners, without a batch."""

    def __init__(
        self,
        fates: Fates,
        vocab_size: int,
        ring: FeatureRing,
        marker: Sequence[int] = (),
        drafts: EmulatedDrafts | None = None,
    ) -> None:
        """`marker`: tokens with which a turn asks for a tool."""
        self.drafts = drafts
        self.num_last_states = 1 + (NUM_IN_FLIGHT if drafts is None else drafts.most)
        """Number of a candidate's newest tokens that may be its last one when it ends."""
        self.heads: dict[HeadKey, PublishedHead] = {}
        """Published quality heads. There are no adapters (`parts/emulation/api.py`)."""
        self._fates = fates
        self._vocab_size = vocab_size
        self._marker = marker
        self._ring = ring
        self._requests: dict[str, EmulatedRequest] = {}
        self._vocabularies: dict[frozenset[int], Vocabulary] = {}
        self._logprobs: dict[str, Sequence[int] | int] = {}
        """Requested alternatives by request id: token ids, or their number."""
        self._prompt_logprobs: dict[str, tuple[Sequence[int], int]] = {}
        """Prompts whose log probabilities are wanted, with the number of alternatives, by request id, until they are
        sent.
        """

    def detach(self, request_ids: list[str]) -> dict[str, WorkerState]:
        """Data of candidates that leave, by request id."""
        known = {request_id: self._requests[request_id] for request_id in request_ids if request_id in self._requests}
        features = detach(self._ring, {request_id: its.scored_at for request_id, its in known.items()})
        return {
            request_id: WorkerState(
                features=features.get(request_id, {}), fate=known[request_id].fate if request_id in known else None
            )
            for request_id in request_ids
        }

    def attach(self, candidates: Sequence[MovedCandidate]) -> None:
        """Add candidates that have run elsewhere."""
        for candidate in candidates:
            request, state = candidate.request, candidate.state
            self._admit(request.request_id, request.prompt_token_ids, request.sampling_params, state.fate)
            attach(self._ring, request.request_id, state.features)

    def take_last_states(self, request_ids: Sequence[str]) -> EndedStates | None:
        """As of a tracker. Here the states are made on demand."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._keep_last(request_id, self._requests[request_id])
        return None

    def step(self, scheduled: SchedulerOutput) -> LaunchedStep | None:
        """Launch a step. None if nothing is scheduled."""
        for request_id in scheduled.finished_req_ids:
            ended = self._requests.pop(request_id, None)
            if ended is not None:
                self._keep_last(request_id, ended)
            self._logprobs.pop(request_id, None)
            self._prompt_logprobs.pop(request_id, None)
            if self.drafts is not None:
                self.drafts.end(request_id)
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
        drafts = scheduled.scheduled_spec_decode_tokens
        ids: list[str] = []
        rows: list[SaidRow] = []
        tokens: list[list[int]] = []
        confidences: list[float] = []
        due: list[tuple[str, int]] = []
        context_tokens = num_drafts = 0
        for request_id, num_computed, num_output in positions:
            request = requests[request_id]
            end = num_computed + num_scheduled[request_id]
            context_tokens += end
            ids.append(request_id)
            its = drafts.get(request_id, ())
            num_drafts += len(its)
            number = end - len(its) - request.num_prompt + 1
            if number <= num_output:  # a prefill that is not over
                said: list[int] = []
                confidences.append(NO_NUMBER)
            else:
                said = request.says(number + request.num_before, its)
                request.newest = number + len(said) - 1
                confidences.append(request.confidence)
                first = number + request.num_before
                due += [(request_id, at) for at in request.scored_at if first <= at < first + len(said)]
            tokens.append(said)
            rows.append(SaidRow(request_id, request, len(said), len(its)))
        output = ModelRunnerOutput(ids, {request_id: row for row, request_id in enumerate(ids)}, tokens)
        if self._logprobs:
            output.logprobs = made_up_logprobs(tokens, [self._logprobs.get(id, 0) for id in ids], self._vocab_size)
        for request_id, said in zip(ids, tokens, strict=True) if self._prompt_logprobs else ():
            if said and (asked := self._prompt_logprobs.pop(request_id, None)) is not None:
                output.prompt_logprobs_dict[request_id] = prompt_logprobs(*asked, self._vocab_size)
        means = np.array(confidences, dtype=np.float32)
        if not np.isnan(means).all():
            report = self._report(means, rows, due, bool(drafts))
            setattr(output, REPORT_ATTRIBUTE, report._replace(weights=Changes.num))
        elif Changes.num:
            setattr(output, REPORT_ATTRIBUTE, nothing_seen(len(ids), weights=Changes.num))
        num_prefilled = scheduled.total_num_scheduled_tokens - len(ids) - num_drafts
        work = StepWork(len(ids), context_tokens, num_prefilled, num_drafts)
        return LaunchedStep(output, work, rows, sum(map(len, tokens)), bool(cached.req_ids))

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
        if params.logprobs is not None or params.logprob_token_ids:
            self._logprobs[request_id] = params.logprob_token_ids or max(0, params.logprobs)
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[request_id] = prompt_token_ids, max(0, params.prompt_logprobs)
        if self.drafts is not None and (tag := CandidateTag.of(params.extra_args)) is not None:
            own = prompt_token_ids[: request.num_prompt - request.num_before]
            self.drafts.begin(request_id, draft_key(tag.namespace, own, ""), tag.group_id)
        return request

    def _keep_last(self, request_id: str, ended: EmulatedRequest) -> None:
        """Keep the states of tokens that may have been the last one."""
        if ended.is_final and ended.newest:
            numbers = range(max(1, ended.newest - self.num_last_states + 1), ended.newest + 1)
            keys = [StateKey(request_id, number, at_end=True) for number in numbers]
            self._ring.put(keys, torch.from_numpy(np.stack([ended.hidden_state()] * len(keys))))

    def _report(
        self, means: np.ndarray, rows: Sequence[SaidRow], due: Sequence[tuple[str, int]], has_drafts: bool
    ) -> RunnerReport:
        num_said = np.array([row.num_said for row in rows])
        is_said = np.arange(num_said.max())[:, None] < num_said  # [num_tokens, num_rows]
        mean = np.where(is_said, means, np.float32(NO_NUMBER))
        deviation = np.where(np.isnan(mean), mean, np.float32(CONFIDENCE_DEVIATION_NATS))
        report = RunnerReport(np.stack([mean, deviation]), last=self._last(rows, is_said))
        if has_drafts:
            before = [row.request.newest - row.num_said if row.num_said else NO_POSITION for row in rows]
            report = report._replace(first_positions=np.array(before))
        return report if not due else self._with_due(report, due)

    def _last(self, rows: Sequence[SaidRow], is_said: np.ndarray) -> LastLogits | None:
        head = self.heads.get(HeadKey(WHOLE))
        final = [row for row, its in enumerate(rows) if its.num_said and self._requests[its.request_id].is_final]
        if not final or head is None:
            return None
        states = torch.from_numpy(np.stack([self._requests[rows[row].request_id].hidden_state() for row in final]))
        logits = quality_head(states, torch.arange(len(final)), *head.weights).numpy()
        tokens, places = np.nonzero(is_said[:, final])
        return LastLogits.of(is_said.shape, np.array(final)[places], logits[places], head.version, tokens)

    def _with_due(self, report: RunnerReport, due: Sequence[tuple[str, int]]) -> RunnerReport:
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
        return report._replace(due=ids, due_values=values, head_versions=versions, due_at=lengths)


def made_up_logprobs(
    tokens: Sequence[Sequence[int]], asked: Sequence[Sequence[int] | int], vocab_size: int
) -> LogprobsLists:
    """Log probabilities for each token of a row, and for one token of a row without tokens.

    Each line has the token and less likely alternatives: those that the request asks for, or as many as any request
    asks for.
    """
    lines = [row or [0] for row in tokens]
    first = np.array([token for line in lines for token in line], dtype=np.int32)
    width = 1 + max(each if isinstance(each, int) else len(each) for each in asked)
    step = np.arange(width, dtype=np.int32)
    of_token = -0.1 - (first % 89) / 100
    values = (of_token[:, None] - step * 0.5).astype(np.float32)
    ids = (first[:, None] + step) % vocab_size
    starts = [0, *accumulate(map(len, lines))]
    for row, each in enumerate(asked):
        if not isinstance(each, int):
            ids[starts[row] : starts[row + 1], 1 : 1 + len(each)] = each
    return LogprobsLists(ids, values, np.ones_like(first), starts if len(first) > len(lines) else None)


def prompt_logprobs(prompt: Sequence[int], num_others: int, vocab_size: int) -> LogprobsTensors:
    """Log probabilities for each token of a prompt except the first."""
    lists = made_up_logprobs([[token] for token in prompt[1:]], [num_others] * len(prompt), vocab_size)
    return LogprobsTensors(*map(torch.from_numpy, lists[:3]))
