"""The part in the API process: the service of sessions, which is in the first one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI
from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.api import server_folder
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.call_table import GIVE_UP
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.rewards.http.plan import RewardsPlan
from vllm_rollout.parts.sessions.api.claim import Turns
from vllm_rollout.parts.sessions.http.service import SessionService


class SessionsApi(ApiPart):
    """Overrides: serve."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine

    def serve(self, app: FastAPI) -> None:
        client, rollouts = self._engine.client, app.state.rollout_service
        if client.client_index:
            return
        refusals = [make(rollouts) for _, make in faces("session_refusal")]
        made = [make for _, make in faces("session_observers")]
        service = app.state.session_service = SessionService(
            partial(self._engine.calls.tell_groups, GIVE_UP),
            rollouts.part(RewardsPlan).grading,
            rollouts.rewards,
            client.rollout_metrics,
            partial(_whole_text, client.model_config),
            pruning_refusal=lambda: next(filter(None, (refusal() for refusal in refusals)), None),
            observers=[each for make in made for each in make(rollouts)],
            audit_ratio=ServeOptions.of(client.vllm_config).audit_ratio,
            begin=None if client.num_api_processes == 1 else server_folder.sessions_mark().touch,
        )
        client.claims = (Turns(service, client).claim, *client.claims)


def _whole_text(model_config: ModelConfig, token_ids: Sequence[int]) -> str:
    """Text of tokens, special tokens included."""
    return cached_tokenizer_from_config(model_config).decode(list(token_ids), skip_special_tokens=False)
