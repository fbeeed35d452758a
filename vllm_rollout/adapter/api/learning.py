"""The learning half of the service's engine: rewards, quality heads, reports, state.

Invariant: what one API process is told, every data-parallel rank it can reach learns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from itertools import chain
from typing import Any

from vllm.logger import init_logger

from vllm_rollout.adapter.api.client import RolloutAsyncLLM
from vllm_rollout.adapter.api.engine_calls import EngineCalls
from vllm_rollout.adapter.api.refusals import pruning_refusal
from vllm_rollout.adapter.options import RolloutOptions
from vllm_rollout.adapter.wire import rules_report_of
from vllm_rollout.group.ledger import RewardStatus
from vllm_rollout.server.engine import (
    HeadInfo,
    LearningReport,
    RequestError,
    Reward,
    RewardsReceipt,
)

logger = init_logger("vllm.vllm_rollout")

ERROR_STATUS = {"mismatch": HTTPStatus.CONFLICT, "invalid": HTTPStatus.UNPROCESSABLE_ENTITY}


class EngineLearning(EngineCalls):
    """The part of `server.engine.Engine` that learns. Rank 0 trains; the others get its heads."""

    def __init__(self, client: RolloutAsyncLLM, options: RolloutOptions) -> None:
        super().__init__(client)
        self._budget_s = options.train_budget_s
        self._training: asyncio.Task[None] | None = None

    @property
    def pruning_refusal(self) -> str | None:
        return pruning_refusal(self._client.vllm_config)

    async def post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        posted = [[reward.prompt_id, reward.index, reward.reward, reward.positive] for reward in rewards]
        share = self._client.num_ranks > 1
        answers = await self._call("rewards", rollout_id, posted, share)
        statuses: list[RewardStatus] = ["unknown"] * len(posted)
        num_training, detection_length = 0, None
        for rank, answer in enumerate(answers):
            if answer is None:
                continue
            detection_length, rank_statuses, num_found, shared = answer
            for position, status in enumerate(rank_statuses):
                if status != "unknown":
                    statuses[position] = status
            num_training += num_found
            if shared:
                await self._call("teach", rank, shared)
        if detection_length is None:
            return None
        versions = {head.detection_length: head.version for head in await self._heads()}
        if num_training:
            self._start_training()
        return RewardsReceipt(statuses, num_training, versions.get(detection_length, 0), detection_length)

    async def quality_head(self, detection_length: int | None) -> tuple[HeadInfo, bytes]:
        heads = {head.detection_length: head for head in await self._heads() if head.version}
        length = self._choose(detection_length, heads, "a trained quality head")
        (data, *_) = await self._call("export_head", length)
        if data is None:
            raise RequestError(f"no quality head is trained for detection_length {length}.", status=404)
        return heads[length], data

    async def set_quality_head(self, weights: bytes) -> HeadInfo:
        answers = await self._call("put_head", weights)
        length = _checked(answers)
        await self._training_done()
        return next(head for head in await self._heads() if head.detection_length == length)

    async def learning_report(self, detection_length: int | None) -> LearningReport:
        ranks = await self._call("report")
        length = self._choose(detection_length, {values[0]: values for values in chain(*ranks)}, "anything learned")
        found = [values for values in chain(*ranks) if values[0] == length]
        # Every rank's calibration knows every label; verdicts, and what awaits a reward, each rank knows of itself.
        reports = [rules_report_of(values[3]) for values in found]
        report = reports[0]
        active = replace(
            report.active,
            num_scored=sum(rank.active.num_scored for rank in reports),
            num_pruned=sum(rank.active.num_pruned for rank in reports),
            tokens_saved=sum(rank.active.tokens_saved for rank in reports),
        )
        summaries = {summary[0]: summary for summary in await self._summaries()}
        head, losses = None, []
        if length in summaries:
            *fields, losses = summaries[length]
            head = HeadInfo(*fields)
        return LearningReport(
            detection_length=length,
            head=head if head is not None and head.version else None,
            signals=report.signals,
            num_awaiting=sum(values[1] for values in found),
            num_evicted=sum(values[2] for values in found),
            losses=losses,
            active=active,
            shadow=report.shadow,
        )

    async def learning_state(self) -> bytes:
        await self._training_done()
        return (await self._call("state"))[0]

    async def set_learning_state(self, state: bytes) -> None:
        _checked(await self._call("set_state", state))

    def _start_training(self) -> None:
        if self._training is None or self._training.done():
            self._training = asyncio.create_task(self._train())

    async def _train(self) -> None:
        """Ask for one slice after the other; the engine makes its steps in between."""
        try:
            while any(await self._call("train", self._budget_s)):
                pass
            if self._client.num_ranks > 1:
                await self._share_heads()
            self.after_change()
        except RequestError:  # the engine is dead, and says so everywhere else
            logger.warning("training of the quality head ended with the engine")
        except Exception:
            # Rewards were taken and calibration has learned; published heads are as they were.
            logger.exception("training of the quality head failed; it goes on with the next rewards")

    async def _training_done(self) -> None:
        if self._training is not None and not self._training.done():
            await asyncio.wait([self._training])

    async def _share_heads(self) -> None:
        for head in await self._heads():
            (data, *_) = await self._call("export_head", head.detection_length)
            if data is not None:
                _checked(await self._call("receive_head", data))

    async def _summaries(self) -> list[list[Any]]:
        return (await self._call("heads"))[0]

    async def _heads(self) -> list[HeadInfo]:
        """Of rank 0, which trains."""
        return [HeadInfo(*fields) for *fields, _ in await self._summaries()]

    def _choose(self, detection_length: int | None, known: dict[int, Any], what: str) -> int:
        named = ", ".join(map(str, sorted(known)))
        if detection_length is None:
            if len(known) == 1:
                return next(iter(known))
            if known:
                raise RequestError(
                    f"detection_length: must be given, because there are several: {named}.",
                    status=HTTPStatus.CONFLICT,
                    param="detection_length",
                )
        elif detection_length in known:
            return detection_length
        there_is = f"there is {what} for {named}" if known else f"there is not {what} yet"
        raise RequestError(
            f"detection_length: nothing for {detection_length or 'any'}; {there_is}. Run rollouts with pruning (mode "
            "shadow stops nothing) and post their rewards.",
            status=HTTPStatus.NOT_FOUND,
            param="detection_length",
        )


def _checked(answers: Sequence[Sequence[Any]]) -> Any:
    """The result of an operation that answers `["ok", result]` on every rank. Raises: RequestError otherwise."""
    for kind, result in answers:
        if kind != "ok":
            raise RequestError(f"{result}.", status=ERROR_STATUS[kind])
    return answers[0][1]
