"""Code that only observes a step, separated from the step.

Invariant: an exception here fails the observed candidates. Tokens are sampled as without observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreRequest

from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.names import learned_name
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker

logger = init_logger("vllm.vllm_rollout")


class Observing:
    """Context for code that reads a step and changes nothing of vLLM's. An exception inside fails all observed
    candidates.
    """

    def __init__(self, tracker: CandidateTracker, faults: Faults) -> None:
        self.faults = faults
        self.says_not_finite = True
        """True until the first logits of the current weights that are not finite have been logged."""
        self.refusal: str | None = None
        """Reason why nobody is observed. None: candidates are."""
        self._tracker = tracker
        self._failed: dict[str, str] = {}
        """Reasons by id of requests that cannot be observed any more, until the next report."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed(self._tracker.forget_all(), error)
        return True

    def begin(self, request_id: str, request: NewRequestData | EngineCoreRequest) -> None:
        """Observe a new request, if it is a candidate. While nobody is observed, one that a part must observe fails."""
        try:
            if (tag := _tag_of(request)) is None:
                return
            needing = [part for part in self._tracker.parts if part.observes(tag)]
            refusal = self.refusal or next((part.refusal for part in needing if part.refusal is not None), None)
            if refusal is not None:
                if needing:
                    self._failed[request_id] = refusal
            elif needing or tag.observed:
                _begin(self._tracker, request_id, request, tag)
        except Exception as error:
            self.failed([request_id], error)
            self._tracker.discard(request_id)

    def stop(self, error: Exception) -> None:
        """Observe nobody from now on, because of an error before the first step."""
        self.refusal = self.faults.caught("warming up", error)
        logger.error("vllm_rollout: candidates have no confidence from now on, and those that are to be scored fail")

    def failed(self, request_ids: Sequence[str], error: Exception) -> None:
        self._failed |= dict.fromkeys(request_ids, self.faults.caught("observing", error))

    @property
    def has_failed(self) -> bool:
        return bool(self._failed)

    def not_finite(self, request_ids: Sequence[str]) -> dict[str, str]:
        """Candidates whose tokens would be random, with the reason."""
        if self.says_not_finite:
            self.says_not_finite = False
            logger.error(
                "vllm_rollout: candidates fail from now on, the first one %.100s: %s", request_ids[0], NOT_FINITE
            )
        return dict.fromkeys(request_ids, NOT_FINITE)

    def take_failed(self) -> dict[str, str]:
        failed, self._failed = self._failed, {}
        return failed


def _tag_of(request: NewRequestData | EngineCoreRequest) -> CandidateTag | None:
    params = request.sampling_params
    return None if params is None else CandidateTag.of(params.extra_args)


def _begin(
    tracker: CandidateTracker, request_id: str, request: NewRequestData | EngineCoreRequest, tag: CandidateTag
) -> None:
    slot = tracker.add(request_id, _num_prompt_tokens(request))
    if slot is not None:
        for part in tracker.parts:
            part.begin(slot, tag, learned_name(request.lora_request))


def _num_prompt_tokens(request: NewRequestData | EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return len(request.prompt_embeds)  # type: ignore[arg-type]
