"""The part of an engine that learns, as services see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward, RewardStatus
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.pruning.rules.known_prompts import KnownPrompt
from vllm_rollout.parts.pruning.rules.learning_report import LearningReport
from vllm_rollout.parts.pruning.rules.length_trial import TriedCandidate
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.rules.report import HeadInfo


@dataclass(frozen=True, slots=True)
class RewardsReceipt:
    """The engine's answer to a list of rewards."""

    statuses: Sequence[RewardStatus]
    """One status per reward, in their order."""
    num_training: int
    """Labels that the quality head trains on now. Fewer than were accepted if features were evicted."""
    head_versions: Mapping[HeadKey, int]
    """Versions, before that training, of the known heads that learn from these rewards."""


KeepState = Callable[[str], Awaitable[None]]
"""Writes what belongs to a state. Awaited when the state was checked, before anything changes. The argument is the
state's file name, empty if it is not on disk. An exception leaves everything unchanged."""


class LearningPart(ApiPart):
    """The part of an engine that learns from rewards."""

    @property
    def pruning_refusal(self) -> str | None:
        """Reason why this engine cannot score candidates, with the remedy. None if it can."""
        raise NotImplementedError

    async def post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        """Learn from rewards: calibration at once, the quality head in the background.

        Returns None when no rollout of that id with pruning is known. Raises: EngineStopped.
        """
        raise NotImplementedError

    async def post_named_rewards(self, rewards: Sequence[NamedReward]) -> RewardsReceipt:
        """Learn from rewards for candidates of any rollouts, groups and requests. Each reward gets its own status."""
        raise NotImplementedError

    async def quality_head(self, detection_length: int | None, adapter: str = BASE_MODEL) -> tuple[HeadInfo, bytes]:
        """An adapter's quality head as safetensors. `detection_length` None: the only head there is.

        Raises: RequestError (404 without a head, 409 when the length must be named).
        """
        raise NotImplementedError

    async def set_quality_head(self, weights: bytes, adapter: str = BASE_MODEL) -> HeadInfo:
        """Put a quality head in place of the adapter's one for its detection length.

        Raises: RequestError, 400 for no head, and 409 for another hidden size or model, with both values.
        """
        raise NotImplementedError

    async def learning_report(self, detection_length: int | None, adapter: str = BASE_MODEL) -> LearningReport:
        """The quality of calibration and head so far. Raises: RequestError as `quality_head` does."""
        raise NotImplementedError

    async def tried_lengths(self, adapter: str = BASE_MODEL) -> list[TriedCandidate]:
        """Candidates that were scored at several lengths and have a reward. Raises: EngineStopped."""
        raise NotImplementedError

    async def known_prompts(self, adapter: str = BASE_MODEL) -> list[KnownPrompt]:
        """Results of each known prompt, most recent first. Raises: EngineStopped."""
        raise NotImplementedError

    async def learning_state(self) -> bytes:
        """Everything learned: calibration, heads and their optimizers. `set_learning_state` restores it."""
        raise NotImplementedError

    async def set_learning_state(self, state: bytes, keep: KeepState | None = None) -> None:
        """Replace the learning state, in the engine and on disk: whole, or not at all.

        Raises: RequestError (400 unreadable, 409 another model, with both values, 507 when the disk does not take it),
        and any error of `keep`. Nothing has changed then.
        """
        raise NotImplementedError
