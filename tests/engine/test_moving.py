"""Groups move between two real ranks: what they say is what they would have said."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import V2, Server, paused, said_in, serve_command

FLAGS = ("--max-model-len", "1024", "--data-parallel-size", "2", "--api-server-count", "1", "--dtype", "float32")
LONG = {"max_tokens": 960, "ignore_eos": True}
NUM_TRIES = 10
"""On a machine that stalls a group may have ended before it is moved."""


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """KV blocks go by the memory that processes of a host share."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(serve_command(tiny_model, *FLAGS), log, VLLM_SERVER_DEV_MODE="1") as server:
        yield server


def move_all(server: Server) -> dict[str, Any]:
    """All groups of the rank that has some, to the other one."""
    busy = next((engine["rank"] for engine in server.engines if engine["num_groups"]), 0)
    answer = server.http.post(f"/v1/engines/{busy}/drain")
    assert answer.status_code == 200, answer.text
    restored = server.http.post(f"/v1/engines/{busy}/restore")
    assert (restored.status_code, restored.json()["state"]) == (200, "active"), restored.text
    return answer.json()


def move_while_paused(server: Server) -> dict[str, Any]:
    """As for an update of weights; it goes on elsewhere when generation is resumed."""
    with paused(server):
        return move_all(server)


Trajectories = dict[int, dict[str, Any]]


def by_index(trajectories: list[dict[str, Any]]) -> Trajectories:
    return {trajectory["index"]: trajectory for trajectory in trajectories}


def moved_and_unmoved(
    server: Server, move: Callable[[Server], dict[str, Any]] = move_all, **fields: Any
) -> tuple[Trajectories, Trajectories]:
    """Trajectories of the same group, first moved after 40 tokens of one of its candidates, and then not moved. In the
    other order, the target's cache would have the tokens."""
    for number in range(NUM_TRIES):
        body = {"prompts": [{"id": "q", "prompt": f"hello {number}"}], "group_size": 3, "stream_tokens": 8, **fields}
        events = []
        answer = None
        for event in server.events(**body):
            events.append(event)
            if answer is None and event["type"] == "tokens" and event["offset"] >= 40:
                answer = move(server)
        said_in(events)
        if answer["num_moved"]:
            break
    moved = by_index([event["trajectory"] for event in events if event["type"] == "trajectory"])
    assert (answer["state"], answer["num_moved"], answer["num_left"]) == ("drained", 1, 0)
    num_different = len({tuple(trajectory["token_ids"][:31]) for trajectory in moved.values()})
    came = re.findall(r"came with (\d+) KV blocks", server.log.read_text())
    assert int(came[-1]) >= num_different  # what is full after 40 tokens
    del body["stream_tokens"]
    (group,) = server.rollout(**body)["groups"]
    return moved, by_index(group["trajectories"])


def assert_same(moved: Trajectories, unmoved: Trajectories) -> None:
    assert moved.keys() == unmoved.keys()
    for index, before in unmoved.items():
        after = moved[index]
        for field in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert after[field] == before[field]
        assert after["logprobs"] == pytest.approx(before["logprobs"], abs=1e-3)
        assert after["mean_confidence"] == pytest.approx(before["mean_confidence"], rel=1e-3)
        assert after["score"] == pytest.approx(before["score"], abs=1e-3)


def test_model_runner_v2_goes_on_too(tiny_model: str, tmp_path: Path) -> None:
    sampling = {"max_tokens": 64, "ignore_eos": True, "seed": 5, "repetition_penalty": 1.2}
    command = serve_command(tiny_model, *FLAGS, "--max-num-seqs", "8")
    with Server(command, tmp_path / "server.log", **V2) as server:
        assert_same(*moved_and_unmoved(server, group_size=2, sampling_params=sampling, stream_tokens=1))


def test_kv_blocks_go_by_nixl_over_tcp(tiny_model: str, tmp_path: Path) -> None:
    """As between two hosts without RDMA. This server is for one test only, because threads of NIXL never sleep."""
    sampling = {"max_tokens": 400, "ignore_eos": True, "seed": 5}
    command = serve_command(tiny_model, *FLAGS, "--enable-rollout-nixl")
    with Server(command, tmp_path / "server.log", VLLM_SERVER_DEV_MODE="1", UCX_TLS="tcp") as server:
        assert_same(*moved_and_unmoved(server, group_size=2, sampling_params=sampling))
        assert "KV blocks of groups that move go by: nixl" in server.log.read_text()


@pytest.mark.parametrize(("fields", "move"), [
    ({"sampling_params": {**LONG, "temperature": 0.0}}, move_all),
    ({"sampling_params": {**LONG, "seed": 5}}, move_while_paused),
    ({
        "sampling_params": {"max_tokens": 960, "seed": 6, "repetition_penalty": 1.2, "min_tokens": 800, "stop": ["e"]},
        "pruning": {"detection_length": 700, "mode": "shadow"}, "include": ["text", "logprobs"],
    }, move_all),
])  # fmt: skip
def test_a_moved_group_says_what_it_would_have_said(
    server: Server, fields: dict[str, Any], move: Callable[[Server], dict[str, Any]]
) -> None:
    assert_same(*moved_and_unmoved(server, move, **fields))


def test_requests_that_join_a_group_follow_it(server: Server) -> None:
    """The last of them comes after the move."""
    xargs = {"rollout_group_id": "late", "rollout_group_size": 2, "rollout_num_candidates": 4}

    def ask(num_tokens: int) -> dict[str, Any]:
        body = {"prompt": "hello", "max_tokens": num_tokens, "min_tokens": num_tokens, "vllm_xargs": xargs}
        return server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]

    with ThreadPoolExecutor(4) as pool:
        with paused(server):
            first = [pool.submit(ask, num_tokens) for num_tokens in (900, 905, 910)]
            server.wait_until(lambda: server.num_in_engine == 3)
            assert move_all(server)["num_moved"] == 1
            late = pool.submit(ask, 5)
            server.wait_until(lambda: server.num_in_engine == 4)
        assert late.result()["finish_reason"] == "length"
        assert [each.result()["stop_reason"] for each in first] == [None, "surplus", "surplus"]


def test_a_drained_rank_gets_nothing_until_it_is_restored(server: Server) -> None:
    before = server.engines[1]["num_moved_in"]
    for _ in range(2):
        drained = server.http.post("/v1/engines/1/drain", json={"timeout_s": 5})
        assert (drained.status_code, drained.json()["state"]) == (200, "drained"), drained.text
    refused = server.http.post("/v1/engines/0/drain")
    assert refused.status_code == 409
    assert "last one that is not drained" in refused.json()["error"]["message"]
    generated = server.counter("vllm:generation_tokens_total", engine="1")
    body = {
        "prompts": [{"prompt": f"hello {i}"} for i in range(6)],
        "group_size": 2,
        "sampling_params": {"max_tokens": 20},
    }
    server.rollout(**body)
    plain = {"prompt": "hello", "max_tokens": 10}
    for _ in range(3):
        assert server.http.post("/v1/completions", json=plain).status_code == 200
    pinned = server.http.post("/v1/completions", json=plain, headers={"x-data-parallel-rank": "1"})
    assert pinned.status_code == 400
    assert "rank 1 is drained" in pinned.json()["error"]["message"]
    assert [engine["state"] for engine in server.engines] == ["active", "drained"]
    server.wait_until_idle()
    assert server.counter("vllm:generation_tokens_total", engine="1") == generated
    assert server.http.post("/v1/engines/1/restore").json()["state"] == "active"
    server.rollout(**body)
    server.wait_until(lambda: server.counter("vllm:generation_tokens_total", engine="1") > generated)
    assert server.engines[1]["num_moved_in"] == before
    assert server.http.post("/v1/engines/2/drain").status_code == 404


def test_what_is_in_no_group_ends_where_it_is(server: Server) -> None:
    body = {"prompt": "hello", "max_tokens": 100, "min_tokens": 100}
    with ThreadPoolExecutor(1) as pool:
        with paused(server):
            asked = pool.submit(server.http.post, "/v1/completions", json=body)
            server.wait_until(lambda: server.num_in_engine == 1)
            (busy,) = [engine["rank"] for engine in server.engines if engine["num_waiting"]]
            now = server.http.post(f"/v1/engines/{busy}/drain", json={"timeout_s": 0}).json()
            assert (now["state"], now["num_moved"], now["num_left"]) == ("draining", 0, 1)
        assert server.http.post(f"/v1/engines/{busy}/drain").json()["state"] == "drained"
        assert asked.result().json()["usage"]["completion_tokens"] == 100
    server.http.post(f"/v1/engines/{busy}/restore").raise_for_status()
