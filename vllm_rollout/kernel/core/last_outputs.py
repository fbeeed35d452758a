"""Last outputs of candidates. Each says how its candidate ended: to vLLM by its reasons, to our client by a note."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from vllm_rollout.kernel.core.candidate import EngineCandidate
from vllm_rollout.kernel.rules.types import StopState
from vllm_rollout.kernel.wire import EndingNote

logger = init_logger("vllm.vllm_rollout")


def empty_output(request: Request) -> EngineCoreOutput:
    """The last output of a request that ended without one in this step."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )


def put(outputs: dict[int, EngineCoreOutputs], request: Request, output: EngineCoreOutput) -> None:
    """Send the last output of a request to its client.

    vLLM's times of a request need the time when it was scheduled first. If it never was, that is now.
    """
    step_outputs = outputs.setdefault(request.client_index, EngineCoreOutputs())
    if any(event.type == EngineCoreEventType.QUEUED for event in output.events or ()):  # its first output, too
        output.events = [*output.events, EngineCoreEvent(EngineCoreEventType.SCHEDULED, step_outputs.timestamp)]
    # The default list of an EngineCoreOutputs is shared, so it is not appended to.
    step_outputs.outputs = [*step_outputs.outputs, output]


def say_reasons(candidate: EngineCandidate, output: EngineCoreOutput, stopped: StopState | None) -> None:
    """Say to vLLM why a candidate of a group ended. `stopped`: reason of its group, if the group stopped it."""
    if stopped is not None:
        output.finish_reason, output.stop_reason = FinishReason.ABORT, stopped
    if candidate.error is not None and output.finish_reason is None:
        output.finish_reason = FinishReason.ABORT if candidate.reads_notes else FinishReason.ERROR


def failed_output(candidate: EngineCandidate) -> EngineCoreOutput:
    """The last output of a candidate whose data are not to be trusted: nothing but the reason."""
    output = EngineCoreOutput(candidate.request.request_id, [])
    explain(candidate, output)
    return output


def explain(candidate: EngineCandidate, output: EngineCoreOutput) -> None:
    """Say why a candidate was refused or failed: in a note, or to a client without notes as an error and in our log."""
    if candidate.reads_notes:
        output.finish_reason = FinishReason.ABORT
        note = EndingNote("failed", 0, None, refusal=candidate.refusal, error=candidate.error)
        output.kv_transfer_params = note.to_params(output.kv_transfer_params)
        return
    output.finish_reason, output.stop_reason = FinishReason.ERROR, candidate.refusal or candidate.error
    if candidate.refusal is not None:
        logger.error("vllm_rollout: request %.100s was refused: %s", output.request_id, candidate.refusal)
