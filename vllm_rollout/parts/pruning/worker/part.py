"""Pruning beside a model runner: scores of candidates, quality heads, and features that wait for rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequest

from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker
from vllm_rollout.parts.observing.worker.runner import RowsWorkerPart
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing
from vllm_rollout.parts.pruning.worker.features import attach, detach
from vllm_rollout.parts.pruning.worker.quality_head import warm_up_training
from vllm_rollout.parts.pruning.worker.quality_heads import QualityHeads
from vllm_rollout.parts.pruning.worker.scorer import Scorer

logger = init_logger("vllm.vllm_rollout")


class PruningWorker(RowsWorkerPart):
    """Sees rows by its scorer. Features travel with their candidate."""

    def __init__(self, tracker: CandidateTracker, ring: FeatureRing, num_in_flight: int = 1) -> None:
        """`num_in_flight`: as of `Scorer`."""
        self.ring = ring
        self.rows: Scorer = Scorer(tracker, ring, num_in_flight)

    def take(self, request_ids: Sequence[str]) -> Mapping[str, bytes]:
        taken = {
            request_id: detach(self.ring, request_id, self.rows.scored_at(request_id)) for request_id in request_ids
        }
        return {request_id: data for request_id, data in taken.items() if data}

    def put(self, request: EngineCoreRequest, data: bytes) -> None:
        attach(self.ring, request.request_id, data)


def pruning_of(worker: Any) -> PruningWorker | None:
    """Face `worker`. None if the worker's outputs are not read: it has no heads."""
    if not worker.is_read:
        return None
    config, model = worker.vllm_config, worker.model_config
    hidden_size, dtype = model.get_hidden_size(), model.dtype
    num_in_flight = config.scheduler_config.async_scheduling + config.parallel_config.pipeline_parallel_size - 1
    num_in_flight += config.num_speculative_tokens  # a step may make more than a candidate had left
    ring = FeatureRing.of(config, hidden_size, dtype)
    part = PruningWorker(worker.model_runner.candidate_tracker, ring, num_in_flight)
    warm_up_training()
    worker.quality_heads = QualityHeads(
        part.rows,
        ring,
        hidden_size=hidden_size,
        model=model.served_model_name or model.model,
        device=worker.device,
    )
    logger.info_once(
        "vllm_rollout worker: features of up to %d scored candidates (hidden size %d) wait for their rewards in "
        "at most %d MB of host memory, used as they come",
        ring.capacity,
        hidden_size,
        round(ring.capacity * hidden_size * dtype.itemsize / 2**20),
    )
    return part
