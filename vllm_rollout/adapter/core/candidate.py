"""A candidate as the scheduler sees it. Invariant: what the scheduler knows of it is here, not on vLLM's request."""

from __future__ import annotations

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_rollout.adapter.core.held_outputs import HeldOutputs
from vllm_rollout.adapter.core.stop_strings import StopStrings
from vllm_rollout.adapter.wire import REPORT_ATTRIBUTE, RunnerReport
from vllm_rollout.group.lifecycle import Group
from vllm_rollout.group.types import CandidateId, EndReason

END_REASONS: dict[RequestStatus, EndReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_REPETITION: "length",
}
"""Any other final status (aborted, error, ignored) is `failed`."""


class Candidate:
    """A tagged request inside the scheduler."""

    __slots__ = ("end_reason", "group", "held", "id", "pauses", "refusal", "request", "stop_strings")

    id: CandidateId
    group: Group
    """Of a candidate that was launched, that is: not refused."""

    def __init__(self, request: Request, output_interval: int) -> None:
        self.request = request
        self.held = HeldOutputs(output_interval)
        self.stop_strings: StopStrings | None = None
        self.pauses: list[int] = []
        """Output lengths at which generation was paused and resumed: where the weights may have changed."""
        self.end_reason: EndReason | None = None
        self.refusal: str | None = None
        """Why its group did not take it."""


def confidence_of(request_id: str, model_runner_output: ModelRunnerOutput | None) -> tuple[float, float] | None:
    """Mean and standard deviation of its token confidences; None when this step's report does not have them."""
    if model_runner_output is None or (row := model_runner_output.req_id_to_index.get(request_id)) is None:
        return None
    report: RunnerReport | None = model_runner_output.__dict__.get(REPORT_ATTRIBUTE)
    if report is None:  # the worker observed no candidate in this step
        return None
    mean, std = report.confidence[:, row].tolist()
    return (mean, std) if mean == mean else None
