"""The part of the service's engine that learns: rewards, quality heads, reports, state.

Invariant: rewards and lengths that one API process gets reach every data-parallel rank of that process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from vllm.logger import init_logger

from vllm_rollout.background import spawn
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.api.refusals import pruning_refusal
from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.http.engine import CoreCalls, EngineStopped, RequestError
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.pruning.api.rank_calls import call_if_alive, read
from vllm_rollout.parts.pruning.calls import (
    HEADS,
    LEARN_FEATURES,
    LEARN_LABELS,
    LEARNED,
    LEARNING_WINDOW,
    OPEN_HEAD,
    OPEN_PROMPTS,
    OPEN_STATE,
    POST_REWARDS,
    PUT_HEAD,
    PUT_STATE,
    TRAIN,
    TRIED_LENGTHS,
    HeadToPut,
    HeadToRead,
    LearningWindow,
    PostedRewards,
    PromptsToRead,
    Refusal,
    RewardsProgress,
    StateToPut,
)
from vllm_rollout.parts.pruning.http.engine import KeepState, LearningPart, RewardsReceipt
from vllm_rollout.parts.pruning.options import PruningOptions
from vllm_rollout.parts.pruning.rules.advice import advise
from vllm_rollout.parts.pruning.rules.known_prompts import KnownPrompt, known_prompts
from vllm_rollout.parts.pruning.rules.learning_report import LearningReport
from vllm_rollout.parts.pruning.rules.length_trial import TriedCandidate
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey
from vllm_rollout.parts.pruning.rules.report import HeadInfo, rules_report

logger = init_logger("vllm.vllm_rollout")

REWARDS_PER_CALL = 512
"""Rewards in one message to an engine core. The core accounts for as many of them as its time allows."""

SETTLE_S = 5.0
"""Longest wait of a state for training, and longest training before its heads are shared and saved. Training never ends
while rewards keep coming."""

ANY_ROLLOUT = ""
"""Key of the lock for posts with rewards of several rollouts."""

REFUSAL_STATUS = {"mismatch": HTTPStatus.CONFLICT, "invalid": HTTPStatus.BAD_REQUEST}


class Unkept:
    """Keeps heads and states in the engine only. `state_file.py` has the version that keeps them on disk."""

    @asynccontextmanager
    async def putting_state(self, state: bytes) -> AsyncIterator[str]:
        """Around a state that is being put. Yields its file name on disk until `take`."""
        yield ""

    async def take(self, staged: str) -> None:
        """Make this the state that a restart reads."""

    @asynccontextmanager
    async def putting_head(self, put: HeadToPut) -> AsyncIterator[None]:
        """Around a head that is being put. A restart reads it unless putting fails."""
        yield


class EngineLearning(LearningPart):
    """Learning on all ranks. Rank 0 trains, and the other ranks get its heads.

    Overrides: is_busy, settled, take, put.
    """

    def __init__(self, calls: EngineCalls, options: PruningOptions | None = None) -> None:
        self._calls = calls
        self._options = options or PruningOptions.of(calls.vllm_config)
        self._training: asyncio.Task[None] | None = None
        self._has_more = False
        """True if rewards came to train on since training began its last turn."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by rollout id, held while its rewards are posted."""
        self._replacing = asyncio.Lock()
        """Held while a head or a state is put on one rank after the other."""
        self._reading = asyncio.Lock()
        """Held while data is read, because each read holds memory of the engine."""
        self.kept: Unkept = Unkept()

    @property
    def pruning_refusal(self) -> str | None:
        return pruning_refusal(self._calls.vllm_config)

    @property
    def is_busy(self) -> bool:
        """True while a head is trained or data is read."""
        return self._is_training or self._reading.locked()

    @property
    def _is_training(self) -> bool:
        return self._training is not None and not self._training.done()

    async def post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        named = [NamedReward("rollout", rollout_id, reward) for reward in rewards]
        receipt = await self._calls.to_its_end(self._post_in_turn(rollout_id, named))
        return receipt if receipt.head_versions else None

    async def post_named_rewards(self, rewards: Sequence[NamedReward]) -> RewardsReceipt:
        return await self._calls.to_its_end(self._post_in_turn(ANY_ROLLOUT, rewards))

    async def _post_in_turn(self, turn_of: str, rewards: Sequence[NamedReward]) -> RewardsReceipt:
        """Post the rewards of one rollout in order, one post after the other. If two posts are equal, one is accepted
        and one is a duplicate.
        """
        turn = self._turns.setdefault(turn_of, asyncio.Lock())
        async with turn:
            posted = await asyncio.gather(*(self._post_to(rank, rewards) for rank in self._calls.living_ranks))
            statuses = [
                next((status for status in each if status != "unknown"), "unknown")
                for each in zip(*(found.statuses for found in posted), strict=True)
            ]
            num_training = sum(found.num_training for found in posted)
            versions = {head.key: head.version for head in await self._heads()}
            self._has_more |= num_training > 0
            if num_training and not self._is_training:
                self._training = spawn(self._train(), "training of the quality head")
            heads = sorted(set().union(*(found.heads for found in posted)))
            return RewardsReceipt(statuses, num_training, {head: versions.get(head, 0) for head in heads})  # type: ignore[arg-type]

    async def _post_to(self, rank: int, rewards: Sequence[NamedReward]) -> RewardsProgress:
        """Post rewards to one rank, in portions that it can process. For a dead rank all are unknown."""
        posted = RewardsProgress(set(), [])
        share = self._calls.num_ranks > 1
        while len(posted.statuses) < len(rewards):
            some = list(rewards[len(posted.statuses) : len(posted.statuses) + REWARDS_PER_CALL])
            progress = await call_if_alive(self._calls, rank, POST_REWARDS, PostedRewards(some, share))
            if progress is None:
                posted.statuses.extend(["unknown"] * (len(rewards) - len(posted.statuses)))
                break
            posted.statuses.extend(progress.statuses)
            posted.num_training += progress.num_training
            posted.heads.update(progress.heads)
            await self._teach_others(rank, progress)
        return posted

    async def _teach_others(self, origin: int, progress: RewardsProgress) -> None:
        """Send labels to the calibration of every other rank, and features to the first rank, which trains the head."""
        if progress.labels:
            others = [rank for rank in self._calls.living_ranks if rank != origin]
            await asyncio.gather(*(call_if_alive(self._calls, rank, LEARN_LABELS, progress.labels) for rank in others))
        for features in progress.features.values():
            await self._calls.call_first(LEARN_FEATURES, features)

    async def quality_head(self, detection_length: int | None, adapter: str = BASE_MODEL) -> tuple[HeadInfo, bytes]:
        trained = [head for head in await self._heads() if head.version and head.adapter == adapter]
        heads = {head.detection_length: head for head in trained}
        length = self._choose(detection_length, heads, "trained quality head")
        data = await self._read_head(heads[length].key)
        if data is None:
            raise RequestError(f"no quality head is trained for detection_length {length}.", status=404)
        return heads[length], data

    async def set_quality_head(self, weights: bytes, adapter: str = BASE_MODEL) -> HeadInfo:
        return await self._calls.to_its_end(self._put_head(HeadToPut(weights, adapter)))

    async def _put_head(self, put: HeadToPut) -> HeadInfo:
        async with self.kept.putting_head(put):
            return await self.restore_head(put)

    async def restore_head(self, put: HeadToPut) -> HeadInfo:
        """Put a head on the first rank, then on the others. Raises: RequestError of the first rank, with nothing
        changed.
        """
        async with self._replacing:
            head = await self._calls.call_first(PUT_HEAD, put)
            _check([head])
            await self._put_on_others(put)
        return head  # type: ignore[return-value]

    async def _put_on_others(self, put: HeadToPut) -> None:
        for rank in self._calls.living_ranks[1:]:
            refusal = await call_if_alive(self._calls, rank, PUT_HEAD, put)
            if isinstance(refusal, Refusal):  # that rank awaits rewards for the maximum of other detection lengths
                logger.warning("rank %d did not take the head of the first: %s", rank, refusal.message)

    async def learning_report(self, detection_length: int | None, adapter: str = BASE_MODEL) -> LearningReport:
        learned = [each for each in chain(*await self._calls.call_all(LEARNED, None)) if each.head.adapter == adapter]
        known = {each.head.detection_length: each for each in learned}
        length = self._choose(detection_length, known, "report")
        key = HeadKey(length, adapter)
        # Every rank's calibration has every label. Verdicts and awaited rewards each rank has only of its own.
        found = [each for each in learned if each.head == key]
        windows = (await call_if_alive(self._calls, rank, LEARNING_WINDOW, key) for rank in self._calls.living_ranks)
        window = LearningWindow()
        async for each in windows:
            if each is not None:
                window = each
                break
        num_judged, num_pruned = (sum(each.num_judged for each in found), sum(each.num_pruned for each in found))
        report, advice = await asyncio.to_thread(
            lambda: (
                rules_report(window.outcomes, num_judged, num_pruned, window.audit),
                advise(window.outcomes, length),
            )
        )
        head = next((head for head in await self._heads() if head.key == key), None)
        return LearningReport(
            detection_length=length,
            head=head if head is not None and head.version else None,
            signals=report.signals,
            num_awaiting=sum(each.num_awaiting for each in found),
            num_evicted=sum(each.num_evicted for each in found),
            losses=window.losses,
            active=report.active,
            shadow=report.shadow,
            audit=report.audit,
            advice=advice,
            adapter=adapter,
        )

    async def tried_lengths(self, adapter: str = BASE_MODEL) -> list[TriedCandidate]:
        """Tried candidates from one rank, because every rank learns every label."""
        return await self._calls.call_first(TRIED_LENGTHS, adapter)

    async def known_prompts(self, adapter: str = BASE_MODEL) -> list[KnownPrompt]:
        """Known prompts from one rank, because every rank learns all lengths and rewards."""
        lines = await self._read(self._calls, OPEN_PROMPTS, lambda reader: PromptsToRead(reader, adapter))
        assert lines is not None, "it always opens"
        return await asyncio.to_thread(
            lambda: known_prompts(chain.from_iterable(msgspec.json.Decoder().decode_lines(lines)))
        )

    async def learning_state(self) -> bytes:
        if self._training is not None:
            await asyncio.wait([self._training], timeout=SETTLE_S)
        return await self.take(self._calls)

    async def set_learning_state(self, state: bytes, keep: KeepState | None = None) -> None:
        await self._calls.to_its_end(self._put_state(state, keep))

    async def _put_state(self, state: bytes, keep: KeepState | None) -> None:
        """Check a state on every rank, write it to disk, then put it on every rank. A state that passed the check is
        not refused later.
        """
        _check(await self._calls.call_all(PUT_STATE, StateToPut(state, only_check=True)))
        async with self.kept.putting_state(state) as staged:
            if keep is not None:
                await keep(staged)
            await self.kept.take(staged)
            await self.restore_state(state)

    async def restore_state(self, state: bytes) -> None:
        """Put a state on every rank. Raises: RequestError. If all ranks have the same model, nothing has
        changed then.
        """
        async with self._replacing:
            await self.put(self._calls, state)

    async def take(self, calls: CoreCalls) -> bytes:
        assert isinstance(calls, EngineCalls)
        state = await self._read(calls, OPEN_STATE, lambda reader: reader)
        assert state is not None, "there is always a state"
        return state

    async def put(self, calls: CoreCalls, taken: bytes) -> None:
        _check(await calls.call_all(PUT_STATE, StateToPut(taken, only_check=False)))

    async def _train(self) -> None:
        """Train slice by slice, while the engine makes steps in between.

        If this fails, rewards stay accounted for, calibration has learned, and published heads are unchanged. The next
        rewards start the training again.
        """
        num_left = 0
        try:
            shared = {head.key: head.version for head in await self._heads()}
            while num_left or self._has_more:
                self._has_more, num_left, share_at = False, 1, time.monotonic() + SETTLE_S
                while num_left and time.monotonic() < share_at:
                    num_left = await self._calls.call_first(TRAIN, self._options.train_budget_s)
                if self._calls.num_ranks > 1:
                    await self._share_heads(shared)
                self._calls.after_change()
        except EngineStopped:  # a dead engine is reported elsewhere
            logger.warning("training of the quality head ended with the engine")

    async def settled(self) -> None:
        """Wait until the running training is done."""
        if self._training is not None:
            await asyncio.wait([self._training])

    async def _share_heads(self, shared: dict[HeadKey, int]) -> None:
        """Put heads on the other ranks, and note their versions in `shared`. They have these versions already."""
        for head in await self._heads():
            if shared.get(head.key) == head.version:
                continue
            async with self._replacing:
                data = await self._read_head(head.key)
                if data is not None:
                    await self._put_on_others(HeadToPut(data, head.adapter))
                    shared[head.key] = head.version

    async def _read(
        self, calls: EngineCalls, open_operation: Operation[Any, Any], argument: Callable[[str], Any]
    ) -> bytes | None:
        async with self._reading:
            return await read(calls, open_operation, argument)

    async def _read_head(self, head: HeadKey) -> bytes | None:
        return await self._read(self._calls, OPEN_HEAD, lambda reader: HeadToRead(reader, head))

    async def _heads(self) -> list[HeadInfo]:
        """Heads of the first rank, which trains."""
        return await self._calls.call_first(HEADS, None)

    def _choose(self, detection_length: int | None, known: dict[int, Any], what: str) -> int:
        named = ", ".join(map(str, sorted(known)))
        if detection_length is None:
            meant = set(known) - {WHOLE} or set(known)  # whole trajectories are only meant if they are alone
            if len(meant) == 1:
                return meant.pop()
            if known:
                raise RequestError(
                    f"detection_length: must be given, because there are several: {named}.",
                    status=HTTPStatus.CONFLICT,
                    param="detection_length",
                )
        elif detection_length in known:
            return detection_length
        where = f"for {detection_length}, only for {named}" if known else "yet"
        raise RequestError(
            f"detection_length: there is no {what} {where}. Run rollouts with pruning (mode shadow stops nothing) and "
            "post their rewards.",
            status=HTTPStatus.NOT_FOUND,
            param="detection_length",
        )


def _check(answers: Iterable[Any]) -> None:
    """Raises: RequestError if a rank refused the head or state."""
    for answer in answers:
        if isinstance(answer, Refusal):
            raise RequestError(f"{answer.message}.", status=REFUSAL_STATUS[answer.kind])
