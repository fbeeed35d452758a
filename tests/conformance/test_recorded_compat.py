"""Replay of trainers' requests beyond vLLM's endpoints: `--rollout-compat` answers them, and the engine is called."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Query

from vllm_rollout.parts.trainers.api.trainers import COMPAT, attach_compat

pytestmark = pytest.mark.anyio
RECORDED = Path(__file__).parents[2] / "conformance" / "recorded"
CALLS = {
    "/areal_continue_generation": ["resume_generation"],
    "/areal_pause_generation": ["pause_generation", "reset_mm_cache"],
    "/areal_update_weights": [
        "is_paused", "pause_generation", "reset_mm_cache", "collective_rpc", "resume_generation",
    ],
    "/liveness": ["collective_rpc_async"],
    "/load_lora_adapter": ["load_lora_adapter"],
    "/skyrl/v1/load_lora_adapter": ["load_lora_adapter"],
    "/update_weights": ["collective_rpc"],
}  # fmt: skip
"""By path, what the engine is asked for. /reset_prefix_cache is vLLM's, and gets its field."""


class Engine:
    """Takes every call, and remembers its name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.engine_core = self
        self.lora_requests = {"adapter": SimpleNamespace(lora_int_id=1)}

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> bool:
            self.calls.append(name)
            return False

        return call


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(rollout_compat=sorted(COMPAT), worker_extension_cls="")
    app.state.engine_client = app.state.openai_serving_models = Engine()
    app.state.rollout_service = SimpleNamespace(admin_key=None)

    @app.post("/reset_prefix_cache")
    async def reset(reset_running_requests: bool = Query(None)) -> dict[str, bool | None]:
        return {"reset_running_requests": reset_running_requests}

    attach_compat(app)
    return app


def recorded(*trainers: str) -> list[Any]:
    """Requests of these trainers to paths that vLLM lacks or understands differently."""
    return [
        pytest.param(request, id=f"{trainer}-{request['path']}")
        for trainer in trainers
        for request in json.loads((RECORDED / f"{trainer}.json").read_text())["requests"]
        if request["path"] in CALLS
    ]


@pytest.mark.parametrize("request_", recorded("verifiers", "skyrl", "areal"))
async def test_it_is_answered_and_reaches_the_engine(app, http, tmp_path, request_):
    text = json.dumps(request_.get("body", {})).replace("FOLDER", str(tmp_path))
    for folder in ("step_1", "areal_step_1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").touch()
    answer = await http.request(request_["method"], request_["path"], json=json.loads(text))
    assert answer.status_code == 200, answer.text
    assert app.state.engine_client.calls == CALLS[request_["path"]]


def test_every_path_was_really_sent():
    assert {param.values[0]["path"] for param in recorded("verifiers", "skyrl", "areal")} == set(CALLS)


async def test_skyrl_s_reset_means_what_it_says(http):
    requests = json.loads((RECORDED / "skyrl.json").read_text())["requests"]
    (body,) = (request["body"] for request in requests if request["path"] == "/reset_prefix_cache")
    assert (await http.post("/reset_prefix_cache", json=body)).json() == body
    on = {"reset_running_requests": True}
    assert (await http.post("/reset_prefix_cache", json=on)).json() == on
