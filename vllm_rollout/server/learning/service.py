"""Learning over HTTP: rewards in, heads and reports out. Invariant: every posted reward gets a status of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from http import HTTPStatus

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES, REPORT_INTERVAL_S
from vllm_rollout.group.ledger import Reward
from vllm_rollout.server.engine import Engine, HeadInfo, LearningReport, RequestError
from vllm_rollout.server.learning.body import (
    EXPLANATIONS,
    RewardCounts,
    RewardResult,
    RewardsAnswer,
    RewardsRequest,
)
from vllm_rollout.server.metrics import Metrics
from vllm_rollout.server.recorder import TraceRecorder
from vllm_rollout.server.slices import Slices


class LearningService:
    """What the endpoints that learn ask of an engine."""

    def __init__(
        self, engine: Engine, metrics: Metrics, clock: Callable[[], float], recorder: TraceRecorder | None = None
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._reported: dict[int, float] = {}
        """Detection length -> when its gauges were last set."""

    async def post_rewards(self, rollout_id: str, request: RewardsRequest) -> RewardsAnswer:
        """Raises: RequestError, 404 when the rollout is not known."""
        rewards, slices = [], Slices()
        for entry in request.rewards:
            rewards.append(
                Reward(entry.prompt_id, entry.index, entry.reward, positive=entry.reward > request.threshold)
            )
            await slices.turn()
        receipt = await self._engine.post_rewards(rollout_id, rewards)
        if receipt is None:
            raise RequestError(
                f"no rollout {rollout_id!r} is known here that was asked for with pruning. This server remembers the "
                f"newest rollouts with pruning, up to {MAX_REMEMBERED_CANDIDATES} candidates, until it ends. Take the "
                "id from the rollout's answer, and post rewards before the next restart.",
                status=HTTPStatus.NOT_FOUND,
                param="rollout_id",
            )
        self._metrics.rewards_posted(receipt.statuses, rewards)
        if self._recorder is not None:
            posted = zip(rewards, receipt.statuses, strict=True)
            self._recorder.rewards_posted(rollout_id, [reward for reward, status in posted if status == "accepted"])
        await self._refresh_gauges(receipt.detection_length)
        results = []
        for (prompt_id, index, *_), status in zip(rewards, receipt.statuses, strict=True):
            results.append(RewardResult(prompt_id=prompt_id, index=index, status=status, message=EXPLANATIONS[status]))
            await slices.turn()
        return RewardsAnswer(
            id=rollout_id,
            results=results,
            counts=RewardCounts(**Counter(receipt.statuses)),
            threshold=request.threshold,
            num_training=receipt.num_training,
            head_version=receipt.head_version,
        )

    async def report(self, detection_length: int | None) -> LearningReport:
        """Raises: RequestError, 404 while nothing has been learned, 409 when the detection length must be named."""
        report = await self._engine.learning_report(detection_length)
        self._metrics.learning_reported(report)
        return report

    async def report_if_any(self, detection_length: int) -> LearningReport | None:
        """The report for what can do without it: None when there is none, or no engine any more."""
        try:
            return await self._engine.learning_report(detection_length)
        except RequestError:
            return None

    async def quality_head(self, detection_length: int | None) -> tuple[HeadInfo, bytes]:
        """Raises: RequestError, 404 without a head, 409 when the detection length must be named."""
        return await self._engine.quality_head(detection_length)

    async def set_quality_head(self, weights: bytes) -> HeadInfo:
        """Raises: RequestError, 422 for what is no head, 409 for one of another model or size."""
        return await self._engine.set_quality_head(_not_empty(weights, "the safetensors of GET /v1/quality_head"))

    async def state(self) -> bytes:
        return await self._engine.learning_state()

    async def set_state(self, state: bytes) -> None:
        """Raises: RequestError, 422 for what is no state, 409 for one of another model."""
        await self._engine.set_learning_state(_not_empty(state, "the bytes of GET /v1/rollouts/state"))

    async def _refresh_gauges(self, detection_length: int) -> None:
        now = self._clock()
        last = self._reported.get(detection_length)
        if last is not None and now - last < REPORT_INTERVAL_S:
            return
        self._reported[detection_length] = now
        report = await self.report_if_any(detection_length)
        if report is not None:
            self._metrics.learning_reported(report)


def _not_empty(body: bytes, wanted: str) -> bytes:
    if not body:
        raise RequestError(f"the body is empty. Send {wanted} as application/octet-stream.")
    return body
