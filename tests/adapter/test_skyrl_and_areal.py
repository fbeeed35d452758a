"""--compat skyrl and --compat areal: what they ask for reaches the engine as they mean it."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Query, Request

from vllm_rollout.adapter.api.trainers.trainers import attach_compat

pytestmark = pytest.mark.anyio


class Client:
    """What of the engine client is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.paused = False
        self.calls.append("resume")

    async def reset_mm_cache(self) -> None:
        self.calls.append("reset_mm_cache")

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append((method, kwargs, self.paused))


class Models:
    def __init__(self) -> None:
        self.lora_requests: dict[str, SimpleNamespace] = {}

    async def load_lora_adapter(self, request: Any) -> str:
        self.lora_requests[request.lora_name] = SimpleNamespace(load_inplace=request.load_inplace, lora_int_id=3)
        return "Success"


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(compat=["skyrl", "areal"])
    app.state.engine_client, app.state.openai_serving_models = Client(), Models()
    app.state.rollout_service = SimpleNamespace(admin_key=None)

    @app.post("/reset_prefix_cache")
    async def reset(request: Request, reset_running_requests: bool = Query(False), reset_external: bool = Query(False)):
        body = await request.body()
        return {"running": reset_running_requests, "external": reset_external, "body": body.decode()}

    attach_compat(app)
    return app


@pytest.mark.parametrize(
    ("query", "body", "expected"),
    [
        ("", '{"reset_running_requests": true}', (True, False)),
        ("", '{"reset_running_requests": false}', (False, False)),
        ("?reset_external=true", '{"reset_running_requests": true}', (True, True)),
        ("?reset_running_requests=false", '{"reset_running_requests": true}', (False, False)),
        ("?reset_running_requests=true", "", (True, False)),
        ("", "", (False, False)),
        ("", '["reset_running_requests"]', (False, False)),
        ("", '{"reset_running', (False, False)),
    ],
)
async def test_the_field_of_a_reset_is_taken_out_of_the_body_unless_the_query_has_it(http, query, body, expected):
    answer = (await http.post(f"/reset_prefix_cache{query}", content=body)).json()
    assert (answer["running"], answer["external"], answer["body"]) == (*expected, body)


async def test_a_reset_field_that_is_no_boolean_is_refused_as_vllm_does(http):
    assert (await http.post("/reset_prefix_cache", json={"reset_running_requests": "never"})).status_code == 422


async def test_an_adapter_is_loaded_under_its_name_and_not_in_every_step(app, http):
    answer = await http.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
    assert answer.json() == {"status": "ok", "lora_name": "a", "lora_int_id": 3}
    assert app.state.openai_serving_models.lora_requests["a"].load_inplace is False
    assert (await http.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "a"})).status_code == 422


ABORTED = [("pause", "abort", True), "reset_mm_cache"]


async def test_a_pause_aborts_and_lasts_until_it_is_ended(app, http):
    assert (await http.post("/areal_pause_generation", json={})).json()["success"] is True
    assert app.state.engine_client.calls == ABORTED
    assert (await http.post("/areal_continue_generation", json={})).json()["success"] is True
    assert app.state.engine_client.calls == [*ABORTED, "resume"]


@pytest.mark.parametrize("was_paused", [False, True])
async def test_weights_come_while_nothing_is_generated_and_a_pause_lasts(app, http, tmp_path, was_paused):
    (tmp_path / "model.safetensors").touch()
    client = app.state.engine_client
    client.paused = was_paused
    answer = await http.post("/areal_update_weights", json={"model_path": str(tmp_path)})
    assert answer.json()["success"] is True
    loaded = ("reload_weights", {"weights_path": str(tmp_path)}, True)
    assert client.calls == [*ABORTED, loaded, *([] if was_paused else ["resume"])]
    assert client.paused is was_paused


async def test_a_folder_without_weights_is_refused_and_generation_goes_on(app, http, tmp_path):
    answer = await http.post("/areal_update_weights", json={"model_path": str(tmp_path)})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert str(tmp_path) in answer.json()["message"]
    assert app.state.engine_client.paused is False
