"""The learning half of the service's engine: rewards, quality heads, reports, state.

Invariant: what one API process is told, every data-parallel rank it can reach learns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from vllm.logger import init_logger

from vllm_rollout.adapter.api.client import RolloutAsyncLLM
from vllm_rollout.adapter.api.engine_calls import EngineCalls
from vllm_rollout.adapter.api.refusals import pruning_refusal
from vllm_rollout.adapter.call_table import (
    HEADS,
    LEARN_FEATURES,
    LEARN_LABELS,
    LEARNED,
    LEARNING_WINDOW,
    OPEN_HEAD,
    OPEN_STATE,
    POST_REWARDS,
    PUT_HEAD,
    PUT_STATE,
    TRAIN,
    HeadToRead,
    LearningWindow,
    PostedRewards,
    Refusal,
    RewardsProgress,
)
from vllm_rollout.adapter.options import RolloutOptions
from vllm_rollout.group.learning import rules_report
from vllm_rollout.group.ledger import Reward, RewardStatus
from vllm_rollout.group.report import HeadInfo
from vllm_rollout.server.engine import LearningReport, RequestError, RewardsReceipt

logger = init_logger("vllm.vllm_rollout")

REWARDS_PER_CALL = 512
"""Rewards in one message to an engine core, which accounts for as many of them as its time allows."""

REFUSAL_STATUS = {"mismatch": HTTPStatus.CONFLICT, "invalid": HTTPStatus.UNPROCESSABLE_ENTITY}


class EngineLearning(EngineCalls):
    """The part of `server.engine.Engine` that learns. Rank 0 trains; the others get its heads."""

    def __init__(self, client: RolloutAsyncLLM, options: RolloutOptions) -> None:
        super().__init__(client)
        self._budget_s = options.train_budget_s
        self._training: asyncio.Task[None] | None = None
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By rollout, while rewards of it are posted."""

    @property
    def pruning_refusal(self) -> str | None:
        return pruning_refusal(self._client.vllm_config)

    @property
    def is_busy(self) -> bool:
        return super().is_busy or (self._training is not None and not self._training.done())

    async def post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        return await self._to_its_end(self._post_in_turn(rollout_id, rewards))

    async def _post_in_turn(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        """Rewards of one rollout one post after the other: of two alike, one is accepted and one a duplicate."""
        turn = self._turns.setdefault(rollout_id, asyncio.Lock())
        async with turn:
            return await self._post_rewards(rollout_id, rewards)

    async def _post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        posted = await asyncio.gather(*(self._post_to(rank, rollout_id, rewards) for rank in self.living_ranks))
        known = [found for found in posted if found is not None]
        if not known:
            return None
        statuses = [
            next((found.statuses[i] for found in known if found.statuses[i] != "unknown"), "unknown")
            for i in range(len(rewards))
        ]
        num_training = sum(found.num_training for found in known)
        detection_length = known[0].detection_length
        versions = {head.detection_length: head.version for head in await self._heads()}
        if num_training:
            self._start_training()
        return RewardsReceipt(statuses, num_training, versions.get(detection_length, 0), detection_length)

    async def _post_to(self, rank: int, rollout_id: str, rewards: Sequence[Reward]) -> _Posted | None:
        """Post to one rank, as many at a time as it gets through; None when it does not know the rollout."""
        posted: _Posted | None = None
        statuses: list[RewardStatus] = []
        while len(statuses) < len(rewards):
            some = list(rewards[len(statuses) : len(statuses) + REWARDS_PER_CALL])
            progress = await self._call_if_alive(
                rank, POST_REWARDS, PostedRewards(rollout_id, some, share=self.num_ranks > 1)
            )
            if progress is None:  # not known here, or forgotten meanwhile
                statuses += ["unknown"] * (len(rewards) - len(statuses))
                break
            statuses += progress.statuses
            num_training = progress.num_training + (posted.num_training if posted else 0)
            posted = _Posted(progress.detection_length, statuses, num_training)
            await self._teach_others(rank, progress)
        return posted

    async def _teach_others(self, origin: int, progress: RewardsProgress) -> None:
        """Calibration on every other rank, the head on the first."""
        if progress.labels:
            others = [rank for rank in self.living_ranks if rank != origin]
            await asyncio.gather(*(self._call_if_alive(rank, LEARN_LABELS, progress.labels) for rank in others))
        if progress.features is not None:
            await self._call_first(LEARN_FEATURES, progress.features)

    async def quality_head(self, detection_length: int | None) -> tuple[HeadInfo, bytes]:
        heads = {head.detection_length: head for head in await self._heads() if head.version}
        length = self._choose(detection_length, heads, "a trained quality head")
        data = await self._read_head(length)
        if data is None:
            raise RequestError(f"no quality head is trained for detection_length {length}.", status=404)
        return heads[length], data

    async def set_quality_head(self, weights: bytes) -> HeadInfo:
        return await self._to_its_end(self._put_head(weights))

    async def _put_head(self, weights: bytes) -> HeadInfo:
        """On the first rank, which decides, and then on the others."""
        head = await self._call_first(PUT_HEAD, weights)
        _check([head])
        await self._put_on_others(weights)
        return head

    async def _put_on_others(self, weights: bytes) -> None:
        for rank in self.living_ranks[1:]:
            refusal = await self._call_if_alive(rank, PUT_HEAD, weights)
            if isinstance(refusal, Refusal):  # rewards are awaited there for as many other detection lengths
                logger.warning("rank %d did not take the head of the first: %s", rank, refusal.message)

    async def learning_report(self, detection_length: int | None) -> LearningReport:
        learned = list(chain(*await self._call_all(LEARNED, None)))
        length = self._choose(detection_length, {each.detection_length: each for each in learned}, "anything learned")
        # Every rank's calibration knows every label; verdicts, and what awaits a reward, each rank knows of itself.
        found = [each for each in learned if each.detection_length == length]
        windows = (await self._call_if_alive(rank, LEARNING_WINDOW, length) for rank in self.living_ranks)
        window = LearningWindow([], [])
        async for each in windows:
            if each is not None:
                window = each
                break
        num_judged, num_pruned = (sum(each.num_judged for each in found), sum(each.num_pruned for each in found))
        report = await asyncio.to_thread(rules_report, window.outcomes, num_judged, num_pruned)
        head = next((head for head in await self._heads() if head.detection_length == length), None)
        return LearningReport(
            detection_length=length,
            head=head if head is not None and head.version else None,
            signals=report.signals,
            num_awaiting=sum(each.num_awaiting for each in found),
            num_evicted=sum(each.num_evicted for each in found),
            losses=window.losses,
            active=report.active,
            shadow=report.shadow,
        )

    async def learning_state(self) -> bytes:
        await self._training_done()
        state = await self._read(OPEN_STATE, lambda reader: reader)
        assert state is not None, "there is always a state"
        return state

    async def set_learning_state(self, state: bytes) -> None:
        _check(await self._to_its_end(self._call_all(PUT_STATE, state)))

    def _start_training(self) -> None:
        if self._training is None or self._training.done():
            self._training = asyncio.create_task(self._train())

    async def _train(self) -> None:
        """Ask for one slice after the other; the engine makes its steps in between."""
        try:
            while await self._call_first(TRAIN, self._budget_s):
                pass
            if self.num_ranks > 1:
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
            data = await self._read_head(head.detection_length)
            if data is not None:
                await self._put_on_others(data)

    async def _read_head(self, detection_length: int) -> bytes | None:
        return await self._read(OPEN_HEAD, lambda reader: HeadToRead(reader, detection_length))

    async def _heads(self) -> list[HeadInfo]:
        """Of the first rank, which trains."""
        return await self._call_first(HEADS, None)

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


class _Posted(NamedTuple):
    """What became of rewards on one rank."""

    detection_length: int
    statuses: list[RewardStatus]
    num_training: int


def _check(answers: Iterable[Any]) -> None:
    """Raises: RequestError when a rank refused what was put."""
    for answer in answers:
        if isinstance(answer, Refusal):
            raise RequestError(f"{answer.message}.", status=REFUSAL_STATUS[answer.kind])
