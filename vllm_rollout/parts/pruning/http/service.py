"""Learning over HTTP: takes rewards, gives heads and reports. Invariant: every posted reward gets a status of its
own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES, REPORT_INTERVAL_S
from vllm_rollout.kernel.http.clients import owned_name
from vllm_rollout.kernel.http.engine import (
    EngineStopped,
    LearningPart,
    LearningReport,
    RequestError,
    RewardsReceipt,
)
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.rewards import (
    NamedRewardResult,
    NamedRewardsAnswer,
    NamedRewardsRequest,
    RewardCounts,
    RewardEntry,
    RewardResult,
    RewardsAnswer,
    RewardsRequest,
)
from vllm_rollout.kernel.http.slices import each
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward
from vllm_rollout.kernel.rules.types import BASE_MODEL, HeadKey
from vllm_rollout.parts.pruning.http.metrics import PruningMetrics
from vllm_rollout.parts.pruning.http.prompts import PromptsAnswer, prompts_page
from vllm_rollout.parts.pruning.rules.known_prompts import PromptOrder
from vllm_rollout.parts.pruning.rules.length_trial import LengthTrialReport, length_trial_report
from vllm_rollout.parts.pruning.rules.report import HeadInfo

logger = logging.getLogger("vllm.vllm_rollout")


class LearningService:
    """Serves the endpoints that learn, from an engine."""

    def __init__(
        self,
        learning: LearningPart,
        adapter_name: Callable[[str | None], str],
        metrics: Metrics,
        clock: Callable[[], float],
        on_rewards: Callable[[str, list[Reward]], None] = lambda rollout_id, rewards: None,
    ) -> None:
        """`adapter_name`: the adapter that is served under a model's name (`Engine.adapter_name`). `on_rewards`:
        called with rewards that a trainer has posted and that were accepted."""
        self._learning = learning
        self._adapter_name = adapter_name
        self._on_rewards = on_rewards
        self._metrics = metrics.of(PruningMetrics)
        self._clock = clock
        self._reported: dict[HeadKey, float] = {}
        """Time when the gauges of each head were last set, by the service's clock."""

    @property
    def pruning_refusal(self) -> str | None:
        """Reason why candidates cannot be scored here. None if they can."""
        return self._learning.pruning_refusal

    async def post_rewards(
        self, rollout_id: str, request: RewardsRequest, namespace: str = "", *, by_server: bool = False
    ) -> RewardsAnswer:
        """Post rewards of a rollout. `namespace`: of the client that owns it. Raises: RequestError (404) for an
        unknown rollout."""
        rewards = await each(request.rewards, lambda entry: entry.judged(request.threshold))
        receipt = await self._learning.post_rewards(owned_name(namespace, rollout_id), rewards)
        if receipt is None:
            raise RequestError(
                f"no rollout {rollout_id!r} of yours is known here that was asked for with pruning. This server "
                f"remembers the newest rollouts with pruning, up to {MAX_REMEMBERED_CANDIDATES} candidates, until it "
                "ends. Take the id from the rollout's answer, and post rewards before the next restart.",
                status=HTTPStatus.NOT_FOUND,
                param="rollout_id",
            )
        if not by_server:
            posted = zip(rewards, receipt.statuses, strict=True)
            self._on_rewards(rollout_id, [reward for reward, status in posted if status == "accepted"])
        await self._posted(receipt, rewards)
        results = await each(zip(request.rewards, receipt.statuses, strict=True), lambda pair: RewardResult.of(*pair))
        return RewardsAnswer(
            id=rollout_id,
            results=results,
            counts=RewardCounts.of(receipt.statuses),
            threshold=request.threshold,
            num_training=receipt.num_training,
            head_version=next(iter(receipt.head_versions.values())),
        )

    async def teach(self, rollout_id: str, rewards: list[RewardEntry], threshold: float, namespace: str = "") -> int:
        """Post rewards that the server has computed itself. Returns the number of rewards for unknown candidates.

        No answer reports these, so they are logged and counted. A dead engine is ignored.
        """
        try:
            request = RewardsRequest(rewards=rewards, threshold=threshold)
            answer = await self.post_rewards(rollout_id, request, namespace, by_server=True)
            num_unknown = answer.counts.unknown
        except EngineStopped:
            return 0
        except RequestError as error:
            self._metrics.rewards_posted(["unknown"] * len(rewards), [entry.judged(threshold) for entry in rewards])
            num_unknown = len(rewards)
            logger.warning("vllm_rollout: rewards of %s: %s", rollout_id, error)
        _warn_of_unknown(num_unknown, rollout_id)
        return num_unknown

    async def teach_named(self, rewards: Sequence[NamedReward]) -> None:
        """Post rewards that the server has computed for candidates behind the OpenAI endpoints."""
        try:
            receipt = await self._learning.post_named_rewards(rewards)
        except EngineStopped:
            return
        await self._posted(receipt, [named.reward for named in rewards])
        _warn_of_unknown(receipt.statuses.count("unknown"), "an OpenAI answer")

    async def post_named_rewards(self, request: NamedRewardsRequest, client: str) -> NamedRewardsAnswer:
        """Post rewards for candidates of any requests and groups. Clients can only name their own."""
        namespace = request.namespace or ""
        rewards = await each(request.rewards, lambda entry: entry.named(request.threshold, client, namespace))
        receipt = await self._learning.post_named_rewards(rewards)
        await self._posted(receipt, [named.reward for named in rewards])
        pairs = zip(request.rewards, receipt.statuses, strict=True)
        results = await each(pairs, lambda pair: NamedRewardResult.of(*pair))
        return NamedRewardsAnswer(
            results=results,
            counts=RewardCounts.of(receipt.statuses),
            threshold=request.threshold,
            num_training=receipt.num_training,
            head_versions=_versions(receipt, BASE_MODEL),
            adapter_head_versions={
                adapter: _versions(receipt, adapter)
                for adapter in sorted({head.adapter for head in receipt.head_versions} - {BASE_MODEL})
            },
        )

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
        except RequestError:
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

    async def _posted(self, receipt: RewardsReceipt, rewards: Sequence[Reward]) -> None:
        self._metrics.rewards_posted(receipt.statuses, rewards)
        reports = [await self.report_if_any(head) for head in receipt.head_versions if self._is_due(head)]
        self._metrics.learning_reported(report for report in reports if report is not None)

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


def _versions(receipt: RewardsReceipt, adapter: str) -> dict[int, int]:
    """Head versions of an adapter, by detection length."""
    return {
        head.detection_length: version for head, version in receipt.head_versions.items() if head.adapter == adapter
    }


def not_empty(body: bytes, wanted: str) -> bytes:
    if not body:
        raise RequestError(f"the body is empty. Send {wanted} as application/octet-stream.")
    return body
