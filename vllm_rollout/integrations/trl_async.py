"""TRL's AsyncGRPO: conversations race, each a session (docs/guides/agents.md). Give the trainer this worker:

    worker = RacingRolloutWorker(group_size=8, num_generations=16, ...)  # the others as TRL's AsyncRolloutWorker
    AsyncGRPOTrainer(..., rollout_worker=worker)

Each prompt starts `num_generations` conversations. The first `group_size` that finish are scored. The engine stops the
turns of the others.

Invariant: a conversation that lost is neither scored nor trained on.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any
from uuid import uuid4

import trl

try:
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutGroup, _AsyncRolloutLoop
except ImportError as error:
    raise ImportError(
        f"vllm_rollout.integrations.trl_async needs TRL with trl.experimental.async_grpo (1.14 to 1.16), got "
        f"{trl.__version__}. Install one of those, or use GRPOTrainer with vllm_rollout.integrations.trl."
    ) from error

from vllm_rollout.parts.sessions.client.agent_session import UNWANTED, SessionLost

LOST: tuple[Any, ...] = ([], [], [], 0, 0, None)
"""Result for TRL of a conversation that lost."""
_turn_fields: ContextVar[dict[str, Any] | None] = ContextVar("turn_fields", default=None)
"""Extra fields of the turns of the conversation that runs in this context."""


class RacingRolloutLoop(_AsyncRolloutLoop):
    """TRL's loop, in the worker's process. `group_size` conversations per prompt are kept. Overrides: _generate_one,
    _post, _score_group.
    """

    def __init__(self, *, group_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 < group_size <= self.num_generations:
            raise ValueError(
                f"group_size must be in [1, num_generations ({self.num_generations})], got {group_size}. "
                "num_generations counts the spare conversations too."
            )
        self._group_size = group_size
        self._name = uuid4().hex

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        session = uuid4().hex
        its_fields = {
            "rollout_group_id": f"{self._name}-{group_id}",
            "rollout_group_size": self._group_size,
            "rollout_num_candidates": self.num_generations,
            "rollout_session": session,
            "rollout_history": "rewritable",  # TRL writes all messages anew for each turn
            "rollout_cut_turn": "goes_on",
        }
        _turn_fields.set(its_fields)  # each call is a task, with a context of its own
        try:
            result = await super()._generate_one(prompt, tool_dict, tools, group_id)
            said = await super()._post(f"/v1/sessions/{session}/finish", {}, self.request_timeout)
        except SessionLost:
            return LOST
        return result if said["state"] == "finished" else LOST

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        xargs = _turn_fields.get()
        output = await super()._post(path, {**payload, "vllm_xargs": xargs} if xargs else payload, timeout, max_retries)
        for choice in output.get("choices", ()):
            if choice["finish_reason"] == "abort" and choice.get("stop_reason") in UNWANTED:
                raise SessionLost(choice["stop_reason"])
        return output

    async def _score_group(self, group: RolloutGroup) -> Any:
        won = [place for place, token_ids in enumerate(group.completions_ids) if token_ids]

        def of_winners(values: list[Any]) -> list[Any]:
            return [values[place] for place in won] if values else []

        rows = {each.name: getattr(group, each.name) for each in fields(group)}
        rows = {name: of_winners(value) for name, value in rows.items() if isinstance(value, list)}
        columns = {name: of_winners(values) for name, values in group.reward_kwargs.items()}
        return await super()._score_group(replace(group, **rows, reward_kwargs=columns))


class RacingRolloutWorker(AsyncRolloutWorker):
    """TRL's worker with `RacingRolloutLoop`."""

    _loop_cls = RacingRolloutLoop
