"""Runs in a trainer's checkpoint."""

from __future__ import annotations

import json

import httpx
import pytest

from .conftest import make_app
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def other() -> httpx.AsyncClient:
    """Another server."""
    app = make_app(FakeEngine())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def play(http: httpx.AsyncClient, num_rounds: int = 1, first: int = 0) -> dict:
    """Rounds of run `a`; the run after them."""
    body = {"id": "a", "group_size": 2, "prompts_per_round": 4, "prompt_speculation": 1.5, "sampling": {"seed": 3}}
    await http.post("/v1/runs", json=body)
    for number in range(num_rounds):
        ids = range(first + 6 * number, first + 6 * number + 6)
        prompts = [{"id": f"q{i}", "prompt": f"question {i}"} for i in ids]
        response = await http.post("/v1/runs/a/rounds", json={"prompts": prompts})
        assert response.status_code == 200, response.text
    return (await http.get("/v1/runs/a")).json()


async def test_a_state_carries_runs_to_another_server(http: httpx.AsyncClient, other: httpx.AsyncClient) -> None:
    before = await play(http)
    state = (await http.get("/v1/rollouts/state")).content
    assert (await other.put("/v1/rollouts/state", content=state)).status_code == 204
    assert (await other.get("/v1/runs/a")).json() == before
    assert len(before["queue"]) == 2
    response = await other.post("/v1/runs/a/rounds", json={"kind": "long"})
    assert [group["prompt_id"] for group in response.json()["groups"]] == before["queue"]


async def test_a_state_takes_the_place_of_the_runs_that_are_there(http: httpx.AsyncClient) -> None:
    await play(http)
    state = (await http.get("/v1/rollouts/state")).content
    before = await play(http, 1, first=6)
    await http.post("/v1/runs", json={"id": "b", "group_size": 2, "prompts_per_round": 4})
    assert (await http.put("/v1/rollouts/state", content=state)).status_code == 204
    after = (await http.get("/v1/runs")).json()["data"]
    assert [run["id"] for run in after] == ["a"]
    assert after[0]["num_rounds"] == before["num_rounds"] - 1


async def test_a_state_of_an_earlier_version_leaves_runs_alone(http: httpx.AsyncClient) -> None:
    before = await play(http)
    state = (await http.get("/v1/rollouts/state")).content
    header, rest = state.split(b"\n", 1)
    learned = rest[json.loads(header)["runs"] + 1 :]
    assert (await http.put("/v1/rollouts/state", content=learned)).status_code == 204
    assert (await http.get("/v1/runs/a")).json() == before


def mutate(state: bytes, change) -> bytes:
    header, rest = state.split(b"\n", 1)
    size = json.loads(header)["runs"]
    runs = json.loads(rest[:size])
    change(runs)
    body = json.dumps(runs).encode()
    return json.dumps({"format": 3, "runs": len(body)}).encode() + b"\n" + body + rest[size:]


@pytest.mark.parametrize(("change", "words"), [
    (lambda runs: runs[0].pop("model"), "a run of a state has the fields"),
    (lambda runs: runs.append(runs[0]), "must have different ids"),
    (lambda runs: runs[0]["settings"].update(group_size=0), "settings of run 'a'"),
    (lambda runs: runs[0]["settings"].update(group_size=3), "are not its settings'"),
    (lambda runs: runs[0].update(settings=[]), "settings of run 'a'"),
    (lambda runs: runs[0]["prompts"].pop(), "got none for"),
    (lambda runs: runs[0]["prompts"].append(runs[0]["prompts"][0]), "does not wait in it"),
    (lambda runs: runs[0]["prompts"][0].__setitem__(1, "{}"), "of a run is none"),
    (lambda runs: runs[0]["state"].update(format=9), "format of a run must be 1, got 9"),
    (lambda runs: runs[0]["state"]["counts"].__setitem__(0, 99), "a run that was handed 99 prompts"),
])  # fmt: skip
async def test_runs_that_nobody_saved_are_refused(http: httpx.AsyncClient, change, words: str) -> None:
    before = await play(http)
    state = (await http.get("/v1/rollouts/state")).content
    response = await http.put("/v1/rollouts/state", content=mutate(state, change))
    assert response.status_code == 422
    assert words in response.json()["error"]["message"]
    assert (await http.get("/v1/runs/a")).json() == before


@pytest.mark.parametrize("state", [
    b'{"format": 3, "runs": 10}\n[]', b'{"format": 3}\n[]', b'{"format": 3, "runs": 2}\n{}',
    b'{"format": 3, "runs": 2}\n[]',
    b'{"format": 3, "runs": 2}\n[]\n{"format": 9}\n', b'{"format": 4, "runs": 2}\n[]',
])  # fmt: skip
async def test_what_is_no_state_is_refused(http: httpx.AsyncClient, state: bytes) -> None:
    response = await http.put("/v1/rollouts/state", content=state)
    assert response.status_code == 422, response.text
