"""SkyRL: trajectories of SkyRL-Gym that race, each a session (docs/guides/agents.md), at a server of ours.

    class Racing(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return RacingGymGenerator(
                cfg.generator, cfg.environment.skyrl_gym, inference_engine_client, tokenizer, redundancy=8
            )

Each prompt starts `n_samples_per_prompt + redundancy` trajectories. SkyRL gets the first `n_samples_per_prompt` that
finish. Evaluation runs as in SkyRL.

Invariant: a trajectory that lost is dropped, and its environment is closed.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

from vllm_rollout import AsyncRolloutClient
from vllm_rollout.background import begin
from vllm_rollout.integrations.whole import whole
from vllm_rollout.parts.sessions.client.agent_session import AgentSession, SessionLost

_session: ContextVar[AgentSession | None] = ContextVar("session", default=None)
"""Session of the trajectory that runs in this context."""
_races: ContextVar[Mapping[str, Race] | None] = ContextVar("races", default=None)
"""Races of the batch that is generated in this context, by instance id."""


class RacingGymGenerator(SkyRLGymGenerator):
    """SkyRL's generator with spare trajectories. Overrides: generate, agent_loop, _run_in_executor_if_available."""

    def __init__(self, *args: Any, redundancy: int, **kwargs: Any) -> None:
        """`redundancy`: spare trajectories per prompt. The other arguments are SkyRL's.

        Raises: ValueError if `generator.batched` is true.
        """
        super().__init__(*args, **kwargs)
        if self.batched:
            raise ValueError("generator.batched must be false: trajectories race, which a batch has none of.")
        self.inference_engine_client = SessionClient(self.inference_engine_client)
        self._redundancy = redundancy
        self._environments: dict[str, Any] = {}
        """Environments of running trajectories by session id."""

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        metadata, races = input_batch.get("batch_metadata"), None
        if metadata is not None and metadata.training_phase == "train":
            sizes = Counter(each.instance_id for each in input_batch["trajectory_ids"] or ())
            races = {instance: Race(size) for instance, size in sizes.items()}
        _races.set(races)
        return await super().generate(input_batch, disable_tqdm)

    async def agent_loop(self, *args: Any, trajectory_id: Any = None, **kwargs: Any) -> Any:
        """Return the next trajectory that finished for this instance. The first call for an instance starts all of
        them.
        """
        races = _races.get()
        if races is None or trajectory_id is None:
            return await super().agent_loop(*args, trajectory_id=trajectory_id, **kwargs)
        race = races[trajectory_id.instance_id]
        play, called = super().agent_loop, super()._run_in_executor_if_available

        async def run(session: AgentSession) -> float:
            _session.set(session)
            has_ended = False
            try:
                output = await play(*copy.deepcopy(args), trajectory_id=trajectory_id, **kwargs)
                has_ended = True
            finally:
                environment = self._environments.pop(session.id, None)
                if not has_ended and environment is not None:
                    await called(environment.close)  # SkyRL closes it only at the end
            race.outputs[session.id] = output
            return reward_of(output)

        race.winners = race.winners or begin(self._race(race, run))
        return next(await race.winners)

    async def _race(self, race: Race, run: Any) -> Iterator[Any]:
        async with (
            AsyncRolloutClient(self.inference_engine_client.get_endpoint_url()) as client,
            aclosing(
                client.agents([None], race.size, self._redundancy, run=run, cut_turn="goes_on", history="rewritable")
            ) as groups,
        ):
            async for group in groups:
                return iter([race.outputs[each.session_id] for each in whole(group, race.size).trajectories])
        raise AssertionError("one prompt has one group")

    async def _run_in_executor_if_available(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if (session := _session.get()) is not None:
            self._environments[session.id] = func.__self__  # a method of the trajectory's environment
        return await super()._run_in_executor_if_available(func, *args, **kwargs)


class Race:
    """Trajectories of one prompt in a batch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.outputs: dict[str, Any] = {}
        self.winners: asyncio.Task[Iterator[Any]] | None = None


class SessionClient:
    """SkyRL's client. Inside a trajectory, its requests are turns of the trajectory's session."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> Any:
        session = _session.get()
        if session is None:
            return await self._client.generate(input_batch, model=model)
        output = await self._client.generate({**input_batch, "session_ids": [session.id]}, model=model)
        if output["stop_reasons"] == ["abort"]:
            raise SessionLost(session.id)
        return output

    async def finish_session(self, session_id: str) -> None:
        if _session.get() is None:  # a race is finished with its reward
            await self._client.finish_session(session_id)


def reward_of(output: Any) -> float:
    """Sum of the environment's rewards, which SkyRL keeps by token, by step or as one number."""
    steps = getattr(output, "step_outputs", [output])
    return float(sum(sum(each.reward) if isinstance(each.reward, list) else each.reward for each in steps))
