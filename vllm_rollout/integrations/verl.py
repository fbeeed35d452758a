"""verl: rollouts that race, in verl's own vLLM actors. Set before verl is started, on every node:

    VERL_USE_EXTERNAL_MODULES=vllm_rollout.integrations.verl

verl imports this module, which registers a rollout replica under the name `vllm`: verl's own with our scheduler. With
`+actor_rollout_ref.rollout.custom.rollout_redundancy=8` each prompt gets eight spare candidates beside its `rollout.n`.
The agent loops get exactly `n`, the first that finish. Without this setting nothing changes. Other requests (validation
with fewer samples, later turns of an agent, images) run unchanged.

Invariant: an agent loop gets a candidate that the engine gave up only if no other one is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from vllm_rollout.adapter.names import SCHEDULER_CLS
from vllm_rollout.integrations.spares import End, Spares

FIELD = "rollout_redundancy"
"""Spare candidates per prompt: field of `rollout.custom`."""
SESSIONS = "rollout_sessions"
"""Field of `rollout.custom`. True: the engine's client has sessions, for agents that race (`verl_agents.py`)."""


def load_replica() -> type:
    """The replica class. Defined in a function, because verl's class imports vLLM."""
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    class RolloutReplica(vLLMReplica):
        """verl's replica with `RolloutServer`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(load_server())

    return RolloutReplica


def load_server() -> type:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from vllm_rollout import AsyncLLM
    from vllm_rollout.parts.sessions.client.agent_session import end_session

    class RolloutServer(vLLMHttpServer):
        """verl's vLLM actor, with our scheduler.

        Overrides: _post_init, _preprocess_engine_kwargs, run_server, generate.
        """

        def _post_init(self, *args: Any, **kwargs: Any) -> None:
            super()._post_init(*args, **kwargs)
            redundancy = redundancy_of(self.config.custom)
            self._spares: Spares[tuple[TokenOutput, int]] = Spares(self.config.n, redundancy, end_of)
            self._has_spares = redundancy > 0
            self._has_sessions = bool((self.config.custom or {}).get(SESSIONS, False))

        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            engine_kwargs.setdefault("scheduler_cls", SCHEDULER_CLS)

        async def run_server(self, *args: Any, **kwargs: Any) -> None:
            from verl.workers.rollout.vllm_rollout import vllm_async_server

            if self._has_sessions:
                vllm_async_server.AsyncLLM = AsyncLLM  # verl builds the engine's client by this name, once a process
            await super().run_server(*args, **kwargs)
            if self._has_sessions:
                await self.engine.rollouts()

        async def finish_session(self, session_id: str) -> str:
            """End a session. Returns its state. Raises: RolloutError."""
            rollouts = await self.engine.rollouts()
            return (await rollouts.ask(end_session(session_id, {}))).state

        async def generate(
            self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
        ) -> TokenOutput:
            is_turn = "rollout_session" in (sampling_params.get("extra_args") or {})
            if is_turn or not self._has_spares or not is_plain(sampling_params, kwargs):
                return await super().generate(prompt_ids, sampling_params, request_id, **kwargs)

            limit = limit_of(self.config, len(prompt_ids), sampling_params)

            async def launch(extra_args: Mapping[str, Any], number: int) -> tuple[TokenOutput, int]:
                # verl's generate takes keys out of the dictionary that it gets.
                params = {**sampling_params, "extra_args": {**sampling_params.get("extra_args", {}), **extra_args}}
                id = f"{request_id}-spare{number}" if number else request_id
                return await super(RolloutServer, self).generate(prompt_ids, params, id, **kwargs), limit

            key = (tuple(prompt_ids), repr(sorted(sampling_params.items())))  # verl may give each sample a priority
            return (await self._spares.answer(key, launch))[0]

    return RolloutServer


def redundancy_of(custom: Mapping[str, Any] | None) -> int:
    """Spare candidates per prompt. Raises: ValueError if the value is no integer of at least 0."""
    value = (custom or {}).get(FIELD, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"rollout.custom.{FIELD} must be an integer of at least 0, got {value!r}.")
    return value


def is_plain(sampling_params: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """True if candidates of equal prompts are exchangeable: the temperature is above 0 and there are no images, video
    or audio.
    """
    media = ("image_data", "video_data", "audio_data", "mm_processor_kwargs", "kv_transfer_params")
    return sampling_params.get("temperature", 1.0) > 0 and all(others.get(name) is None for name in media)


def limit_of(config: Any, num_prompt_tokens: int, sampling_params: Mapping[str, Any]) -> int:
    """Tokens after which verl's server may cut a candidate. Source: `vLLMHttpServer.generate`, verl 0.9."""
    named = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
    length = config.response_length
    asked = min(length, config.prompt_length + length - num_prompt_tokens) if named is None else named
    return max(1, min(asked, config.max_model_len - num_prompt_tokens))


def end_of(answer: tuple[TokenOutput, int]) -> End:
    """End of an output, given its length limit. verl also reports "completed" for outputs that were cut at
    the limit.
    """
    output, limit = answer
    if output.stop_reason != "completed":
        return "stopped"
    return "truncated" if len(output.token_ids) >= limit else "finished"


RolloutReplicaRegistry.register("vllm", load_replica)
