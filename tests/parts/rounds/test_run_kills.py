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
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.kernel.http.conftest import DEADLINE_S, make_app, routes
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import WAIT_S

SEED = 0
NUM_LIVES = 80
LONGEST_LIFE_S = 0.3
"""Longest time from the start of serving to the kill."""
RUNS = {"whole": {}, "filtering": {"filter": "zero_variance"}}
TERMS = {"group_size": 2, "prompts_per_round": 4, "sampling_params": {"seed": 3}}


class TellingServer(uvicorn.Server):
    """Writes a byte when it serves."""

    def __init__(self, config: uvicorn.Config, tell: int) -> None:
        super().__init__(config)
        self._tell = tell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        os.write(self._tell, b"!")


def serve(database: Path, listener: socket.socket, tell: int) -> None:
    """Serve in a process of its own."""
    app = make_app(FakeEngine(step_s=0.0005), database=database)
    TellingServer(uvicorn.Config(app, log_level="critical", lifespan="off"), tell).run(sockets=[listener])


class Trainer:
    """Runs rounds of one run, until it is told to end with an answer in hand."""

    def __init__(self, url: str, run: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False)
        self.run = run
        self.handed_in: list[str] = []
        self.back: Counter[str] = Counter()
        self.num_repeats = 0
        self.over = threading.Event()
        self.after: dict = {}
        """The run, when all is over."""
        self._thread = threading.Thread(target=self._train)
        self._error: BaseException | None = None
        self._thread.start()

    def end(self) -> None:
        self.over.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _train(self) -> None:
        try:
            with self._http:
                self._ask("POST", "/v1/runs", {"id": self.run, **TERMS, **RUNS[self.run]})
                number = 0
                while not self.over.is_set():
                    self._round(number)
                    number += 1
                self.after = self._ask("GET", f"/v1/runs/{self.run}").json()
        except BaseException as error:  # for the thread of the test
            self._error = error

    def _round(self, number: int) -> None:
        run = self._ask("GET", f"/v1/runs/{self.run}").json()
        num_fresh = run["num_fresh_prompts"]
        first = len(self.handed_in)
        ids = [f"q{i}" for i in range(first, first + num_fresh)]
        self.handed_in += ids
        body = {"prompts": [{"id": id, "prompt": id} for id in ids], "idempotency_key": f"key-{number}"}
        path = f"/v1/runs/{self.run}/rounds"
        answer = self._ask("POST", path, body) if self.run == "whole" else self._rewarded(path, body)
        again = self._ask("POST", path, {"idempotency_key": f"key-{number}", "stream": False})
        if self.run == "whole":
            assert again.content == answer.content
        told = again.json()
        self.back.update([*(group["prompt_id"] for group in told["groups"]), *told["filtered"]])

    def _rewarded(self, path: str, body: dict) -> None:
        """A stream whose groups are rewarded as they come: those of even prompts teach nothing."""
        while True:
            with (
                suppress(httpx.TransportError),
                self._http.stream("POST", path, json={**body, "stream": True}) as response,
            ):
                if response.status_code == 200 and self._read(response):
                    return
                assert response.status_code == 200 or "is running" in response.read().decode()
            self._wait()

    def _read(self, response: httpx.Response) -> bool:
        """True if the stream came to its end."""
        rollout = ""
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            event = httpx.Response(200, content=line.removeprefix("data: ")).json()
            if event["type"] == "round":
                rollout = event["id"]
            if event["type"] == "group" and event["selected"]:
                is_even = int(event["prompt_id"][1:]) % 2 == 0
                values = [0.0 if is_even else float(place) for place, _ in enumerate(event["selected"])]
                rewards = [
                    {"prompt_id": event["prompt_id"], "index": index, "reward": value}
                    for index, value in zip(event["selected"], values, strict=True)
                ]
                self._http.post(f"/v1/rollouts/{rollout}/rewards", json={"rewards": rewards})
            if event["type"] == "done":
                return True
        return False

    def _ask(self, method: str, path: str, body: dict | None = None) -> httpx.Response:
        """Repeat a request until there is an answer."""
        while True:
            with suppress(httpx.TransportError):
                response = self._http.request(method, path, json=body)
                if response.status_code in (200, 201):
                    return response
                assert "is running" in response.text or "was over just now" in response.text, response.text
            self._wait()

    def _wait(self) -> None:
        self.num_repeats += 1
        time.sleep(0.002)


def live_and_die(database: Path, listener: socket.socket, over: Event) -> None:
    """In a process of its own, which has one thread to fork from: many servers, and one that stays."""
    chance = random.Random(SEED)
    reading, writing = os.pipe()
    routes()  # every life has them
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
    over = context.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = context.Process(target=live_and_die, args=(tmp_path / "runs.sqlite", listener, over), daemon=True)
        server.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            trainers = [Trainer(url, run) for run in RUNS]
            assert over.wait(4 * DEADLINE_S)
            for trainer in trainers:
                trainer.end()
        finally:
            server.kill()
            server.join(WAIT_S)
    for trainer in trainers:
        assert trainer.num_repeats > 0
        assert trainer.after["open_round"] is None
        waiting = Counter([*trainer.after["queue"], *trainer.after["unstarted"]])
        assert trainer.back + waiting == Counter(trainer.handed_in)
        assert trainer.after["num_rounds"] > 0
