"""What only observes a step, kept apart from the step.

Invariant: an exception here fails the candidates that are observed; tokens are sampled as if nobody looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from vllm.v1.core.sched.output import NewRequestData

from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.names import learned_name
from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.tracker.tracker import CandidateTracker


class Observing:
    """`with observing:` stands around code that reads a step and changes nothing of vLLM's."""

    def __init__(self, tracker: CandidateTracker, faults: Faults) -> None:
        self.faults = faults
        self._tracker = tracker
        self._failed: dict[str, str] = {}
        """Requests that can be observed no more, and why, until a report says so."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed(self._tracker.forget_all(), error)
        return True

    def begin(self, request: NewRequestData) -> None:
        """Observe a request that comes, if it is a candidate."""
        try:
            _begin(self._tracker, request)
        except Exception as error:
            self.failed([request.req_id], error)
            self._tracker.discard(request.req_id)

    def failed(self, request_ids: Sequence[str], error: Exception) -> None:
        self._failed |= dict.fromkeys(request_ids, self.faults.caught("observing", error))

    def take_failed(self) -> dict[str, str]:
        failed, self._failed = self._failed, {}
        return failed


def _begin(tracker: CandidateTracker, request: NewRequestData) -> None:
    params = request.sampling_params
    if params is None or (tag := CandidateTag.of(params.extra_args)) is None:
        return
    if (plan := tag.terms.pruning) is not None:
        first, *others = plan.scored_lengths
        tracker.add(
            request.req_id,
            _num_prompt_tokens(request),
            first,
            num_before=tag.num_resumed,
            trial_lengths=others,
            final=plan.final_score,
            adapter=learned_name(request.lora_request),
        )
    elif tag.observed:
        tracker.add(request.req_id, _num_prompt_tokens(request))


def _num_prompt_tokens(request: NewRequestData) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return len(request.prompt_embeds)
