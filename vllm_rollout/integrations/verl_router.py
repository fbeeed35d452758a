"""verl's load balancer, changed to send all calls for one prompt to the same replica, where they can form a group. Name
it in a file:

    echo 'router_class: vllm_rollout.integrations.verl_router.PromptBalancer' > router.yaml
    ... actor_rollout_ref.rollout.router_config_path=router.yaml

Invariant: calls for a prompt go to the replica of the first call while any of them runs. Later calls are balanced anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer


@dataclass(slots=True)
class _Prompt:
    server_id: str
    num_calls: int = 0


class PromptBalancer(GlobalRequestLoadBalancer):
    """Keeps calls for one prompt at one replica.

    Overrides: __init__, acquire_server, release_server, require_acquire_fields, require_release_fields.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(servers))
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._calls: dict[str, list[tuple[int, ...]]] = {}
        """Prompts of running calls by request id. The turns of one agent have one id."""

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] = ()) -> tuple[str, Any]:
        key = tuple(prompt_ids)
        prompt = self._prompts.get(key)
        if prompt is not None and prompt.server_id in self._servers:
            self._request_id_to_server.setdefault(request_id, prompt.server_id)
        server_id, handle = super().acquire_server(request_id)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt(server_id)
        prompt.server_id = server_id
        prompt.num_calls += 1
        self._calls.setdefault(request_id, []).append(key)
        return server_id, handle

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        super().release_server(server_id, request_id)
        if not (calls := self._calls.get(request_id)):
            return
        key = calls.pop(0)
        if not calls:
            del self._calls[request_id]
        prompt = self._prompts[key]
        prompt.num_calls -= 1
        if not prompt.num_calls:
            del self._prompts[key]

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]
