"""vLLM's model runners, changed to notify parts of each step, and to report to the scheduler. One thin mixin per runner
generation.

Invariant: no step waits for a report, which comes with the step's own output.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, nothing_seen
from vllm_rollout.kernel.worker.ports import WorkerPart, WorkerParts


class Report(Protocol):
    """Data of a step for the scheduler."""

    def attach(self, output: ModelRunnerOutput) -> None:
        """Attach the report to the output, where the scheduler reads it. It must not raise."""


class PlainReport(NamedTuple):
    """Report of a step in which no request was observed. Fields: as of a RunnerReport."""

    weights: int
    num_internal_errors: int

    def attach(self, output: ModelRunnerOutput) -> None:
        setattr(output, REPORT_ATTRIBUTE, nothing_seen(len(output.req_ids), **self._asdict()))


class ReportedOutput(AsyncModelRunnerOutput):
    """An asynchronous runner output whose report comes with it."""

    def __init__(self, inner: AsyncModelRunnerOutput, report: Report) -> None:
        self._inner = inner
        self._report = report

    def get_output(self) -> ModelRunnerOutput:
        output = self._inner.get_output()
        self._report.attach(output)
        return output

    def get_kv_connector_output(self) -> Any:
        return self._inner.get_kv_connector_output()


class RunnerMixin:
    """Common part of both runner generations. Overrides: execute_model, sample_tokens.

    An exception of ours here would end the engine: `parts` catch theirs.
    """

    faults: Faults
    """Exceptions of ours in this worker."""
    parts = WorkerParts()
    weights = 0
    """Number of the weights change after which the last step was computed."""

    def join(self, parts: WorkerParts) -> None:
        """Notify the worker's parts of steps, from the first one on."""
        self.parts = parts

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if Changes.num != self.weights:
            self.weights = Changes.num
            self.parts.call(WorkerPart.new_weights)
        self.parts.call(WorkerPart.see_step, scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def step_report(self, *, is_async: bool) -> Report | None:
        """Report of the step that was sampled. None: it has nothing to report. `is_async`: nobody waits for the step
        before the next one begins."""
        return PlainReport(self.weights, self.faults.num) if self.weights or self.faults.num else None

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        is_async = not isinstance(output, ModelRunnerOutput)
        if output is None or (report := self.step_report(is_async=is_async)) is None:
            return output
        if is_async:
            return ReportedOutput(output, report)
        report.attach(output)  # the synchronous loop, which has waited for its tokens too
        return output


class RunnerV1Mixin(RunnerMixin):
    """`vllm/v1/worker/gpu_model_runner.py` and its CPU subclass. Overrides: those of RunnerMixin, _sample."""

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._sample(logits, unless_empty(spec_decode_metadata), *args, **kwargs)


def unless_empty(drafted: Any) -> Any:
    """`spec_decode_metadata` of a step. None for a step without drafts, in which top_k of vLLM from 0.32 on has no rows
    on a CPU.
    """
    return drafted if drafted is not None and any(drafted.num_draft_tokens) else None


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
    """`vllm/v1/worker/gpu/model_runner.py`. Overrides: those of RunnerMixin."""


def extend_runner(runner: Any, *, v2: bool, cpu: bool) -> None:
    """Add our mixin to a model runner.

    vLLM's workers construct the runner inline. (Only the GPU worker has a factory method, which names the class
    itself.) So changing the instance's class is the only way for both.
    """
    add_mixin(runner, RunnerV2Mixin if v2 else CPURunnerV1Mixin if cpu else RunnerV1Mixin)
    runner.faults = Faults()


def add_mixin(runner: Any, mixin: type) -> None:
    """Put a mixin before the class of a model runner."""
    cls = type(runner)
    name = cls.__name__ if isinstance(runner, RunnerMixin) else f"Rollout{cls.__name__}"
    runner.__class__ = type(name, (mixin, cls), {})
