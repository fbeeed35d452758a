"""Requests of vLLM's own endpoints that are turns of sessions (docs/guides/agents.md)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from vllm_rollout.kernel.api.claims import AskedRequest
from vllm_rollout.kernel.api.group_client import GroupClient
from vllm_rollout.kernel.api.group_routes import GroupRoute
from vllm_rollout.kernel.api.open_paths import refuse_on_open_path
from vllm_rollout.parts.sessions.api import turns
from vllm_rollout.parts.sessions.http.groups import OpenTurn
from vllm_rollout.parts.sessions.http.service import SessionService


class Turns:
    """Runs turns of a service's sessions."""

    def __init__(self, service: SessionService, client: GroupClient) -> None:
        self._service = service
        self._client = client

    def claim(self, asked: AskedRequest) -> AsyncGenerator[RequestOutput, None] | None:
        """Outputs of a turn. None for a request that names no session."""
        if not self._service.names_session(asked.fields):
            return None
        refuse_on_open_path(asked.fields or ("rollout_session",))
        lora: LoRARequest | None = asked.options.get("lora_request")
        turn = turns.turn_of(self._service, asked.fields, asked.prompt, asked.params, lora and lora.lora_name)  # type: ignore[arg-type]
        if turn is None:
            return turns.ended_at_once(asked.id, asked.prompt, asked.params)
        params = turns.params_of(asked.params.clone(), turn)
        params.extra_args = {key: value for key, value in (params.extra_args or {}).items() if key not in asked.fields}
        return self._run(turn, asked._replace(params=params))

    async def _run(self, turn: OpenTurn, asked: AskedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run the turn on its group's rank."""
        client, params, options = self._client, asked.params, turns.options_of(asked.options, turn)
        max_model_len = client.vllm_config.model_config.max_model_len
        prompt = await turns.compared(self._service, turn, asked.prompt, max_model_len)
        if not turns.begin(self._service, turn):
            async for output in turns.ended_at_once(asked.id, prompt, params):
                yield output
            return
        routes: list[GroupRoute] = []
        try:
            rank = options.get("data_parallel_rank")
            for engine_id in dict.fromkeys((turn.group.engine_id, turn.engine_id)):
                followed = routes[0] if routes else None
                routes.append(client.routes.join(engine_id, turns.MANY, rank, followed=followed))
                turn.group.rank = routes[0].rank
            tag = turns.tag_of(turn, params)
            in_deltas = params.output_kind == RequestOutputKind.DELTA
            candidate = client.generate_candidate(tag, prompt, params, asked.id, **options)
            async with aclosing(turns.heard(self._service, turn, candidate, in_deltas=in_deltas)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._service.leave(turn)
            for route in routes:
                client.routes.leave_joined(route, refused=False)
