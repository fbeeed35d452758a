"""A request that vLLM will refuse for want of its key is not forwarded."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_rollout.parts.front_ends.api.part import lacks_key


@pytest.mark.anyio
@pytest.mark.parametrize("root_path", ["", "/proxy"])
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "/v1/runs", "/rollouts", "/health"])
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
@pytest.mark.parametrize("key", ["", "Bearer k", "Bearer wrong", "Basic k"])
async def test_it_is_known_beforehand_whether_vllm_will_ask_for_its_key(root_path, path, method, key):
    app = FastAPI(root_path=root_path)
    assert not lacks_key(app, scope_of(root_path + path, method, key, root_path)), "a server without --api-key"
    app.add_middleware(AuthenticationMiddleware, tokens=["other", "k"])
    transport = httpx.ASGITransport(app, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.request(method, root_path + path, headers={"authorization": key} if key else {})
    assert lacks_key(app, scope_of(root_path + path, method, key, root_path)) is (answer.status_code == 401)


def scope_of(path: str, method: str, key: str, root_path: str) -> dict[str, Any]:
    headers = [(b"authorization", key.encode())] if key else []
    return {"type": "http", "method": method, "path": path, "root_path": root_path, "headers": headers}
