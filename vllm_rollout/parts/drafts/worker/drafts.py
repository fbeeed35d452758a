"""Drafts for candidates, from tokens of their siblings and from earlier answers of their prompt. This is the proposer
of vLLM's speculative decoding, method `custom_class`, model `vllm_rollout.Drafts`.

Invariant: a draft changes no probability, because vLLM verifies each one by rejection. A request that is no candidate
has no drafts. A candidate has drafts of its own prompt and namespace only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.names import learned_name
from vllm_rollout.adapter.options import each_worker_schedules
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.kernel.worker.ports import WorkerPart
from vllm_rollout.parts.drafts.options import DraftsOptions
from vllm_rollout.parts.drafts.rules import NUM_BINS, DraftingRule, draft_key
from vllm_rollout.parts.drafts.worker.drafts_file import DraftsFile
from vllm_rollout.parts.drafts.worker.memory import DraftMemory

logger = init_logger("vllm.vllm_rollout")

NO_BIN = -1
"""Bin of a place without a draft."""


class Running(NamedTuple):
    """A running candidate."""

    sequence: int
    """Number of its sequence in the memory."""
    most_tokens: int
    """Most tokens of prompt and output together."""


class Drafts(WorkerPart):
    """vLLM's custom proposer. `see_step` runs before each step, `propose` after it, once its tokens are known.

    An exception in either empties the memory. Running candidates continue without drafts, and no token changes.
    """

    def __init__(self, vllm_config: VllmConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        if each_worker_schedules(vllm_config):
            raise ValueError(
                "drafts are chosen by what steps take, and with distributed_executor_backend 'external_launcher' each "
                "worker would choose others: leave speculative_config out, or let vLLM launch the workers"
            )
        self.memory = DraftMemory(DraftsOptions.of(vllm_config).memory_bytes)
        if (reason := self.memory.implementation.reason) is not None:
            logger.warning("vllm_rollout: drafts are made in Python, which delays each step: %s", reason)
        self.rule = DraftingRule()
        self._clock = clock
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        self._vocabulary_size = vllm_config.model_config.get_vocab_size()
        self._batch: Callable[[], InputBatch] | None = None
        self._faults = Faults()
        self._file: DraftsFile | None = None
        self._running: dict[str, Running] = {}
        """Running candidates by request id."""
        self._verifying: dict[int, np.ndarray] = {}
        """Bins of the drafts that are being verified, by sequence."""
        self._step: tuple[int, int, float] | None = None
        """Rows, drafts and start time of the step before, if it only decoded. Otherwise None."""

    def attend(self, batch: Callable[[], InputBatch], faults: Faults) -> None:
        """`batch`: the runner's batch, whose requests are the rows of `propose`. `faults`: the runner's, which its
        reports count.
        """
        self._batch, self._faults = batch, faults

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model to load."""

    def keep_in(self, file: DraftsFile) -> None:
        """Load the memory's file, which is written at the end."""
        self._file = file
        file.load()

    def see_step(self, step: SchedulerOutput) -> None:
        """Note the new and finished requests of a step, and how long the step before took."""
        self._learn_cost(step)
        self._verifying = {  # vLLM may have scheduled fewer
            sequence: self._verifying[sequence][: len(tokens)]
            for id, tokens in step.scheduled_spec_decode_tokens.items()
            if id in self._running and (sequence := self._running[id].sequence) in self._verifying
        }
        gone = [self._running.pop(id).sequence for id in step.finished_req_ids if id in self._running]
        if gone:
            self.memory.end(gone)
        for request in step.scheduled_new_reqs:
            self._know(request, request.req_id)

    def arrived(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        self._know(request, request.request_id, output_token_ids)

    def new_weights(self) -> None:
        """Treat all earlier answers as older than the new weights."""
        self.memory.age()

    def stop(self) -> None:
        if self._file is not None:
            self._file.save()

    def begin_again(self) -> None:
        self.memory.clear()
        self._running, self._verifying, self._step = {}, {}, None

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Drafts for the next step, one list per row of the batch. Empty for a row without drafts."""
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec)
        except Exception as error:
            self._faults.caught("drafts", error)
            self.begin_again()
            return [[] for _ in sampled_token_ids]

    def _propose(self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: np.ndarray) -> list[list[int]]:
        request_ids = self._batch().req_ids
        rows = [row for row, id in enumerate(request_ids) if id in self._running]
        drafts: list[list[int]] = [[] for _ in request_ids]
        if not rows:
            return drafts
        candidates = [self._running[request_ids[row]] for row in rows]
        sequences = np.array([candidate.sequence for candidate in candidates], dtype=np.int64)
        sampled = [sampled_token_ids[row] for row in rows]
        self._learn_accepted(sequences, np.array(list(map(len, sampled))))
        longest = min(self.rule.longest(len(request_ids)), self._most)
        # A step makes one token more than the accepted drafts.
        room = np.array([candidate.most_tokens for candidate in candidates]) - num_tokens_no_spec[rows] - 1
        found = self.memory.step(
            sequences, _padded(sampled), np.where(list(map(len, sampled)), room.clip(0, longest), 0)
        )
        if not found.tokens.size:
            return drafts
        # Placeholders of an image in a prompt are tokens that the model does not have.
        is_known = (found.tokens >= 0) & (found.tokens < self._vocabulary_size)
        is_draft = np.logical_and.accumulate(is_known, axis=1)
        bins = np.where(is_draft, (found.probabilities * NUM_BINS).astype(np.int64).clip(max=NUM_BINS - 1), NO_BIN)
        choice = self.rule.choose(len(request_ids), np.bincount(bins[is_draft], minlength=NUM_BINS).tolist())
        lengths = (bins >= choice.least_bin).sum(axis=1)
        lengths = np.diff(np.minimum(np.cumsum(lengths), choice.most), prepend=0)
        for row, tokens, length in zip(rows, found.tokens, lengths.tolist(), strict=True):
            drafts[row] = tokens[:length].tolist()
        self._verifying = {
            sequence: bins[row, :length]
            for row, (sequence, length) in enumerate(zip(sequences.tolist(), lengths.tolist(), strict=True))
            if length
        }
        return drafts

    def _know(
        self, request: NewRequestData | EngineCoreRequest, request_id: str, generated: Sequence[int] = ()
    ) -> None:
        params, prompt = request.sampling_params, request.prompt_token_ids
        if params is None or prompt is None or request_id in self._running:
            return
        if (tag := CandidateTag.of(params.extra_args)) is not None:
            own = prompt[: len(prompt) - tag.num_resumed]
            key = draft_key(tag.namespace, own, learned_name(request.lora_request))
            sequence = self.memory.begin(key, [*prompt, *generated])
            self._running[request_id] = Running(sequence, min(self._max_model_len, len(prompt) + params.max_tokens))  # type: ignore[operator]

    def _learn_accepted(self, sequences: np.ndarray, num_sampled: np.ndarray) -> None:
        verifying, self._verifying = self._verifying, {}
        if not verifying:
            return
        drafted, accepted = np.zeros((2, NUM_BINS), dtype=np.int64)
        for sequence, num in zip(sequences.tolist(), num_sampled.tolist(), strict=True):
            bins = verifying.get(sequence)
            if bins is not None and num:
                np.add.at(drafted, bins, 1)
                np.add.at(accepted, bins[: num - 1], 1)
        self.rule.verified(drafted.tolist(), accepted.tolist())

    def _learn_cost(self, step: SchedulerOutput) -> None:
        now, before = self._clock(), self._step
        if before is not None and step.scheduled_cached_reqs.num_reqs:  # the engine has not waited in between
            self.rule.took(before[0], before[1], now - before[2])
        num_rows = len(step.num_scheduled_tokens)
        num_drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        only_decodes = num_rows and step.total_num_scheduled_tokens == num_rows + num_drafts
        self._step = (num_rows, num_drafts, now) if only_decodes else None


def _padded(tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [num_rows, width], with -1 where a row has fewer tokens."""
    padded = np.full((len(tokens), max(1, max(map(len, tokens)))), -1, dtype=np.int32)
    for row, its in enumerate(tokens):
        padded[row, : len(its)] = its
    return padded
