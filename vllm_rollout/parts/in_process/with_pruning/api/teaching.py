"""Rewards for an AsyncLLM that other code has built with our scheduler and worker: verl, SkyRL, OpenRLHF."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_rollout.kernel.api.engine_calls import CalledCores, EngineCalls
from vllm_rollout.kernel.client.calls import NamedRewardLike, post_named_rewards
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.reward_door import RewardDoor
from vllm_rollout.kernel.http.rewards import NamedRewardsAnswer, NamedRewardsRequest
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.pruning.api.learning import EngineLearning
from vllm_rollout.parts.pruning.http.service import LearningService


async def teach(
    engine: AsyncLLM,
    rewards: Iterable[NamedRewardLike],
    threshold: float | None = None,
    namespace: str | None = None,
) -> NamedRewardsAnswer:
    """Post rewards of requests of `engine`, like `POST /v1/rewards`: (request_id, index, reward) each.

    The id is the one given to `generate`. The index is that of the output, 0 unless `n` asked for several. Requests
    with `rollout_detection_length` are learned from.

    `engine`: built with scheduler_cls="vllm_rollout.Scheduler" and worker_cls="vllm_rollout.Worker". `threshold`: a
    reward above it is positive. None: 0.5. `namespace`: the `rollout_namespace` of the requests. Returns when the
    quality head is trained.

    Raises: TypeError or ValueError for a reward of unknown form. RequestError for a dead engine.
    """
    config = engine.vllm_config
    cores = CalledCores(engine.engine_core, config, config.parallel_config.data_parallel_size)
    learning = EngineLearning(EngineCalls(cores))
    service = LearningService(learning, lambda model: BASE_MODEL, Metrics(CollectorRegistry()), time.monotonic)
    request = NamedRewardsRequest.model_validate(post_named_rewards(rewards, threshold, namespace).body)
    door = RewardDoor()
    door.takers.append(service.rewarded)
    answer = await door.post_named(request, client="")
    await learning.settled()
    return answer
