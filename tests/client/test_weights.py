"""New weights by one call: who was paused is resumed, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from vllm_rollout import AsyncRolloutClient, RolloutClient, RolloutError

LOAD, RESET, NAME = "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"


class Routes:
    """vLLM's routes, of which some fail, and what was asked of them."""

    def __init__(self, **statuses: int) -> None:
        self.asked: list[str] = []
        self.bodies: dict[str, bytes] = {}
        self._statuses = {f"/{path}": status for path, status in statuses.items()}
        self.is_reset = True

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        self.bodies[path] = request.content
        return httpx.Response(self._statuses.get(path, 200), json={"success": self.is_reset})


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
    assert routes.asked == ["/pause", LOAD, RESET, NAME, "/resume"]
    assert str(folder).encode() in routes.bodies[LOAD]
    assert b"step-3" in routes.bodies[NAME]


def test_a_function_sends_while_the_server_pauses() -> None:
    routes = Routes()
    give(routes, lambda: routes.asked.append("sent"))
    expected = ["/pause", "sent", RESET, NAME, "/resume"]
    assert routes.asked == expected

    async def give_async() -> None:
        async with AsyncRolloutClient(transport=httpx.MockTransport(again)) as client:
            await client.give_weights(lambda: again.asked.append("sent"), "step-3")

    again = Routes()
    asyncio.run(give_async())
    assert again.asked == expected


@pytest.mark.parametrize("path", [LOAD, RESET, NAME])
def test_a_server_is_resumed_when_something_fails(folder: Path, path: str) -> None:
    routes = Routes(**{path.removeprefix("/"): 500})
    with pytest.raises(RolloutError, match="500"):
        give(routes, folder)
    assert routes.asked[-1] == "/resume"


def test_a_server_is_resumed_when_sending_or_forgetting_fails(folder: Path) -> None:
    def fail() -> None:
        raise ConnectionError("the trainer's side")

    routes = Routes()
    with pytest.raises(ConnectionError, match="the trainer's side"):
        give(routes, fail)
    assert routes.asked == ["/pause", "/resume"]

    routes = Routes()
    routes.is_reset = False
    with pytest.raises(RolloutError, match="kept its prefix cache"):
        give(routes, folder)
    assert routes.asked[-1] == "/resume"


def test_what_cannot_be_given_is_refused_before_anything_is_asked(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    routes = Routes()
    with pytest.raises(ValueError, match=r"has no weights .*safetensors"):
        give(routes, tmp_path / "empty")
    assert routes.asked == []
    with pytest.raises(RolloutError, match="VLLM_SERVER_DEV_MODE=1"):
        give(Routes(pause=404), folder)
    assert give(Routes(update_weight_version=404), folder) is None  # a vLLM that knows no names
