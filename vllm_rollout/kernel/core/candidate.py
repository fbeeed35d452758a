"""A candidate in the scheduler. Invariant: the scheduler's data about it is here, not on vLLM's request."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_rollout.kernel.core.held_outputs import HeldOutputs
from vllm_rollout.kernel.core.stop_strings import StopStrings
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.types import CandidateId, EndReason
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, RunnerReport

END_REASONS: dict[RequestStatus, EndReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_REPETITION: "length",
}
"""End reason by final status. Every other status (aborted, error, ignored) is `failed`."""


@dataclass(slots=True, eq=False, repr=False)
class EngineCandidate:
    """A tagged request in the scheduler."""

    request: Request
    output_interval: InitVar[int] = 1
    reads_notes: bool = field(default=True, kw_only=True)
    """True if the client of the request is ours."""
    id: CandidateId = field(init=False)
    group: Group = field(init=False)
    """Group of the candidate. Like `id`, set when it is launched."""
    held: HeldOutputs = field(init=False)
    stop_strings: StopStrings | None = None
    weights: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of first output token and number of the weights change from which the tokens were sampled."""
    end_reason: EndReason | None = None
    refusal: str | None = None
    """Reason why its group refused it."""
    error: str | None = None
    """Reason why it failed, if known."""
    is_launched: bool = False
    """True if it is in a group: it was not refused, and the group is not broken."""
    is_told: bool = False
    """True if its group knows that it has ended."""
    num_preemptions: int = 0
    """Number of times that it lost its KV for lack of memory. vLLM's number counts our own reasons, too."""
    num_dropped: int = 0
    """Tokens of the last step after the one that completed a stop string."""

    def __post_init__(self, output_interval: int) -> None:
        params = self.request.sampling_params
        self.held = HeldOutputs(output_interval, None if params is None else params.num_logprobs)

    @property
    def num_tokens(self) -> int:
        """Output tokens, without dropped ones."""
        return self.request.num_output_tokens - self.num_dropped

    def sampled_by(self, change: int) -> None:
        """Note that tokens from now on are sampled by the weights of this change."""
        start = self.request.num_output_tokens
        if self.weights and self.weights[-1][0] == start:
            self.weights.pop()
        self.weights.append((start, change))


def last_observations(candidate: EngineCandidate, model_runner_output: ModelRunnerOutput) -> dict[str, Any]:
    """Observations of the last token of a candidate that ended in this step, by part.

    Empty if the step has no observation of it (aborted between steps).
    """
    terms = candidate.group.terms.parts
    found = _last_token(candidate, model_runner_output) if terms and candidate.end_reason != "failed" else None
    if found is None:
        return {}
    report, row, token = found
    mean = float(report.confidence[0, token, row])
    return {name: its.last_observation(mean, row, token) for name, its in report.parts.items() if name in terms}


def confidence_of(
    candidate: EngineCandidate, model_runner_output: ModelRunnerOutput | None
) -> tuple[float, float] | None:
    """Mean and standard deviation of the candidate's token confidences. None if this step's report does not
    have them.
    """
    found = None if model_runner_output is None else _last_token(candidate, model_runner_output)
    if found is None:
        return None
    report, row, token = found
    mean, std = report.confidence[:, token, row].tolist()
    return (mean, std) if mean == mean else None


def _last_token(
    candidate: EngineCandidate, model_runner_output: ModelRunnerOutput
) -> tuple[RunnerReport, int, int] | None:
    """This step's report, the candidate's row in it, and the index of its last token in the step.

    None if the candidate is not in the step, or the worker observed no candidate in this step.
    """
    row = model_runner_output.req_id_to_index.get(candidate.request.request_id)
    report: RunnerReport | None = model_runner_output.__dict__.get(REPORT_ATTRIBUTE)
    if row is None or report is None or (token := report.token_of(row, candidate.num_tokens)) is None:
        return None
    return report, row, token
