"""Steps of a trainer: roll out with pruning, check the answers, post rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from tests.parts.pruning.fakes import succeeded
from vllm_rollout.kernel.http.answers import RolloutAnswer
from vllm_rollout.kernel.http.rewards import RewardsAnswer

DETECTION_LENGTH = 8
PRUNING: Mapping[str, Any] = {"detection_length": DETECTION_LENGTH, "min_labels": 8}


def body(**fields: Any) -> dict[str, Any]:
    prompts = [{"id": name, "prompt": name} for name in ("a", "b", "c")]
    return {
        "prompts": prompts,
        "group_size": 4,
        "redundancy": 4,
        "pruning": PRUNING,
        "sampling_params": {"seed": 7, "min_tokens": 12},
        **fields,
    }


async def roll(http: httpx.AsyncClient, **fields: Any) -> RolloutAnswer:
    response = await http.post("/v1/rollouts", json=body(**fields))
    assert response.status_code == 200, response.text
    return RolloutAnswer.model_validate_json(response.content)


def rewards_of(answer: RolloutAnswer) -> list[dict[str, Any]]:
    return [
        {"prompt_id": group.prompt_id, "index": t.index, "reward": float(succeeded(t.token_ids))}
        for group in answer.groups
        for t in group.trajectories
    ]


async def post(http: httpx.AsyncClient, answer: RolloutAnswer | str, **fields: Any) -> RewardsAnswer:
    rollout_id = answer if isinstance(answer, str) else answer.id
    fields.setdefault("rewards", [] if isinstance(answer, str) else rewards_of(answer))
    response = await http.post(f"/v1/rollouts/{rollout_id}/rewards", json=fields)
    assert response.status_code == 200, response.text
    return RewardsAnswer.model_validate_json(response.content)


async def teach(http: httpx.AsyncClient, num_rollouts: int = 8, **fields: Any) -> None:
    """Roll out and reward until calibration and head know something."""
    for seed in range(num_rollouts):
        await post(http, await roll(http, **{"sampling_params": {"seed": 1000 + seed, "min_tokens": 12}, **fields}))
