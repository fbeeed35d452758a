"""Our fields are refused where vLLM's --api-key guards nothing, however the path is written or mounted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.group_routes import GroupRoutes
from vllm_rollout.kernel.api.open_paths import OpenPaths
from vllm_rollout.kernel.rules.ranks import Ranks

PATHS = ("/invocations", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


class Client(RolloutAsyncLLM):
    """An engine client without engines. Overrides: __init__, shutdown."""

    def __init__(self) -> None:
        self.vllm_config: Any = SimpleNamespace(additional_config={}, scheduler_config=SimpleNamespace(max_num_seqs=4))
        self.routes = GroupRoutes(Ranks(1))
        self._refuses_prompt_logprobs = False
        self._argument_checks = ()

    def shutdown(self, *args: Any, **kwargs: Any) -> None: ...


def app_of(root_path: str = "") -> FastAPI:
    """Every path answers with what the client says of a field that cannot be."""
    app = FastAPI(root_path=root_path)
    app.add_middleware(OpenPaths)

    async def complete(request: Request) -> str:
        try:
            Client().generate("a", SamplingParams(extra_args={"rollout_redundancy": 99}), "id")
        except VLLMValidationError as error:
            return str(error)
        return "taken"

    for path in PATHS:
        app.post(path)(complete)
    return app


async def said(app: FastAPI, path: str) -> str:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await http.post(path)
        assert answer.status_code == 200
        return answer.json()


@pytest.mark.anyio
@pytest.mark.parametrize("prefix", ["", "/v1", "/mounted"])
async def test_rollout_fields_are_refused_on_a_path_that_no_key_guards(prefix: str):
    mounted, app = app_of(), FastAPI()
    app.mount(prefix or "/", mounted)
    message = await said(app, f"{prefix}/invocations")
    assert "vllm_xargs.rollout_redundancy: rollout fields are not taken on /invocations" in message
    assert "/v1/completions" in message


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS[1:])
async def test_a_guarded_path_takes_them_also_after_an_open_one(path: str):
    app = app_of()
    await said(app, "/invocations")
    assert "99" in await said(app, path)


@pytest.mark.anyio
async def test_behind_a_proxy_with_a_root_path_it_is_the_same():
    app = app_of("/proxy")
    assert "--api-key" in await said(app, "/proxy/invocations")
    assert "99" in await said(app, "/proxy/v1/completions")
