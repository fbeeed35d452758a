"""Parts on an emulated device, in place of the real worker's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.outputs import DraftTokenIds

from vllm_rollout.kernel.wire import CandidateTag, RunnerReport
from vllm_rollout.parts.emulation.device import StepWork
from vllm_rollout.parts.emulation.worker.request import EmulatedRequest


class SaidRow(NamedTuple):
    """A row of a step that is over."""

    request: EmulatedRequest
    num_said: int
    """Sampled tokens. 0 in a prefill that is not over."""
    num_drafts: int = 0
    """Drafts that were verified for this row."""


class EmulatedPart:
    """A part on an emulated device. It overrides the hooks that it needs.

    Its face `emulated` is a function that makes it of an `EmulatedWorker` whose runner exists. It returns None if the
    part has nothing to do there. Its face `device_settings` is a pydantic model of its fields in the file of a device,
    under the part's name.
    """

    def begin(self, request: EmulatedRequest, tag: CandidateTag, prompt: Sequence[int]) -> None:
        """Register a candidate. `prompt`: tokens of its prompt, without output of earlier rounds."""

    def end(self, request: EmulatedRequest) -> None:
        """Forget a request."""

    def see_rows(self, rows: Sequence[SaidRow], report: RunnerReport) -> RunnerReport:
        """Add the part's values to the report of a step with observed candidates."""
        return report

    def took(self, work: StepWork, seconds: float) -> None:
        """Note how many seconds a step takes on the device."""

    def propose(self, rows: Sequence[SaidRow]) -> DraftTokenIds | None:
        """Drafts for the next step, which has these rows again, or fewer. None from a part that drafts nothing."""

    def take(self, request: EmulatedRequest) -> bytes:
        """Data that leave with a candidate, which then ends here."""
        return b""

    def put(self, request: EmulatedRequest, data: bytes) -> None:
        """Data of a candidate that has begun here and has run elsewhere."""
