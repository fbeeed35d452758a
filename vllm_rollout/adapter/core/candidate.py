"""A candidate as the scheduler sees it. Invariant: what the scheduler knows of it is here, not on vLLM's request."""

from __future__ import annotations

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_rollout.adapter.core.held_outputs import HeldOutputs
from vllm_rollout.adapter.core.stop_strings import StopStrings
from vllm_rollout.adapter.wire import REPORT_ATTRIBUTE, RunnerReport
from vllm_rollout.group.racing.lifecycle import Group
from vllm_rollout.group.types import CandidateId, EndReason, Observation

END_REASONS: dict[RequestStatus, EndReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_REPETITION: "length",
}
"""Any other final status (aborted, error, ignored) is `failed`."""


class EngineCandidate:
    """A tagged request inside the scheduler."""

    __slots__ = (
        "end_reason",
        "error",
        "group",
        "held",
        "id",
        "is_launched",
        "is_told",
        "num_dropped",
        "reads_notes",
        "refusal",
        "request",
        "stop_strings",
        "weights",
    )

    id: CandidateId
    group: Group
    """Its name and its group, once it is launched."""

    def __init__(self, request: Request, output_interval: int = 1, *, reads_notes: bool = True) -> None:
        self.request = request
        self.reads_notes = reads_notes
        """Its client is ours."""
        params = request.sampling_params
        self.held = HeldOutputs(output_interval, None if params is None else params.num_logprobs)
        self.stop_strings: StopStrings | None = None
        self.weights: list[tuple[int, int]] = []
        """From which output token on which weights sampled it: the change that they came with."""
        self.end_reason: EndReason | None = None
        self.refusal: str | None = None
        """Why its group did not take it."""
        self.error: str | None = None
        """Why it failed, where that is known."""
        self.is_launched = False
        """It is in a group: not refused, and the group is not broken."""
        self.is_told = False
        """Its group knows that it has ended."""
        self.num_dropped = 0
        """Tokens after the one that completed a stop string, of the same step."""

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return self.request.num_output_tokens - self.num_dropped

    def sampled_by(self, change: int) -> None:
        """The tokens that it gets from now on are those of the weights that came with this change."""
        start = self.request.num_output_tokens
        if self.weights and self.weights[-1][0] == start:
            self.weights.pop()
        self.weights.append((start, change))


def last_observation(candidate: EngineCandidate, model_runner_output: ModelRunnerOutput) -> Observation | None:
    """What the last token of a candidate that ended in this step showed; None where nobody asks for a final score, or
    the step does not show it (aborted between steps)."""
    plan = candidate.group.terms.pruning
    if plan is None or not plan.final_score or candidate.end_reason == "failed":
        return None
    found = _last_token(candidate, model_runner_output)
    if found is None:
        return None
    report, row, token = found
    return report.last_observation(row, token)


def confidence_of(
    candidate: EngineCandidate, model_runner_output: ModelRunnerOutput | None
) -> tuple[float, float] | None:
    """Mean and standard deviation of its token confidences; None when this step's report does not have them."""
    found = None if model_runner_output is None else _last_token(candidate, model_runner_output)
    if found is None:
        return None
    report, row, token = found
    mean, std = report.confidence[:, token, row].tolist()
    return (mean, std) if mean == mean else None


def _last_token(
    candidate: EngineCandidate, model_runner_output: ModelRunnerOutput
) -> tuple[RunnerReport, int, int] | None:
    """This step's report, the candidate's row in it, and which token of the step is its last; None when it is not
    there, or the worker observed no candidate in this step."""
    row = model_runner_output.req_id_to_index.get(candidate.request.request_id)
    report: RunnerReport | None = model_runner_output.__dict__.get(REPORT_ATTRIBUTE)
    if row is None or report is None or (token := report.token_of(row, candidate.num_tokens)) is None:
        return None
    return report, row, token
