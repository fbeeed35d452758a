"""A server that is killed over and over, with SIGKILL, and a client that repeats its keys: every prompt that was handed
in came back once, or waits.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
import pytest
import uvicorn

from .conftest import DEADLINE_S, make_app
from .fake_engine import FakeEngine

SEED = 0
NUM_LIVES = 80
LONGEST_LIFE_S = 0.3
"""From when it serves."""
TERMS = {"group_size": 2, "prompts_per_round": 4, "sampling": {"seed": 3}}


class TellingServer(uvicorn.Server):
    """Writes a byte when it serves."""

    def __init__(self, config: uvicorn.Config, tell: int) -> None:
        super().__init__(config)
        self._tell = tell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        os.write(self._tell, b"!")


def serve(database: Path, listener: socket.socket, tell: int) -> None:
    """In a process of its own."""
    app = make_app(FakeEngine(step_s=0.0005), database=database)
    TellingServer(uvicorn.Config(app, log_level="critical", lifespan="off"), tell).run(sockets=[listener])


class Trainer:
    """Runs rounds of one run."""

    def __init__(self, url: str, run: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False)
        self._run = run
        self.handed_in: list[str] = []
        self.back: Counter[str] = Counter()
        self.num_repeats = 0

    def train(self, over: threading.Event) -> dict:
        """Until it is told to end, with an answer in hand; the run, then."""
        with self._http:
            self._ask("POST", "/v1/runs", {"id": self._run, **TERMS})
            number = 0
            while not over.is_set():
                self._round(number)
                number += 1
            return self._ask("GET", f"/v1/runs/{self._run}").json()

    def _round(self, number: int) -> None:
        run = self._ask("GET", f"/v1/runs/{self._run}").json()
        first = len(self.handed_in)
        ids = [f"q{i}" for i in range(first, first + run["num_fresh_prompts"])]
        self.handed_in += ids
        path, key = f"/v1/runs/{self._run}/rounds", {"idempotency_key": f"key-{number}"}
        answer = self._ask("POST", path, {**key, "prompts": [{"id": id, "prompt": id} for id in ids]})
        assert self._ask("POST", path, key).content == answer.content
        self.back.update(group["prompt_id"] for group in answer.json()["groups"])

    def _ask(self, method: str, path: str, body: dict | None = None) -> httpx.Response:
        """Until there is an answer."""
        while True:
            with suppress(httpx.TransportError):
                response = self._http.request(method, path, json=body)
                if response.status_code in (200, 201):
                    return response
                assert "is running" in response.text or "was over just now" in response.text, response.text
            self.num_repeats += 1
            time.sleep(0.002)


def live_and_die(database: Path, listener: socket.socket, over: Event) -> None:
    """In a process of its own, which has one thread to fork from: many servers, and one that stays."""
    chance = random.Random(SEED)
    reading, writing = os.pipe()
    for _ in range(NUM_LIVES):
        pid = os.fork()
        if pid == 0:
            serve(database, listener, writing)
            os._exit(0)
        assert os.read(reading, 1) == b"!"
        time.sleep(chance.uniform(0, LONGEST_LIFE_S))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    over.set()
    serve(database, listener, writing)


@pytest.mark.thorough
def test_a_server_that_is_killed_loses_no_prompt_and_returns_none_twice(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    over, may_end = context.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        server = context.Process(target=live_and_die, args=(tmp_path / "runs.sqlite", listener, over), daemon=True)
        server.start()
        trainers = [Trainer(f"http://127.0.0.1:{listener.getsockname()[1]}", run) for run in ("one", "other")]
        try:
            training = [threads.submit(trainer.train, may_end) for trainer in trainers]
            assert over.wait(4 * DEADLINE_S)
            may_end.set()
            runs = [its.result(DEADLINE_S) for its in training]
        finally:
            may_end.set()
            server.kill()
            server.join()
    for trainer, run in zip(trainers, runs, strict=True):
        assert trainer.num_repeats > 0
        assert run["open_round"] is None
        assert trainer.back + Counter([*run["queue"], *run["unstarted"]]) == Counter(trainer.handed_in)
        assert run["num_rounds"] > 0
