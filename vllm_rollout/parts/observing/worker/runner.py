"""vLLM's model runners, changed to show logits and hidden states to the tracker. One thin mixin per runner generation.

Invariant: observed values are not changed, and no step waits for them: they are copied with the step's own output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, RunnerReport, nothing_seen
from vllm_rollout.kernel.worker.ports import WorkerPart, WorkerParts
from vllm_rollout.kernel.worker.runner import Report, add_mixin, unless_empty
from vllm_rollout.parts.observing.tracker.rows import RowsPart
from vllm_rollout.parts.observing.tracker.step_values import StepValues
from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker
from vllm_rollout.parts.observing.tracker.verified import VerifiedDrafts
from vllm_rollout.parts.observing.tracker.warm_up import warm_up
from vllm_rollout.parts.observing.worker.observing import Observing

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class RowsWorkerPart(WorkerPart):
    """A part beside the model runner that sees logits and hidden states of candidates, if the worker observes any."""

    rows: RowsPart


class HostCopy:
    """Copy of a step's values to the host, on the current stream."""

    def __init__(self, step: StepValues) -> None:
        self._step = self._copy = step  # the device tensors must outlive their copies
        self._ready: torch.cuda.Event | None = None
        if not step.on_host:
            self._copy = step.to_host()
            self._ready = torch.cuda.Event(blocking=True)
            self._ready.record()

    def get(self) -> StepValues:
        """The values on the host. Waits for the copy."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._copy


class StepReport:
    """Observations of a step and the version of its weights, for the scheduler."""

    def __init__(
        self,
        step: StepValues | None,
        observing: Observing,
        weights: int = 0,
        copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Begin the copy to the host, on this stream or the current one.

        `step`: None if no request was observed. `weights`: as of a RunnerReport.
        """
        self._step = step
        self._weights = weights
        self._failed = observing.take_failed()
        self._observing = observing
        self._copy: HostCopy | None = None
        self._error: Exception | None = None
        try:
            if step is not None:
                self._copy = HostCopy(step) if copy_stream is None else _copied_on(copy_stream, step)
        except Exception as error:
            self._error = error

    def attach(self, output: ModelRunnerOutput) -> None:
        try:
            if self._error is not None:
                raise self._error
            if self._copy is None:
                report = nothing_seen(len(output.req_ids))
            else:
                report = _report(output, self._copy.get(), self._observing)
        except Exception as error:
            reason = self._observing.faults.caught("reporting", error)
            seen = [output.req_ids[row] for row in self._step.rows]
            report = nothing_seen(len(output.req_ids), failed=dict.fromkeys(seen, reason))
        report = report._replace(
            failed={**self._failed, **report.failed},
            num_internal_errors=self._observing.faults.num,
            weights=self._weights,
        )
        setattr(output, REPORT_ATTRIBUTE, report)


def _copied_on(stream: torch.cuda.Stream, step: StepValues) -> HostCopy:
    """Copy of a step that the current stream computes, on another stream."""
    main_stream = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(main_stream)
        return HostCopy(step)


def _report(output: ModelRunnerOutput, step: StepValues, observing: Observing) -> RunnerReport:
    """Report of values that are on the host."""
    shape = (int(step.tokens[-1]) + 1, step.num_rows)
    moments = np.full((2, *shape), np.nan, dtype=np.float32)
    values = step.moments.numpy().T
    moments[:, step.tokens, step.rows] = values
    report = RunnerReport(moments, first_positions=step.first_positions)
    if (not_finite := np.isnan(values[0])).any():
        report = report._replace(failed=observing.not_finite([output.req_ids[row] for row in step.rows[not_finite]]))
    for of_part in step.of_parts:
        report = of_part.add_to(report)
    return report


class ObservingMixin:
    """Common part of both runner generations. Overrides: execute_model, _dummy_sampler_run, and join and step_report of
    our `RunnerMixin`.

    An exception of ours here would end the engine: `observing` catches it.
    """

    weights: int
    observes: bool
    """False if nothing is observed: this rank's outputs are not read, or its rows are not whole requests."""
    candidate_tracker: CandidateTracker
    observing: Observing

    def join(self, parts: WorkerParts) -> None:
        super().join(parts)
        self.candidate_tracker.parts = [part.rows for part in parts.parts if isinstance(part, RowsWorkerPart)]

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        tracker = self.candidate_tracker
        with self.observing:
            if self.observes:
                for request_id in scheduler_output.finished_req_ids:
                    tracker.discard(request_id)
                for request in scheduler_output.scheduled_new_reqs:
                    self.observing.begin(request.req_id, request)
            tracker.start_step()
        return super().execute_model(scheduler_output, *args, **kwargs)

    def step_report(self, *, is_async: bool) -> Report | None:
        step = self.candidate_tracker.step
        if step is None and not self.observing.has_failed:
            return super().step_report(is_async=is_async)
        is_on_device = step is not None and not step.on_host
        stream = self._copy_stream() if is_async and is_on_device else None
        return StepReport(step, self.observing, self.weights, stream)

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # vLLM warms its sampler up here, before it begins to watch for kernels that are compiled in a step.
        result = super()._dummy_sampler_run(hidden_states, *args, **kwargs)
        # On every rank, since its parts are gathered, and of all rows: vLLM's LoRA kernels write into as many as the
        # dummy step had.
        logits = self.model.compute_logits(hidden_states)
        if logits is not None and self.observes and self.observing.refusal is None:
            try:
                warm_up(logits, hidden_states, self.candidate_tracker.parts)
            except Exception as error:
                self.observing.stop(error)
        return result


class ObservingV1Mixin(ObservingMixin):
    """For `RunnerV1Mixin`. Overrides: those of ObservingMixin, sample_tokens, _sample."""

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        state = self.execute_model_state
        if state is not None and self.observes:
            with self.observing:
                self.candidate_tracker.see_hidden_states(state.sample_hidden_states)
        return super().sample_tokens(*args, **kwargs)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        spec_decode_metadata = unless_empty(spec_decode_metadata)
        num_rows = self.input_batch.num_reqs
        num_unverified: int | np.ndarray = 0
        if spec_decode_metadata is not None and self._cannot_verify():
            logits, num_unverified = self._without_drafts(logits, spec_decode_metadata)
            spec_decode_metadata = None
        if logits is None or not len(self.candidate_tracker):
            return super()._sample(logits, spec_decode_metadata, *args, **kwargs)
        request_ids = self.input_batch.req_ids
        unfinished = self.discard_request_mask.np[:num_rows]
        num_computed = self.optimistic_seq_lens_cpu[:num_rows].numpy() - num_unverified  # exact in the synchronous loop
        if spec_decode_metadata is None:  # before sampling: float32 logits are scaled by the temperature in place
            with self.observing:
                self.candidate_tracker.observe(request_ids, logits, num_computed, unfinished)
            return super()._sample(logits, spec_decode_metadata, *args, **kwargs)
        # After sampling, when the number of tokens is known. Verification works on copies of the logits.
        output = super()._sample(logits, spec_decode_metadata, *args, **kwargs)
        with self.observing:
            num_drafted = np.array(spec_decode_metadata.num_draft_tokens, dtype=np.int64)
            num_sampled = (output.sampled_token_ids != PLACEHOLDER_TOKEN_ID).sum(dim=1).cpu().numpy()
            verified = VerifiedDrafts(num_drafted, num_sampled)
            self.candidate_tracker.observe(request_ids, logits, num_computed - num_drafted, unfinished, verified)
        return output

    def _copy_stream(self) -> torch.cuda.Stream:
        return self.async_output_copy_stream

    def _cannot_verify(self) -> bool:
        """True if this step samples as without drafts. A part whose drafter drafts for every request overrides it."""
        return False

    def _without_drafts(self, logits: torch.Tensor | None, drafted: Any) -> tuple[torch.Tensor | None, np.ndarray]:
        """Logits of the first token of each request, as without drafts, and the number of drafts of each."""
        num_drafted = np.array(drafted.num_draft_tokens, dtype=np.int64)
        if logits is None:
            return None, num_drafted
        first = drafted.bonus_logits_indices - torch.from_numpy(num_drafted).to(drafted.bonus_logits_indices)
        self.candidate_tracker.pick_hidden_states(first)
        return logits.index_select(0, first), num_drafted


class ObservingV2Mixin(ObservingMixin):
    """For `RunnerV2Mixin`. Overrides: those of ObservingMixin, load_model, sample.

    V2 computes its logits inside `sample()` and passes them to `self.sampler`. Computing them again would cost the
    output projection. So the sampler is observed.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_model(*args, **kwargs)
        if self.sampler is not None:  # only the last pipeline rank samples
            observe_sampler(self.sampler, self.candidate_tracker, self.observing)
        return result

    def sample(self, hidden_states: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
        if self.observes:
            with self.observing:
                self.candidate_tracker.see_hidden_states(hidden_states, input_batch.logits_indices)
        return super().sample(hidden_states, input_batch, *args, **kwargs)

    def _copy_stream(self) -> torch.cuda.Stream:
        return self.output_copy_stream


class SamplerMixin:
    """Passes the input of V2's sampler to the tracker. Overrides: __call__."""

    candidate_tracker: CandidateTracker
    observing: Observing

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
        with self.observing:
            if len(self.candidate_tracker) and logits.shape[0] == input_batch.num_reqs:
                reached = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
                unfinished = reached < input_batch.prefill_len_np
                self.candidate_tracker.observe(input_batch.req_ids, logits, reached, unfinished)
        return super().__call__(logits, input_batch, *args, **kwargs)


def observe_sampler(sampler: Any, tracker: CandidateTracker, observing: Observing) -> None:
    """Add our mixin to a V2 sampler. Its class changes and the object stays, because vLLM tests it with isinstance."""
    cls = type(sampler)
    sampler.__class__ = type(f"Observed{cls.__name__}", (SamplerMixin, cls), {})
    sampler.candidate_tracker, sampler.observing = tracker, observing


def observe_runner(runner: Any, observes: bool, *, v2: bool) -> None:
    """Let a model runner with our mixin show its candidates to a tracker. `observes`: as of the mixin."""
    add_mixin(runner, ObservingV2Mixin if v2 else ObservingV1Mixin)
    runner.observes = observes
    runner.candidate_tracker = CandidateTracker(runner.device)
    runner.observing = Observing(runner.candidate_tracker, runner.faults)
