"""A rank that is killed while groups move between ranks: nobody waits for ever, and everybody hears why."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.conftest import TIMEOUT_S, Server, serve_command

DEVICE = {"step": {"ms": 5.0}, "lengths": {"log_normal": {"mean": 400, "sigma": 0.5}}}
NUM_READERS = 6


@pytest.fixture
def server(tiny_model: str, tmp_path: Path) -> Iterator[Server]:
    device = tmp_path / "device.json"
    device.write_text(json.dumps(DEVICE))
    flags = (
        "--emulate",
        str(device),
        "--max-model-len",
        "4096",
        "--data-parallel-size",
        "2",
        "--api-server-count",
        "1",
    )
    server = Server(serve_command(tiny_model, *flags), tmp_path / "server.log")
    yield server
    server.stop()


def rank_processes(server: Server) -> list[psutil.Process]:
    processes = psutil.Process(server._process.pid).children(recursive=True)
    return sorted((each for each in processes if "EngineCore" in " ".join(each.cmdline())), key=lambda each: each.pid)


def read(url: str, reader: int) -> str:
    """Rollouts until one does not end well; what it says."""
    for number in range(10_000):
        tokens: dict[int, int] = {}
        body: dict[str, Any] = {"prompts": [{"prompt_token_ids": [10 + reader, 20 + number]}], "group_size": 3}
        body |= {"stream": True, "stream_tokens": 1, "sampling": {"seed": number, "max_tokens": 3000}}
        last: dict[str, Any] = {"type": None}
        try:
            with httpx.stream("POST", f"{url}/v1/rollouts", json=body, timeout=TIMEOUT_S) as response:
                if response.status_code != 200:
                    return f"status {response.status_code}"
                for line in response.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    last = json.loads(line.removeprefix("data: "))
                    if last["type"] == "tokens":
                        assert last["offset"] == tokens.get(last["index"], 0)
                        tokens[last["index"]] = last["offset"] + len(last["token_ids"])
        except httpx.TransportError as error:
            return type(error).__name__
        if last["type"] == "error":
            return last["error"]["message"]
        assert last["type"] == "done"
        assert last["usage"]["num_failed"] == 0 or last["usage"]["num_finished"] < 3
        if last["usage"]["num_failed"]:
            return "failed candidates"
    return "never"


def drain_and_restore(url: str) -> str:
    """One rank after the other, until that does not work any more; what it says."""
    for number in range(10_000):
        try:
            for action in ("drain", "restore"):
                answer = httpx.post(f"{url}/v1/engines/{number % 2}/{action}", timeout=TIMEOUT_S)
                if answer.status_code != 200:
                    return answer.json()["error"]["message"]
        except httpx.TransportError as error:
            return type(error).__name__
    return "never"


def test_a_rank_that_is_killed_while_groups_move_leaves_nobody_waiting(server: Server) -> None:
    chance = random.Random(3)
    ranks = rank_processes(server)
    assert len(ranks) == 2
    with ThreadPoolExecutor(NUM_READERS + 1) as pool:
        asked = [pool.submit(read, server.url, reader) for reader in range(NUM_READERS)]
        asked.append(pool.submit(drain_and_restore, server.url))
        server.wait_until(lambda: server.counter("vllm_rollout:moves_total") >= 20)
        os.kill(chance.choice(ranks).pid, signal.SIGKILL)
        said = [each.result(timeout=TIMEOUT_S) for each in asked]
    assert "never" not in said
    assert any("engine has stopped" in each for each in said)
