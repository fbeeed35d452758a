"""--rollout-compat prime-rl, skyrl, areal: their calls are answered, and all other requests reach vLLM as sent."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from vllm_rollout.kernel.http import boundary
from vllm_rollout.parts.trainers.api.trainers import attach_compat, prime_rl, skyrl

pytestmark = pytest.mark.anyio
LOGPROBS = {"content": [{"token_id": 343, "logprob": -1.5, "top_logprobs": [{"token_id": 7, "logprob": -2.0}]}]}


class Client:
    """The called part of an engine client."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.engine_core = self
        self.hangs = self.paused = False

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (), kwargs=None) -> None:
        self.calls.append((method, args, kwargs))

    async def collective_rpc_async(self, method: str, timeout: float | None, args: tuple, kwargs: Any) -> None:
        self.calls.append((method, args, kwargs))
        if self.hangs:
            await asyncio.Event().wait()

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


class Models:
    """Models of an engine that refuses adapters called `bad`."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, SimpleNamespace] = {}
        self.loaded: list[bool] = []

    async def load_lora_adapter(self, request: Any) -> Any:
        from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

        self.loaded.append(request.load_inplace)
        if request.lora_name == "bad":
            return ErrorResponse(error=ErrorInfo(message="no such adapter", type="NotFoundError", code=404))
        self.lora_requests[request.lora_name] = SimpleNamespace(load_inplace=request.load_inplace, lora_int_id=7)
        return "Success"


@pytest.fixture
def app() -> FastAPI:
    """vLLM's side: routes that echo the bytes they got, and a generate endpoint."""
    app = FastAPI()
    app.state.args = Namespace(rollout_compat=["prime-rl", "skyrl", "areal"], worker_extension_cls="")
    app.state.engine_client, app.state.openai_serving_models = Client(), Models()
    app.state.rollout_service = SimpleNamespace(admin_key=None)
    app.exception_handler(RequestValidationError)(lambda *_: JSONResponse({}, HTTPStatus.BAD_REQUEST))

    @app.post("/update_weights")
    async def stock(request: Request) -> Response:
        return Response(await request.body())

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        if (await request.json()).get("stream"):
            return StreamingResponse(iter([json.dumps(LOGPROBS)]), media_type="text/event-stream")
        text = 'says "token_id":5'
        return JSONResponse({"choices": [{"token_ids": [343], "logprobs": LOGPROBS, "text": text}]})

    @app.post("/reset_prefix_cache")
    async def reset(request: Request, reset_running_requests: bool = Query(False), reset_external: bool = Query(False)):
        body = await request.body()
        return {"running": reset_running_requests, "external": reset_external, "body": body.decode()}

    attach_compat(app)
    return app


async def test_weights_come_out_of_the_folder_that_is_named(app, http, tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    answer = await http.post("/update_weights", json={"weight_dir": str(tmp_path)})
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert app.state.engine_client.calls == [("reload_weights", (), {"weights_path": str(tmp_path)})]


@pytest.mark.parametrize("files", [[], None, ["training_args.bin"]], ids=["empty", "missing", "a trainer's"])
async def test_a_folder_without_weights_does_not_reach_the_model(app, http, tmp_path, files):
    folder = tmp_path / "step_1"
    if files is not None:
        folder.mkdir()
    for name in files or ():
        (folder / name).touch()
    answer = await http.post("/update_weights", json={"weight_dir": str(folder)})
    assert answer.status_code == 503
    assert str(folder) in answer.json()["error"]["message"]
    assert app.state.engine_client.calls == []


@pytest.mark.parametrize("folder", [3, "", ["a"], True])
async def test_what_is_no_folder_is_refused_with_its_value(app, http, folder):
    answer = await http.post("/update_weights", json={"weight_dir": folder})
    assert answer.status_code == 400
    assert repr(folder) in answer.json()["error"]["message"]
    assert app.state.engine_client.calls == []


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        *((path, body, said) for path in ("/prime_rl/update_weights", "/init_broadcaster", "/areal_update_weights")
          for body, said in ((b"[]", "JSON object"), (b"x", "not JSON"), (b"{}", "required"), (b"", "body"))),
        ("/update_weights", b'{"weight_dir": "%s"}' % (b"x" * 5000), "at most 4096 bytes"),
        ("/update_weights", b'{"weight_dir": "\\ud800"}', "must be UTF-8"),
        ("/update_weights", b'{"weight_dir": "a\\u0000b"}', "without a zero byte"),
        ("/init_broadcaster", b'{"host": "h", "port": "no"}', "port"),
        ("/areal_update_weights", b'{"model_path": "\\ud800"}', "must be UTF-8"),
        ("/areal_update_weights", b'{"model_path": ""}', "not empty, got ''"),
        ("/load_lora_adapter", b'{"lora_name": "\\ud800", "lora_path": "/a"}', "lora_name"),
        ("/skyrl/v1/load_lora_adapter", b'{"lora_name": "a", "lora_path": "\\ud800"}', "lora_path"),
    ],
)  # fmt: skip
async def test_a_body_that_cannot_be_used_is_refused_before_anything_happens(app, http, path, body, said):
    app.state.args.worker_extension_cls = "a.trainers.Extension"
    answer = await http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    assert app.state.engine_client.calls == []


async def test_a_folder_that_cannot_be_read_is_none(http):
    answer = await http.post("/update_weights", json={"weight_dir": "/" + "x" * 300})
    assert answer.status_code == 503
    assert "cannot be read" in answer.json()["error"]["message"]


async def test_a_broadcast_needs_the_trainer_s_worker_extension(app, http):
    broadcast = {"host": "h", "port": 1, "rank_offset": 0, "inference_world_size": 2, "timeout": 3}
    assert (await http.post("/update_weights", json={"weight_dir": None})).status_code == 400
    assert (await http.post("/init_broadcaster", json=broadcast)).status_code == 404
    assert app.state.engine_client.calls == []
    app.state.args.worker_extension_cls = "a.trainers.Extension"
    assert (await http.post("/init_broadcaster", json=broadcast)).status_code == 200
    assert (await http.post("/update_weights", json={"weight_dir": None})).status_code == 200
    assert app.state.engine_client.calls == [
        ("init_broadcaster", ("h", 1, 0, 2, 3, False, "default"), None),
        ("update_weights_from_path", (None,), None),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b'{"update_info": {"names": ["a"]}}',
        b'{"update_info": {"weight_dir": "/x"}}',
        b'{"weight_dir": "/x", "update_info": {}}',
        b'["weight_dir"]',
        b'{"weight_dir"',
        b"\xff\xfe",
        b"",
    ],
)
async def test_any_other_body_reaches_vllm_as_it_was_sent(http, body):
    async def in_parts() -> AsyncIterator[bytes]:
        for at in range(len(body)):
            yield body[at : at + 1]

    assert (await http.post("/update_weights", content=in_parts())).content == body


async def test_a_body_above_the_limit_is_vllms(http, monkeypatch):
    monkeypatch.setattr(boundary, "MAX_BODY_BYTES", 10)
    body = b'{"weight_dir": "/x"}'
    assert (await http.post("/update_weights", content=body)).content == body
    assert (await http.post("/reset_prefix_cache", content=body)).json()["body"] == body.decode()


@pytest.mark.parametrize("path", ["/update_weights", "/proxy/update_weights"])
async def test_behind_a_proxy_with_a_root_path_it_is_the_same(app, http, tmp_path, path):
    (tmp_path / "model.safetensors").touch()
    app.root_path = "/proxy"
    answer = await http.post(path, json={"weight_dir": str(tmp_path)})
    assert answer.json() == {"status": "ok"}
    assert len(app.state.engine_client.calls) == 1


async def test_log_probabilities_name_their_tokens_as_before_vllm_0_32(http):
    answer = (await http.post("/inference/v1/generate", json={})).json()
    (choice,) = answer["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["token_id"], entry["logprob"]) == ("token_id:343", 343, -1.5)
    assert entry["top_logprobs"][0]["token"] == "token_id:7"
    assert choice["text"] == 'says "token_id":5'
    assert choice["token_ids"] == [343]


async def test_two_trainers_that_want_token_names_get_them_once():
    app = FastAPI()
    app.state.args = Namespace(rollout_compat=["trl", "prime-rl"])
    attach_compat(app)
    assert [middleware.cls for middleware in app.user_middleware].count(prime_rl.TokenNames) == 1


async def test_trl_gets_token_names_and_nothing_else_of_prime_rl():
    app = FastAPI()
    app.state.args = Namespace(rollout_compat=["trl"])
    before = list(app.routes)
    attach_compat(app)
    assert app.routes == before
    assert [middleware.cls for middleware in app.user_middleware] == [prime_rl.TokenNames]


async def test_a_stream_is_passed_on_as_it_is(http):
    answer = await http.post("/inference/v1/generate", json={"stream": True})
    assert json.loads(answer.content) == LOGPROBS


async def test_an_adapter_is_loaded_anew_under_its_name_and_only_once(app, http):
    for _ in range(2):
        answer = await http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
        assert answer.json() == {"status": "ok"}
    assert app.state.openai_serving_models.loaded == [True, True]


async def test_an_adapter_that_vllm_refuses_is_refused_as_vllm_does(http):
    answer = await http.post("/load_lora_adapter", json={"lora_name": "bad", "lora_path": "/a"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such adapter")


async def test_liveness_sees_an_engine_that_hangs(app, http, monkeypatch):
    assert (await http.get("/liveness")).json() == {"status": "ok"}
    assert app.state.engine_client.calls == [("check_health", (), None)]
    monkeypatch.setattr(prime_rl, "LIVENESS_TIMEOUT_S", 0.01)
    app.state.engine_client.hangs = True
    assert (await http.get("/liveness")).status_code == 503


async def test_without_the_flag_nothing_is_added():
    app = FastAPI()
    app.state.args = Namespace(model="m")
    before = list(app.routes)
    attach_compat(app)
    assert (app.routes, app.user_middleware) == (before, [])


# -- skyrl, areal


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
    for body in (b'{"reset_running_requests": "never"}', b'{"reset_running_requests": "\\ud800"}'):
        assert (await http.post("/reset_prefix_cache", content=body)).status_code == 400


async def test_an_adapter_is_loaded_under_its_name(app, http):
    answer = await http.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
    assert answer.json() == {"status": "ok", "lora_name": "a", "lora_int_id": 7}
    assert (await http.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "a"})).status_code == 400


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
    loaded = ("reload_weights", (), {"weights_path": str(tmp_path)})
    assert client.calls == [*ABORTED, loaded, *([] if was_paused else ["resume"])]
    assert client.paused is was_paused


async def test_a_folder_without_weights_is_refused_and_generation_goes_on(app, http, tmp_path):
    answer = await http.post("/areal_update_weights", json={"model_path": str(tmp_path)})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert str(tmp_path) in answer.json()["message"]
    assert app.state.engine_client.calls == [], "no request is aborted for it"


async def test_generation_goes_on_when_the_stop_for_new_weights_fails(app, http, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()
    client = app.state.engine_client

    async def fails() -> None:
        raise RuntimeError("no cache")

    monkeypatch.setattr(client, "reset_mm_cache", fails)
    assert (await http.post("/areal_update_weights", json={"model_path": str(tmp_path)})).status_code == 500
    assert client.paused is False


@pytest.mark.parametrize("read", [skyrl.query_of, prime_rl.names_a_folder])
def test_a_body_too_deep_to_be_read_is_vllms_to_refuse(read):
    assert not read(b"[" * 100_000)
