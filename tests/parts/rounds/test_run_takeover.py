"""Two API processes over one folder, at each other's worst moments: no prompt runs twice, none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import WAIT_S
from vllm_rollout.parts.rounds.http import service as service_module
from vllm_rollout.parts.rounds.http.rollout_round import RolloutRound
from vllm_rollout.parts.rounds.http.service import RunService
from vllm_rollout.parts.rounds.http.store import RunStore

pytestmark = pytest.mark.anyio

RUN = {"id": "a", "group_size": 2, "prompts_per_round": 2, "prompt_speculation": 1.5, "sampling_params": {"seed": 3}}
ROUNDS = "/v1/runs/a/rounds"


def handed_in(first: int, key: str) -> dict:
    return {"prompts": [{"id": f"q{i}", "prompt": f"{i}"} for i in range(first, first + 3)], "idempotency_key": key}


class Process:
    """An API process of its own over the folder."""

    def __init__(self, database: Path) -> None:
        self.engine = FakeEngine()
        self.app: FastAPI = make_app(self.engine, database=database)
        self.service: RunService = self.app.state.run_service
        self.store: RunStore = self.service._store
        self.http = http_of(self.app)

    async def post(self, path: str, body: dict) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def look(self) -> dict:
        return (await self.http.get("/v1/runs/a")).json()

    def once_after_transaction(self, number: int, happening: Callable[[], Awaitable[object]]) -> None:
        """`happening` falls right after so many transactions of this process."""
        stored, numbers = self.service._submitted, iter(range(number + 1))

        def submitted(*args, **kwargs):
            async def work():
                done = await stored(*args, **kwargs)
                if next(numbers, None) == number:
                    await happening()
                return done

            return asyncio.ensure_future(work())

        self.service._submitted = submitted


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Process, Process]]:
    processes = Process(tmp_path / "runs.sqlite"), Process(tmp_path / "runs.sqlite")
    assert (await processes[0].post("/v1/runs", RUN)).status_code == 201
    yield processes
    for process in processes:
        await process.http.aclose()


async def interrupted(process: Process, body: dict) -> None:
    process.engine.dies_at_step = 0
    assert (await process.post(ROUNDS, body)).status_code == 503
    process.engine.dies_at_step = None
    async with asyncio.timeout(WAIT_S):
        while (await process.look())["open_round"]["state"] == "running":
            await asyncio.sleep(0)


async def answered(process: Process, body: dict) -> httpx.Response:
    """Asked again for as long as the server says that this helps."""
    async with asyncio.timeout(WAIT_S):
        while (response := await process.post(ROUNDS, body)).headers.get("retry-after"):
            assert response.status_code in (409, 503), response.text
            await asyncio.sleep(0)
    return response


HAPPENINGS = {
    "its key is repeated": lambda other, body: other.post(ROUNDS, body),
    "another round is over": lambda other, body: other.post(ROUNDS, handed_in(10, "another")),
    "it is given up": lambda other, body: other.http.delete(f"{ROUNDS}/0"),
    "the run is deleted": lambda other, body: other.http.delete("/v1/runs/a"),
}


@pytest.mark.parametrize("happening", HAPPENINGS)
@pytest.mark.parametrize("is_repeat", [False, True])
@pytest.mark.parametrize("number", range(3))
async def test_what_another_process_does_between_two_transactions_of_a_round_loses_and_doubles_nothing(
    two: tuple[Process, Process], happening: str, is_repeat: bool, number: int
) -> None:
    ours, theirs = two
    body = handed_in(0, "k")
    if is_repeat:
        await interrupted(ours, body)
    told: list[httpx.Response] = []

    async def happens() -> None:
        told.append(await HAPPENINGS[happening](theirs, body))

    ours.once_after_transaction(number, happens)
    response = await ours.post(ROUNDS, body)
    assert response.status_code in (200, 404, 409, 410, 400), response.text
    assert len(told) == 1
    again = await answered(ours, body)
    if happening == "the run is deleted" and told[0].status_code == 204:
        assert again.status_code == 404
        return
    run = await theirs.look()
    assert run["open_round"] is None
    answers = {
        r.json()["round"]: r for r in (response, again, told[0]) if r.status_code == 200 and "groups" in r.json()
    }
    back = [group["prompt_id"] for r in answers.values() for group in r.json()["groups"]]
    handed = {"q0", "q1", "q2"} if "k" in {r.json()["idempotency_key"] for r in answers.values()} else set()
    if again.status_code == 410:  # given up
        handed = {"q0", "q1", "q2"}
    if told[0].status_code == 200 and happening == "another round is over":
        handed |= {"q10", "q11", "q12"}
    assert Counter([*back, *run["queue"], *run["unstarted"]]) == dict.fromkeys(handed, 1)
    if again.status_code == 200:
        assert (await theirs.post(ROUNDS, body)).content == again.content


async def test_a_round_is_planned_again_when_it_begins(two: tuple[Process, Process]) -> None:
    """The checked request runs, not the same request in a run that has advanced."""
    ours, theirs = two

    async def happens() -> None:
        assert (await theirs.post(ROUNDS, handed_in(10, "another"))).status_code == 200

    ours.once_after_transaction(1, happens)
    response = await ours.post(ROUNDS, handed_in(0, "k"))
    assert response.status_code == 409
    assert "has changed while this round was checked" in response.json()["error"]["message"]
    assert (await theirs.look())["totals"]["num_prompts"] == 3


async def test_a_round_that_another_process_has_taken_over_is_closed_by_that_one_only(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = two
    body = handed_in(0, "k")
    close = RunStore.close
    told: list[httpx.Response] = []

    async def taken_over() -> None:
        monkeypatch.setattr(theirs.store.owner, "is_alive", lambda name: name == theirs.store.owner.name)
        told.append(await theirs.post(ROUNDS, body))
        monkeypatch.undo()
        await interrupted(theirs, handed_in(10, "next"))

    loop = asyncio.get_running_loop()

    def late_close(self: RunStore, *args, **kwargs):
        if self is ours.store:
            asyncio.run_coroutine_threadsafe(taken_over(), loop).result(60)
        return close(self, *args, **kwargs)

    monkeypatch.setattr(RunStore, "close", late_close)
    response = await ours.post(ROUNDS, body)
    assert (response.status_code, told[0].status_code) == (409, 200)
    assert "another one has taken it" in response.json()["error"]["message"]
    assert (await ours.post(ROUNDS, body)).content == told[0].content
    run = await ours.look()
    assert (run["num_rounds"], run["totals"]["num_prompts"], run["totals"]["num_returned"]) == (1, 6, 2)
    assert (await ours.post(ROUNDS, handed_in(10, "next"))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_whatever_goes_wrong_when_a_round_is_written_its_run_goes_on(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    ours, theirs = two
    body = handed_in(0, "k")

    def faulty(live, run):
        raise ZeroDivisionError

    monkeypatch.setattr(service_module, "made_answer", faulty)
    response = await ours.post(ROUNDS, {**body, "stream": stream})
    assert response.status_code == (200 if stream else 500)
    assert "ZeroDivisionError" in response.text
    monkeypatch.undo()
    async with asyncio.timeout(WAIT_S):
        while (await theirs.look())["open_round"]["state"] == "running":
            await asyncio.sleep(0)
    answer = await ours.post(ROUNDS, {"idempotency_key": "k"})
    assert len(answer.json()["groups"]) == 2
    assert (await ours.post(ROUNDS, handed_in(10, "next"))).status_code == 200


async def test_a_round_that_cannot_be_taken_up_again_is_held_by_nobody(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = two
    await interrupted(ours, handed_in(0, "k"))

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RolloutRound, "take_up", fails)
        assert (await ours.post(ROUNDS, {"idempotency_key": "k"})).status_code == 500
    assert (await ours.look())["open_round"]["state"] == "interrupted"
    assert (await theirs.post(ROUNDS, {"idempotency_key": "k"})).status_code == 200


async def test_a_round_that_could_not_be_let_go_on_disk_is_let_go_later(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = two
    release, faults = RunStore.release, iter([0, 1])

    def faulty_release(self: RunStore, id: str, owner: str) -> None:
        monkeypatch.setattr(self, "_transaction", broken) if next(faults, None) is not None else monkeypatch.undo()
        release(self, id, owner)

    def broken() -> None:
        raise service_module.RequestError("the disk is full", status=507)

    monkeypatch.setattr(service_module, "RELEASE_AGAIN_S", 0)
    monkeypatch.setattr(RunStore, "release", faulty_release)
    ours.engine.dies_at_step = 0
    assert (await ours.post(ROUNDS, handed_in(0, "k"))).status_code == 503
    async with asyncio.timeout(WAIT_S):
        while (await theirs.look())["open_round"]["state"] == "running":
            await asyncio.sleep(0)
    assert (await theirs.post(ROUNDS, {"idempotency_key": "k"})).status_code == 200
