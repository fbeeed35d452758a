"""Hooks by which a part takes part in a worker, and the parts of one worker.

Invariant: a group whose candidate cannot leave or come does not move. Exceptions of `take` and `put` are raised, and
those of other hooks are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest

from vllm_rollout.adapter.hooks import HookPart, Hooks
from vllm_rollout.kernel.parts import faces


class WorkerPart(HookPart):
    """A part beside the model runner.

    Its face `worker` is a function that makes it of a worker whose model runner exists, and returns None if the part
    has nothing to do there.
    """

    def see_step(self, step: SchedulerOutput) -> None:
        """Prepare for a step: its new and finished requests, and the tokens that it computes."""

    def arrived(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        """Register a candidate that has run elsewhere."""

    def take(self, request_ids: Sequence[str]) -> Mapping[str, bytes]:
        """Data about candidates that leave, by request id. One without data is left out."""
        return {}

    def put(self, request: EngineCoreRequest, data: bytes) -> None:
        """Add data of a candidate that has run elsewhere."""

    def new_weights(self) -> None:
        """Prepare for the first step with new weights."""

    def stop(self) -> None:
        """Keep what must outlive the server, which ends next."""


class WorkerParts(Hooks[WorkerPart]):
    """The parts of one worker, by the hooks that they have."""

    port = WorkerPart

    @classmethod
    def of(cls, worker: Any) -> WorkerParts:
        """The parts that have something to do in this worker."""
        made = [(name, part) for name, make in faces("worker") if (part := make(worker)) is not None]
        return cls(made, worker.model_runner.faults)

    def take(self, request_ids: Sequence[str]) -> dict[str, dict[str, bytes]]:
        """Data about candidates that leave, by request id and part. A part without data is left out."""
        taken: dict[str, dict[str, bytes]] = {request_id: {} for request_id in request_ids}
        for name, part in self._with["take"]:
            for request_id, data in part.take(request_ids).items():
                taken[request_id][name] = data
        return taken

    def put(self, request: EngineCoreRequest, data: Mapping[str, bytes]) -> None:
        """Pass each part its data of a candidate."""
        for name, part in self._with["put"]:
            if name in data:
                part.put(request, data[name])
