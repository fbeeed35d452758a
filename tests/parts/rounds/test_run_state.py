"""Runs in a trainer's checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.http.conftest import make_app
from tests.kernel.http.fake_engine import FakeEngine


async def play(http: httpx.AsyncClient, num_rounds: int = 1, first: int = 0) -> dict:
    """Rounds of run `a`; the run after them."""
    body = {
        "id": "a",
        "group_size": 2,
        "prompts_per_round": 4,
        "prompt_speculation": 1.5,
        "sampling_params": {"seed": 3},
    }
    await http.post("/v1/runs", json=body)
    for number in range(num_rounds):
        ids = range(first + 6 * number, first + 6 * number + 6)
        prompts = [{"id": f"q{i}", "prompt": f"question {i}"} for i in ids]
        response = await http.post("/v1/runs/a/rounds", json={"prompts": prompts})
        assert response.status_code == 200, response.text
    return (await http.get("/v1/runs/a")).json()


async def test_what_was_learned_alone_is_no_state(http: httpx.AsyncClient) -> None:
    before = await play(http)
    state = (await http.get("/v1/rollouts/state")).content
    header, rest = state.split(b"\n", 1)
    learned = rest[json.loads(header)["runs"] + 1 :]
    response = await http.put("/v1/rollouts/state", content=learned)
    assert response.status_code == 400
    assert "its header must say format 3" in response.json()["error"]["message"]
    assert (await http.get("/v1/runs/a")).json() == before


def mutate(state: bytes, change) -> bytes:
    header, rest = state.split(b"\n", 1)
    size = json.loads(header)["runs"]
    runs = json.loads(rest[:size])
    change(runs)
    body = json.dumps(runs).encode()
    return json.dumps({"format": 3, "runs": len(body)}).encode() + b"\n" + body + rest[size:]


async def test_a_state_of_an_earlier_version_is_taken_under_its_old_names(http: httpx.AsyncClient) -> None:
    before = await play(http)

    def with_old_names(runs: list[dict]) -> None:
        settings = runs[0]["settings"]
        settings["sampling"], settings["return"] = settings.pop("sampling_params"), settings.pop("include")

    state = mutate((await http.get("/v1/rollouts/state")).content, with_old_names)
    response = await http.put("/v1/rollouts/state", content=state)
    assert response.status_code == 204, response.text
    assert await play(http, num_rounds=0) == before


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
    # What no database can hold.
    (lambda runs: runs[0].update(id=None), "id of a run"),
    (lambda runs: runs[0].update(id=["a"]), "id of a run"),
    (lambda runs: runs[0].update(memo={"a": 1}), "memo of a run must be a string"),
    (lambda runs: runs[0].update(memo="\ud800"), "memo of a run must be a string"),
    (lambda runs: runs[0]["prompts"][0].__setitem__(0, [0]), "number of a prompt"),
    (lambda runs: runs[0]["prompts"][0].__setitem__(0, True), "number of a prompt"),
    (lambda runs: runs[0]["prompts"][0].__setitem__(1, '{"id": "\ud800", "prompt": "a"}'), "body of a prompt"),
    *((lambda runs, kept=kept: runs[0]["prompts"][0].__setitem__(2, kept), "") for kept in ("", "AAAA", "no base64")),
    (lambda runs: runs[0]["prompts"][0].__setitem__(2, 7), "of a run is none"),
])  # fmt: skip
async def test_runs_that_nobody_saved_are_refused(http: httpx.AsyncClient, change, words: str) -> None:
    before = await play(http)
    state = (await http.get("/v1/rollouts/state")).content
    response = await http.put("/v1/rollouts/state", content=mutate(state, change))
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert re.search(
        f"(?s)not a rollout state .*{words}.* Send the bytes of GET /v1/rollouts/state as they are", message
    )
    assert (await http.get("/v1/runs/a")).json() == before


def values() -> st.SearchStrategy[Any]:
    """Values that JSON may have at any place."""
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3),
        st.sampled_from(["\ud800", "a" * 300, "k" * 100_000, "\0", 10**30, 2**63, -1, 1e308]),
    )  # fmt: skip
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in nested lists and objects: what has it, and its index or name."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[TestClient, bytes]]:
    """A server, and its state with a run of which a prompt waits."""
    with TestClient(make_app(FakeEngine()), raise_server_exceptions=False) as server:
        server.post("/v1/runs", json={"id": "a", "group_size": 2, "prompts_per_round": 2, "prompt_speculation": 1.5})
        prompts = [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(3)]
        assert server.post("/v1/runs/a/rounds", json={"prompts": prompts}).status_code == 200
        yield server, server.get("/v1/rollouts/state").content


@pytest.mark.thorough
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_mutated_runs_of_a_state_are_refused_or_kept_whole(served, data: st.DataObject) -> None:
    server, state = served
    assert server.put("/v1/rollouts/state", content=state).status_code == 204

    def change(runs: list[dict]) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            where, key = data.draw(st.sampled_from(places(runs)))
            if isinstance(where, list) and data.draw(st.booleans()):
                where.append(where[key])
            else:
                where[key] = data.draw(values())

    response = server.put("/v1/rollouts/state", content=mutate(state, change))
    assert response.status_code in (204, 400), response.text
    after = server.get("/v1/rollouts/state").content
    if response.status_code == 400:
        assert after == state
    assert server.get("/v1/runs").status_code == 200
    assert server.put("/v1/rollouts/state", content=after).status_code == 204
    assert server.get("/v1/rollouts/state").content == after
