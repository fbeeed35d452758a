"""New weights for a server: what the client asks, and the endpoint that computes KV again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm.model_executor.model_loader.weight_utils import filter_files_not_needed_for_inference

from tests.kernel.http.fake_engine import MODEL, FakeEngine
from tests.support.waiting import eventually
from vllm_rollout import AsyncRolloutClient, RolloutClient, RolloutError
from vllm_rollout.kernel.rules.request_names import names_of_request
from vllm_rollout.weight_files import OF_TRAINING, has_weights

LOAD, NAME, RECOMPUTE = "/collective_rpc", "/update_weight_version", "/v1/weights/recompute"
LOAD_ADAPTER, NAME_ADAPTER = "/v1/load_lora_adapter", "/v1/weights/adapter_version"


class Routes:
    """vLLM's routes, of which some fail, and what was asked of them."""

    def __init__(self, **statuses: int) -> None:
        self.asked: list[str] = []
        self.bodies: dict[str, bytes] = {}
        self._statuses = {f"/{path}": status for path, status in statuses.items()}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        self.bodies[path] = request.content
        return httpx.Response(self._statuses.get(path, 200), json={})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def give(routes: Routes, weights: Path | Callable[[], object]) -> str | None:
    with RolloutClient(transport=httpx.MockTransport(routes)) as client:
        return client.give_weights(weights, "step-3").version


def test_a_folder_is_read_by_the_server_between_pause_and_resume(folder: Path) -> None:
    routes = Routes()
    assert give(routes, folder) == "step-3"
    assert routes.asked == ["/pause", LOAD, NAME, RECOMPUTE, "/resume"]
    assert str(folder).encode() in routes.bodies[LOAD]
    assert b"step-3" in routes.bodies[NAME]


def test_kv_of_answers_that_run_is_kept_where_that_is_asked_for(folder: Path) -> None:
    routes = Routes()
    with RolloutClient(transport=httpx.MockTransport(routes)) as client:
        client.give_weights(folder, "step-3", kv="keep")
        with pytest.raises(ValueError, match='kv must be "keep" or "recompute", got \'drop\''):
            client.give_weights(folder, "step-3", kv="drop")
    assert routes.asked == ["/pause", LOAD, NAME, "/resume"]


def test_an_adapters_weights_take_the_place_of_those_of_its_name(folder: Path) -> None:
    routes = Routes()
    with RolloutClient(transport=httpx.MockTransport(routes)) as client:
        client.give_weights(folder, "step-3", kv="keep", adapter="sql")
        with pytest.raises(ValueError, match="weights of the adapter 'sql' must be a folder, got a function"):
            client.give_weights(lambda: None, "step-3", adapter="sql")
    assert routes.asked == ["/pause", LOAD_ADAPTER, NAME_ADAPTER, "/resume"]
    assert json.loads(routes.bodies[NAME_ADAPTER]) == {"adapter": "sql", "version": "step-3"}
    assert json.loads(routes.bodies[LOAD_ADAPTER]) == {
        "lora_name": "sql", "lora_path": str(folder), "load_inplace": True,
    }  # fmt: skip
    refuses = httpx.MockTransport(Routes(**{LOAD_ADAPTER.removeprefix("/"): 404}))
    with RolloutClient(transport=refuses) as client, pytest.raises(RolloutError, match="RUNTIME_LORA_UPDATING=1"):
        client.give_weights(folder, "step-3", adapter="sql")


def test_a_function_sends_while_the_server_pauses() -> None:
    routes = Routes()
    give(routes, lambda: routes.asked.append("sent"))
    expected = ["/pause", "sent", NAME, RECOMPUTE, "/resume"]
    assert routes.asked == expected

    async def give_async() -> None:
        async with AsyncRolloutClient(transport=httpx.MockTransport(again)) as client:
            await client.give_weights(lambda: again.asked.append("sent"), "step-3")

    again = Routes()
    asyncio.run(give_async())
    assert again.asked == expected


def test_an_async_function_is_waited_for_and_needs_the_async_client() -> None:
    routes = Routes()

    async def send() -> None:
        await asyncio.sleep(0)
        routes.asked.append("sent")

    async def give_async() -> None:
        async with AsyncRolloutClient(transport=httpx.MockTransport(routes)) as client:
            await client.give_weights(send, "step-3")

    asyncio.run(give_async())
    assert routes.asked == ["/pause", "sent", NAME, RECOMPUTE, "/resume"]
    routes.asked.clear()
    with pytest.raises(TypeError, match="AsyncRolloutClient"):
        give(routes, send)
    assert routes.asked == ["/pause", "/resume"]


def test_who_is_cancelled_leaves_no_server_paused_and_no_thread_that_sends() -> None:
    """While the server pauses, and while the weights are sent."""
    asked: list[str] = []

    async def give_async(during: str) -> None:
        may_go_on = threading.Event()

        async def slow(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            if request.url.path == during:
                await asyncio.sleep(60)
            return httpx.Response(200, json={"success": True})

        def send() -> None:
            asked.append("begun")
            may_go_on.wait(60)
            asked.append("sent")

        async with AsyncRolloutClient(transport=httpx.MockTransport(slow)) as client:
            giving = asyncio.create_task(client.give_weights(send, "step-3"))
            await eventually(lambda: during in asked, every_s=0.001)
            giving.cancel()
            await asyncio.sleep(0.05)
            may_go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await giving

    asyncio.run(give_async("/pause"))
    assert asked == ["/pause", "/resume"]
    asked.clear()
    asyncio.run(give_async("begun"))
    assert asked == ["/pause", "begun", "sent", "/resume"]


def fail() -> None:
    raise ConnectionError("the trainer's side")


@pytest.mark.parametrize(
    ("routes", "weights", "said"),
    [
        *((Routes(**{path.removeprefix("/"): 500}), None, "500") for path in ("/pause", LOAD, NAME, RECOMPUTE)),
        (Routes(), fail, "the trainer's side"),
    ],
)
def test_a_server_is_resumed_when_something_fails(folder: Path, routes: Routes, weights: Any, said: str) -> None:
    with pytest.raises((RolloutError, ConnectionError), match=said):
        give(routes, weights or folder)
    assert (routes.asked[0], routes.asked[-1]) == ("/pause", "/resume")
    assert weights is None or len(routes.asked) == 2


def test_what_cannot_be_given_is_refused_before_anything_is_asked(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    routes = Routes()
    with pytest.raises(ValueError, match=r"has no weights .*safetensors"):
        give(routes, tmp_path / "empty")
    for name in OF_TRAINING:
        (tmp_path / "empty" / name).touch()
        with pytest.raises(ValueError, match=r"has no weights .*training_args"):
            give(routes, tmp_path / "empty")
    with RolloutClient(transport=httpx.MockTransport(routes)) as client:
        with pytest.raises(TypeError, match="version must be a string that is not empty, got 17"):
            client.give_weights(folder, 17)
        with pytest.raises(ValueError, match='version must be a string that is not empty, got ""'):
            client.give_weights(folder, "")
    assert routes.asked == []
    with pytest.raises(RolloutError, match="VLLM_SERVER_DEV_MODE=1"):
        give(Routes(pause=404), folder)
    assert give(Routes(update_weight_version=404), folder) is None  # a vLLM that knows no names


@pytest.mark.parametrize(
    ("names", "has"),
    [
        (["training_args.bin", "model.safetensors"], True),
        (["training_args.bin", "pytorch_model.bin"], True),
        (["optimizer.pt", "model.pt"], True),
        (["training_args.bin", "model.pt"], False),  # vLLM looks at no .pt beside a .bin
        (["step_1_optimizer.bin"], False),
    ],
)
def test_files_of_a_trainer_are_no_weights(tmp_path: Path, names: list[str], has: bool) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert has_weights(tmp_path) is has


def test_the_names_of_a_trainers_files_are_vllms() -> None:
    assert filter_files_not_needed_for_inference([*OF_TRAINING, "model.bin"]) == ["model.bin"]


async def test_kv_of_older_weights_is_computed_again(engine: FakeEngine, http: httpx.AsyncClient, monkeypatch):
    monkeypatch.setattr(engine, "call_all", None)  # it would miss groups that move
    for body in (None, {"request_ids": ["rollout-1"]}):
        answer = await http.post("/v1/weights/recompute", json=body)
        assert answer.json() == {"object": "weights.recompute", "num_candidates": 3}
    assert engine.recomputed == [None, sorted(names_of_request("rollout-1"))]
    answer = await http.post("/v1/weights/recompute", json={"request_ids": "rollout-1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_ids")


async def test_weights_of_an_adapter_get_a_name(engine: FakeEngine, http: httpx.AsyncClient) -> None:
    engine.adapters = ("sql",)
    body = {"adapter": "sql", "version": "step-3"}
    assert (await http.post("/v1/weights/adapter_version", json=body)).status_code == 204
    assert engine.adapter_versions == {"sql": "step-3"}
    for refused, status, said in (
        ({"adapter": MODEL}, 400, "is the base model"),
        ({"adapter": "other"}, 404, "is not served"),
        ({"version": ""}, 400, "version"),
    ):
        answer = await http.post("/v1/weights/adapter_version", json={**body, **refused})
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True)
