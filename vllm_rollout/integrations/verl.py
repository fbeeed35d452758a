"""verl: rollouts that race, in verl's own vLLM actors. Set before verl is started, on every node:

    VERL_USE_EXTERNAL_MODULES=vllm_rollout.integrations.verl

verl imports this module, which registers another rollout replica under the name `vllm`: verl's own, whose engines have
our scheduler. With `+actor_rollout_ref.rollout.custom.rollout_redundancy=8` each prompt gets eight spare candidates
beside its `rollout.n`, and the agent loops exactly `n`, the first that finish; without it nothing changes. Other
requests (validation with fewer samples, later turns of an agent, images) run as they would.

Invariant: an agent loop sees a candidate that the engine gave up only when nothing else is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from vllm_rollout.adapter.names import SCHEDULER_CLS
from vllm_rollout.integrations.spares import End, Spares

FIELD = "rollout_redundancy"
"""In `rollout.custom`."""
SESSIONS = "rollout_sessions"
"""The same: the engine's client knows sessions, for agents that race (`verl_agents.py`)."""


def load_replica() -> type:
    """The replica class; here, because verl's imports vLLM."""
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    class RolloutReplica(vLLMReplica):
        """verl's replica, with another server."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(load_server())

    return RolloutReplica


def load_server() -> type:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from vllm_rollout import AsyncLLM
    from vllm_rollout.server.sessions.body import FinishRequest

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

        async def finish_session(self, session_id: str, reward: float | None = None, void: bool = False) -> str:
            """A session is over; returns what has become of it. Raises: RequestError."""
            return (await self.engine.sessions.finish(session_id, FinishRequest(reward=reward, void=void))).state

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

            key = (tuple(prompt_ids), repr(sorted(sampling_params.items())), kwargs.get("priority"))
            return (await self._spares.answer(key, launch))[0]

    return RolloutServer


def redundancy_of(custom: Mapping[str, Any] | None) -> int:
    """Raises: ValueError."""
    value = (custom or {}).get(FIELD, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"rollout.custom.{FIELD} must be an integer of at least 0, got {value!r}.")
    return value


def is_plain(sampling_params: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether a request's candidates are exchangeable with those of the same tokens: no images, and chance at work."""
    media = ("image_data", "video_data", "audio_data", "mm_processor_kwargs", "kv_transfer_params")
    return sampling_params.get("temperature", 1.0) > 0 and all(others.get(name) is None for name in media)


def limit_of(config: Any, num_prompt_tokens: int, sampling_params: Mapping[str, Any]) -> int:
    """Tokens at which verl's server lets a candidate be cut. Source: `vLLMHttpServer.generate`, verl 0.9."""
    named = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
    length = config.response_length
    asked = min(length, config.prompt_length + length - num_prompt_tokens) if named is None else named
    return max(1, min(asked, config.max_model_len - num_prompt_tokens))


def end_of(answer: tuple[TokenOutput, int]) -> End:
    """How an output ended, given the limit of its length: verl calls one that was cut there completed too."""
    output, limit = answer
    if output.stop_reason != "completed":
        return "stopped"
    return "truncated" if len(output.token_ids) >= limit else "finished"


RolloutReplicaRegistry.register("vllm", load_replica)
