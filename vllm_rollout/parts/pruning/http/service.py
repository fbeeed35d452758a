"""Learning over HTTP: takes rewards, gives heads and reports. Invariant: a dead engine is an error of the request that
finds it dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from operator import attrgetter
from typing import Any

from vllm_rollout.config import REPORT_INTERVAL_S
from vllm_rollout.kernel.http.engine import Engine, EngineStopped, RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.reward_door import Posted, Taken
from vllm_rollout.kernel.http.slices import each
from vllm_rollout.kernel.rules.rewards import Reward, RewardStatus
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.pruning.http.engine import LearningPart, RewardsReceipt
from vllm_rollout.parts.pruning.http.metrics import PruningMetrics
from vllm_rollout.parts.pruning.http.prompts import PromptsAnswer, prompts_page
from vllm_rollout.parts.pruning.rules.known_prompts import PromptOrder
from vllm_rollout.parts.pruning.rules.learning_report import LearningReport
from vllm_rollout.parts.pruning.rules.length_trial import LengthTrialReport, length_trial_report
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.rules.report import HeadInfo

logger = logging.getLogger("vllm.vllm_rollout")


def not_empty(body: bytes, wanted: str) -> bytes:
    """The body itself. Raises: RequestError if it is empty."""
    if not body:
        raise RequestError(f"the body is empty. Send {wanted} as application/octet-stream.")
    return body


class LearningService:
    """Serves the endpoints that learn, from an engine."""

    def __init__(
        self,
        learning: LearningPart,
        adapter_name: Callable[[str | None], str],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """`adapter_name`: the adapter that is served under a model's name (`Engine.adapter_name`)."""
        self._learning = learning
        self._adapter_name = adapter_name
        self._metrics = metrics.of(PruningMetrics)
        self._clock = clock
        self._reported: dict[HeadKey, float] = {}
        """Time when the gauges of each head were last set, by the service's clock."""

    @classmethod
    def of(cls, engine: Engine, metrics: Metrics, clock: Callable[[], float]) -> LearningService:
        return cls(engine.part(LearningPart), engine.adapter_name, metrics, clock)

    @property
    def pruning_refusal(self) -> str | None:
        """Reason why candidates cannot be scored here. None if they can."""
        return self._learning.pruning_refusal

    async def rewarded(self, posted: Posted) -> Taken:
        """Learn from rewards. No answer reports what the server has computed, so it is logged and counted.

        Raises: EngineStopped, which is ignored for rewards that the server has computed.
        """
        rewards = await each(posted.rewards, attrgetter("reward"))
        try:
            receipt = await self._learned(posted, rewards)
        except EngineStopped:
            if posted.by_server:
                return Taken()
            raise
        if receipt is None and not posted.by_server:
            return Taken()
        statuses: Sequence[RewardStatus] = ["unknown"] * len(rewards) if receipt is None else receipt.statuses
        self._metrics.rewards_posted(statuses, rewards)
        if posted.by_server:
            _warn_of_unknown(statuses.count("unknown"), posted.rollout_id or "an OpenAI answer")
        if receipt is None:
            return Taken(dict(enumerate(statuses)))
        reports = [await self.report_if_any(head) for head in receipt.head_versions if self._is_due(head)]
        self._metrics.learning_reported(report for report in reports if report is not None)
        return Taken(dict(enumerate(statuses)), _fields(receipt, of_rollout=posted.rollout_id is not None))

    async def _learned(self, posted: Posted, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        if posted.rollout_id is not None:
            return await self._learning.post_rewards(posted.rewards[0].id, rewards)
        return await self._learning.post_named_rewards(posted.rewards)

    async def prompts(self, limit: int, after: str | None, order: PromptOrder, model: str | None) -> PromptsAnswer:
        """A page of the known prompts. Raises: RequestError (404) for an unknown `after`."""
        known = await self._learning.known_prompts(self._adapter_name(model))
        return await asyncio.to_thread(prompts_page, known, limit, after, order)

    async def length_trial(self, keep_ratio: float, model: str | None) -> LengthTrialReport:
        """A comparison of detection lengths, from candidates that were scored at several."""
        tried = await self._learning.tried_lengths(self._adapter_name(model))
        return await asyncio.to_thread(length_trial_report, tried, keep_ratio)

    async def report(self, detection_length: int | None, model: str | None) -> LearningReport:
        """The learning report of a detection length. Raises: RequestError, 404 while nothing has been learned, 409
        if the detection length must be named."""
        report = await self._learning.learning_report(detection_length, self._adapter_name(model))
        self._metrics.learning_reported([report])
        return report

    async def report_if_any(self, head: HeadKey) -> LearningReport | None:
        """The learning report, or None if there is none or the engine is dead."""
        try:
            return await self._learning.learning_report(*head)
        except EngineStopped:
            return None
        except RequestError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return None

    async def quality_head(self, detection_length: int | None, model: str | None) -> tuple[HeadInfo, bytes]:
        """A quality head and its weights. Raises: RequestError, 404 without a head, 409 if the detection length must
        be named."""
        return await self._learning.quality_head(detection_length, self._adapter_name(model))

    async def set_quality_head(self, weights: bytes, model: str | None) -> HeadInfo:
        """Raises: RequestError, 400 for what is no head, 409 for one of another model or size."""
        adapter = self._adapter_name(model)
        weights = not_empty(weights, "the safetensors of GET /v1/quality_head")
        return await self._learning.set_quality_head(weights, adapter)

    def _is_due(self, head: HeadKey) -> bool:
        """True if a head's gauges are not recent. They are set now."""
        now, last = self._clock(), self._reported.get(head)
        if not self._metrics.adapters.know(head.adapter) or (last is not None and now - last < REPORT_INTERVAL_S):
            return False
        self._reported[head] = now
        return True


def _warn_of_unknown(num_unknown: int, whose: str) -> None:
    if num_unknown:
        logger.warning(
            "vllm_rollout: %d rewards of %s teach nothing: their candidates were forgotten", num_unknown, whose
        )


def _fields(receipt: RewardsReceipt, *, of_rollout: bool) -> dict[str, Any]:
    """Fields of the answer to rewards of a rollout, or of any groups."""
    if of_rollout:
        return {"num_training": receipt.num_training, "head_version": next(iter(receipt.head_versions.values()))}
    adapters = sorted({head.adapter for head in receipt.head_versions} - {BASE_MODEL})
    return {
        "num_training": receipt.num_training,
        "head_versions": _versions(receipt, BASE_MODEL),
        "adapter_head_versions": {adapter: _versions(receipt, adapter) for adapter in adapters},
    }


def _versions(receipt: RewardsReceipt, adapter: str) -> dict[int, int]:
    """Head versions of an adapter, by detection length."""
    return {
        head.detection_length: version for head, version in receipt.head_versions.items() if head.adapter == adapter
    }
