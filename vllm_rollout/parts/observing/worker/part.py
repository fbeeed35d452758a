"""Observing beside a model runner. Statistics of a candidate travel with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequest

from vllm_rollout.adapter.options import observing_refusal
from vllm_rollout.kernel.worker.ports import WorkerPart
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation, operators
from vllm_rollout.parts.observing.worker.runner import observe_runner

logger = init_logger("vllm.vllm_rollout")


class ObservingWorker(WorkerPart):
    """The tracker of an observed model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def take(self, request_ids: Sequence[str]) -> Mapping[str, bytes]:
        statistics: dict[str, bytes] = self._runner.candidate_tracker.copy(request_ids)
        return statistics

    def put(self, request: EngineCoreRequest, data: bytes) -> None:
        if self._runner.observes:
            self._runner.candidate_tracker.discard(request.request_id)
            self._runner.observing.begin(request.request_id, request)
            if self._runner.candidate_tracker.slot_of(request.request_id) is not None:
                self._runner.candidate_tracker.restore(request.request_id, data)

    def new_weights(self) -> None:
        self._runner.observing.says_not_finite = True


def observing_of(worker: Any) -> ObservingWorker:
    """Face `worker`."""
    refusal = observing_refusal(worker.vllm_config)
    observe_runner(worker.model_runner, worker.is_read and refusal is None, v2=worker.use_v2_model_runner)
    say_what_serves("V2" if worker.use_v2_model_runner else "V1", worker.device.type)
    if refusal is not None:
        logger.warning_once("vllm_rollout worker: candidates are not observed, because %s", refusal)
    return ObservingWorker(worker.model_runner)


def say_what_serves(runner: str, device_type: str) -> None:
    """Log the model runner and each operator. It is a warning if a faster operator than the active one exists."""
    serving = {name: active_implementation(device_type, name) for name in operators()}
    described = [
        f"{name}: {active.name}" + (f" ({active.reason})" if active.reason else "") for name, active in serving.items()
    ]
    fastest = all(active.reason is None for active in serving.values())
    say = logger.info_once if fastest else logger.warning_once
    say("vllm_rollout worker: model runner %s, %s", runner, ", ".join(described))
