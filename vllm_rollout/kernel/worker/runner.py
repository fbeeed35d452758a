"""vLLM's model runners, changed to pass logits and hidden states to the tracker. One thin mixin per runner generation.

Invariant: observed values are not changed, and no step waits for them: they are copied with the step's own output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.tracker.step_values import StepValues
from vllm_rollout.kernel.tracker.tracker import CandidateTracker
from vllm_rollout.kernel.tracker.verified import VerifiedDrafts
from vllm_rollout.kernel.tracker.warm_up import warm_up
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, RunnerReport, nothing_seen
from vllm_rollout.kernel.worker.observing import Observing
from vllm_rollout.kernel.worker.ports import WorkerParts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


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


class ObservedOutput(AsyncModelRunnerOutput):
    """An asynchronous runner output whose report arrives with it."""

    def __init__(
        self, inner: AsyncModelRunnerOutput, report: StepReport, copy_stream: torch.cuda.Stream | None
    ) -> None:
        """`copy_stream`: None if the step's values are on the host already."""
        self._inner = inner
        self._report = report
        if copy_stream is None:
            report.begin_copy()
            return
        main_stream = torch.cuda.current_stream()
        with torch.cuda.stream(copy_stream):
            copy_stream.wait_stream(main_stream)
            report.begin_copy()

    def get_output(self) -> ModelRunnerOutput:
        output = self._inner.get_output()
        self._report.attach(output)
        return output

    def get_kv_connector_output(self) -> Any:
        return self._inner.get_kv_connector_output()


class StepReport:
    """Observations of a step and the version of its weights, for the scheduler."""

    def __init__(self, step: StepValues | None, observing: Observing, weights: int = 0) -> None:
        """`step`: None if no request was observed. `weights`: as of a RunnerReport."""
        self._step = step
        self._weights = weights
        self._failed = observing.take_failed()
        self._observing = observing
        self._copy: HostCopy | None = None
        self._error: Exception | None = None

    @property
    def is_on_host(self) -> bool:
        return self._step is None or self._step.on_host

    def begin_copy(self) -> None:
        """Begin the copy to the host, on the current stream."""
        try:
            self._copy = None if self._step is None else HostCopy(self._step)
        except Exception as error:
            self._error = error

    def attach(self, output: ModelRunnerOutput) -> None:
        """Attach the report to the output, where the scheduler reads it. Waits for the copy."""
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


class RunnerMixin:
    """Common part of both runner generations. Overrides: execute_model, sample_tokens, _dummy_sampler_run.

    An exception of ours here would end the engine: `observing` and `parts` catch theirs.
    """

    parts = WorkerParts()
    _weights = 0
    """Number of the weights change after which the last step was computed."""

    observes = False
    """False if nothing is observed: this rank's outputs are not read, or its rows are not whole requests."""

    def start_tracking(self, observes: bool) -> None:
        """Make the tracker."""
        self.observes = observes
        self.candidate_tracker = CandidateTracker(self.device)
        self.observing = Observing(self.candidate_tracker, Faults())

    def join(self, parts: WorkerParts) -> None:
        """Let the worker's parts hear of steps and see rows, before the first step."""
        self.parts = parts
        self.candidate_tracker.parts = parts.rows

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        tracker = self.candidate_tracker
        with self.observing:
            if self.observes:
                for request_id in scheduler_output.finished_req_ids:
                    tracker.discard(request_id)
                for request in scheduler_output.scheduled_new_reqs:
                    self.observing.begin(request.req_id, request)
            tracker.start_step()
        if Changes.num != self._weights:
            self._weights = Changes.num
            self._hear_of_new_weights()
        self.parts.see_step(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _hear_of_new_weights(self) -> None:
        """Notify the worker's parts of new weights, before the first step that they compute."""
        self.observing.says_not_finite = True
        self.parts.new_weights()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if output is None:
            return None
        step = self.candidate_tracker.step
        if step is None and not (self.observing.has_failed or self._weights):
            return output
        report = StepReport(step, self.observing, self._weights)
        if isinstance(output, ModelRunnerOutput):  # the synchronous loop, which has waited for its tokens too
            report.begin_copy()
            report.attach(output)
            return output
        return ObservedOutput(output, report, None if report.is_on_host else self._copy_stream())

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # vLLM warms its sampler up here, before it begins to watch for kernels that are compiled in a step.
        result = super()._dummy_sampler_run(hidden_states, *args, **kwargs)
        # On every rank, since its parts are gathered, and of all rows: vLLM's LoRA kernels write into as many as the
        # dummy step had.
        logits = self.model.compute_logits(hidden_states)
        if logits is not None and self.observes:
            warm_up(logits, hidden_states, self.candidate_tracker.parts)
        return result


class RunnerV1Mixin(RunnerMixin):
    """`vllm/v1/worker/gpu_model_runner.py` and its CPU subclass. Overrides: those of RunnerMixin, _sample."""

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        state = self.execute_model_state
        if state is not None and self.observes:
            with self.observing:
                self.candidate_tracker.see_hidden_states(state.sample_hidden_states)
        return super().sample_tokens(*args, **kwargs)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None  # without drafts, top_k of vLLM from 0.32 on has no rows on a CPU
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

    def _copy_stream(self) -> torch.cuda.Stream:
        return self.async_output_copy_stream


class CPURunnerV1Mixin(RunnerV1Mixin):
    """V1 on CPU. Overrides: those of RunnerV1Mixin.

    vLLM draws noise for every row, also for an unfinished prefill, and then rewinds the generators of those rows with
    `set_offset`. CPU generators do not have this method, so one seeded request with a chunked prefill ends the engine.
    Here the generators of such rows are removed while the step samples, so that no noise is used up.
    """

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        if not generators or self.execute_model_state is None:
            return super().sample_tokens(*args, **kwargs)
        unfinished = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        set_aside = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(set_aside)


class RunnerV2Mixin(RunnerMixin):
    """`vllm/v1/worker/gpu/model_runner.py`. Overrides: those of RunnerMixin, load_model, sample.

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


def observe_runner(runner: Any, observes: bool, *, v2: bool, cpu: bool) -> None:
    """Add our mixin to a model runner. `observes`: as of the mixin.

    vLLM's workers construct the runner inline. (Only the GPU worker has a factory method, which names the class
    itself.) So changing the instance's class is the only way for both.
    """
    mixin: type = RunnerV2Mixin if v2 else CPURunnerV1Mixin if cpu else RunnerV1Mixin
    cls = type(runner)
    runner.__class__ = type(f"Rollout{cls.__name__}", (mixin, cls), {})
    runner.start_tracking(observes)
