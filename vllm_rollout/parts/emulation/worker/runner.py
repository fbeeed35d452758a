"""Requests on an emulated device: tokens of each row of a step, and observations of candidates.

Invariant: tokens of a row follow from the request and its position. So a request that is preempted and computed again
has the same tokens. A step's tokens are known when it is launched, and readable when its time is up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput

from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.wire import NO_POSITION, REPORT_ATTRIBUTE, CandidateTag, RunnerReport, nothing_seen
from vllm_rollout.parts.emulation.device import StepWork
from vllm_rollout.parts.emulation.fate import Fate, Fates
from vllm_rollout.parts.emulation.tokens import Vocabulary
from vllm_rollout.parts.emulation.worker.ports import EmulatedPart, SaidRow
from vllm_rollout.parts.emulation.worker.request import NO_NUMBER, EmulatedRequest

CONFIDENCE_DEVIATION_NATS = 1.0
OWN = "emulation"
"""Name of the runner's own data beside those of parts."""


class LaunchedStep(NamedTuple):
    """A launched step that is not over."""

    output: ModelRunnerOutput
    work: StepWork
    rows: Sequence[SaidRow]
    num_sampled: int
    goes_on: bool
    """True if some of its requests were in an earlier step: the device was busy before."""


MAX_VOCABULARIES = 64
"""Vocabularies that are kept, one for each set of stop tokens."""


class EmulatedRunner:
    """The requests of one engine. Keeps the same data as vLLM's model runners, without a batch."""

    def __init__(self, fates: Fates, vocab_size: int, marker: Sequence[int] = ()) -> None:
        """`marker`: tokens with which a turn asks for a tool."""
        self.parts: Sequence[tuple[str, EmulatedPart]] = ()
        """Parts with their names. There are no adapters (`parts/emulation/api.py`)."""
        self._fates = fates
        self._vocab_size = vocab_size
        self._marker = marker
        self._requests: dict[str, EmulatedRequest] = {}
        self._vocabulary = lru_cache(MAX_VOCABULARIES)(partial(Vocabulary, vocab_size))
        """The vocabulary beside these stop tokens."""
        self._logprobs: dict[str, Sequence[int] | int] = {}
        """Requested alternatives by request id: token ids, or their number."""
        self._prompt_logprobs: dict[str, tuple[Sequence[int], int]] = {}
        """Prompts whose log probabilities are wanted, with the number of alternatives, by request id, until they are
        sent.
        """

    def take(self, request_id: str) -> dict[str, bytes]:
        """Data that leave with a candidate, by part."""
        if (request := self._requests.get(request_id)) is None:
            return {}
        return {OWN: msgspec.msgpack.encode(request.fate)} | {name: part.take(request) for name, part in self.parts}

    def put(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None,
        params: SamplingParams | None,
        data: Mapping[str, bytes],
    ) -> None:
        """Add a candidate that has run elsewhere. `data`: as of `take`."""
        fate = msgspec.msgpack.decode(data[OWN], type=Fate) if OWN in data else None
        request = self._admit(request_id, prompt_token_ids, params, fate)
        for name, part in self.parts:
            part.put(request, data.get(name, b""))

    def step(self, scheduled: SchedulerOutput) -> LaunchedStep | None:
        """Launch a step. None if nothing is scheduled."""
        for request_id in scheduled.finished_req_ids:
            ended = self._requests.pop(request_id, None)
            if ended is not None:
                for _, part in self.parts:
                    part.end(ended)
            self._logprobs.pop(request_id, None)
            self._prompt_logprobs.pop(request_id, None)
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
            tokens.append(said)
            rows.append(SaidRow(request, len(said), len(its)))
        output = ModelRunnerOutput(ids, {request_id: row for row, request_id in enumerate(ids)}, tokens)
        if self._logprobs:
            output.logprobs = made_up_logprobs(tokens, [self._logprobs.get(id, 0) for id in ids], self._vocab_size)
        for request_id, said in zip(ids, tokens, strict=True) if self._prompt_logprobs else ():
            if said and (asked := self._prompt_logprobs.pop(request_id, None)) is not None:
                output.prompt_logprobs_dict[request_id] = prompt_logprobs(*asked, self._vocab_size)
        means = np.array(confidences, dtype=np.float32)
        if not np.isnan(means).all():
            report = self._report(means, rows, bool(drafts))
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
        its_end = frozenset({params.eos_token_id})
        try:
            vocabulary = self._vocabulary(its_end | frozenset(params.all_stop_token_ids))
        except ValueError:  # the client's stop tokens leave nothing to say
            vocabulary = self._vocabulary(its_end)
        tag = CandidateTag.of(params.extra_args)
        marker = self._marker
        request = EmulatedRequest(request_id, prompt_token_ids, params, self._fates, vocabulary, marker, tag, fate)
        self._requests[request_id] = request
        if params.logprobs is not None or params.logprob_token_ids:
            self._logprobs[request_id] = params.logprob_token_ids or max(0, params.logprobs)  # type: ignore[assignment, type-var]
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[request_id] = prompt_token_ids, max(0, params.prompt_logprobs)
        if tag is not None:
            prompt = prompt_token_ids[: request.num_prompt - request.num_before]
            for _, part in self.parts:
                part.begin(request, tag, prompt)
        return request

    def _report(self, means: np.ndarray, rows: Sequence[SaidRow], has_drafts: bool) -> RunnerReport:
        num_said = np.array([row.num_said for row in rows])
        is_said = np.arange(num_said.max())[:, None] < num_said  # [num_tokens, num_rows]
        mean = np.where(is_said, means, np.float32(NO_NUMBER))
        deviation = np.where(np.isnan(mean), mean, np.float32(CONFIDENCE_DEVIATION_NATS))
        report = RunnerReport(np.stack([mean, deviation]))
        if has_drafts:
            before = [row.request.newest - row.num_said if row.num_said else NO_POSITION for row in rows]
            report = report._replace(first_positions=np.array(before))
        for _, part in self.parts:
            report = part.see_rows(rows, report)
        return report


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
    return LogprobsTensors(*map(torch.from_numpy, lists[:3]))  # type: ignore[arg-type]
