"""GET /v1/rollouts/prompts: what is known of prompts after rollouts and rewards, page by page."""

import asyncio

import httpx
import pytest

from tests.kernel.http.conftest import DEADLINE_S
from tests.parts.pruning.fakes import succeeded

PRUNING = {"detection_length": 2, "mode": "shadow", "signal": "confidence"}


def body(*prompts: dict, **fields) -> dict:
    sampling = {"seed": 3, "min_tokens": 4}
    return {"prompts": [*prompts], "group_size": 4, "pruning": PRUNING, "sampling_params": sampling, **fields}


def prompt(id: str) -> dict:
    return {"id": id, "prompt": f"prompt {id}"}


async def rewarded(http: httpx.AsyncClient, request: dict, good) -> dict:
    answer = (await asyncio.wait_for(http.post("/v1/rollouts", json=request), DEADLINE_S)).json()
    rewards = [
        {"prompt_id": group["prompt_id"], "index": each["index"], "reward": float(good(group["prompt_id"], each))}
        for group in answer["groups"]
        for each in group["trajectories"]
    ]
    posted = await http.post(f"/v1/rollouts/{answer['id']}/rewards", json={"rewards": rewards})
    assert posted.json()["counts"]["accepted"] == len(rewards), posted.text
    return answer


async def test_lengths_and_success_by_prompt(http):
    await rewarded(http, body(prompt("hard"), prompt("easy")), lambda id, _: id == "easy")
    await rewarded(http, body(prompt("mixed")), lambda _, each: each["index"] < 1)
    answer = (await http.get("/v1/rollouts/prompts")).json()
    assert (answer["object"], answer["num_prompts"], answer["has_more"]) == ("list", 3, False)
    by_id = {each["id"]: each for each in answer["data"]}
    assert [by_id[id]["success"]["rate"] for id in ("hard", "easy")] == [0, 1]
    assert by_id["mixed"]["success"]["rate"] == pytest.approx(0.25, abs=0.03)
    assert by_id["mixed"]["success"]["num_rewarded"] == pytest.approx(4, rel=0.1)
    assert answer["data"][0] == by_id["mixed"]
    assert sorted(each["prompts_ago"] for each in answer["data"]) == [0, 1, 2]
    assert by_id["hard"]["key"] == "id:hard"
    assert by_id["hard"]["lengths"]["num_groups"] == 1
    assert by_id["hard"]["lengths"]["mean"] > 3


async def test_pages_join_in_either_order(http):
    await rewarded(http, body(*map(prompt, "abcdefg")), lambda id, _: id in "bdf")
    for sort in ("last_seen", "success"):
        whole = (await http.get("/v1/rollouts/prompts", params={"sort": sort})).json()["data"]
        joined, after = [], {}
        while True:
            page = (await http.get("/v1/rollouts/prompts", params={"sort": sort, "limit": 3, **after})).json()
            joined += page["data"]
            if not page["has_more"]:
                break
            after = {"after": page["data"][-1]["key"]}
        assert joined == whole
        assert len(joined) == 7
    assert [each["id"] for each in whole[-3:]] == ["b", "d", "f"]


async def test_a_prompt_without_an_id_is_known_by_its_tokens(http):
    await rewarded(http, body({"prompt": "nameless"}), lambda _, each: succeeded(each["token_ids"]))
    (only,) = (await http.get("/v1/rollouts/prompts")).json()["data"]
    assert only["id"] is None
    assert only["key"].startswith("tokens:")
    assert only["success"] is not None


@pytest.mark.parametrize(
    ("query", "status", "named"),
    [
        ("limit=0", 400, "limit"),
        ("limit=10001", 400, "limit"),
        ("sort=size", 400, "sort"),
        ("after=id:x", 404, "after"),
    ],
)
async def test_what_is_wrong_is_named(http, query, status, named):
    answer = await http.get(f"/v1/rollouts/prompts?{query}")
    assert answer.status_code == status
    assert named in answer.json()["error"]["message"]


async def test_a_large_id_is_remembered_by_its_digest(http):
    id = "漢" * 256
    for _ in range(2):
        await rewarded(http, body(prompt(id)), lambda *_: True)
    (known,) = (await http.get("/v1/rollouts/prompts")).json()["data"]
    assert (known["id"], known["lengths"]["num_groups"]) == (None, 2)
    assert known["key"].startswith("digest:")
