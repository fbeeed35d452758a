"""Groups move between two real ranks: what they say is what they would have said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Server, serve_command
from tests.engine.test_race import V2

NUM_TOKENS = 160
"""On this model no step is so short that a group could end before it is moved."""


@pytest.fixture(scope="module")
def server(default_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ("--max-model-len", "1024", "--data-parallel-size", "2", "--api-server-count", "1", "--dtype", "float32")
    server = Server(serve_command(default_model, *flags), log, VLLM_SERVER_DEV_MODE="1")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def v2_server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Model runner V2, the GPU's default, in Triton's interpreter."""
    log = tmp_path_factory.mktemp("v2") / "server.log"
    flags = ("--max-model-len", "512", "--data-parallel-size", "2", "--api-server-count", "1", "--dtype", "float32")
    server = Server(serve_command(tiny_model, *flags, "--max-num-seqs", "8", "--enforce-eager"), log, **V2)
    yield server
    server.stop()


@pytest.fixture
def nixl_server(default_model: str, tmp_path: Path) -> Iterator[Server]:
    flags = ("--max-model-len", "1024", "--data-parallel-size", "2", "--api-server-count", "1", "--dtype", "float32")
    command = serve_command(default_model, *flags, "--enforce-eager", "--rollout-move-kv", "nixl")
    server = Server(command, tmp_path / "server.log", UCX_TLS="tcp")
    yield server
    server.stop()


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """What comes meanwhile waits in the engine, so that however slow the machine, it is there together."""
    server.http.post("/pause?mode=keep&clear_cache=false").raise_for_status()
    try:
        yield
    finally:
        server.http.post("/resume").raise_for_status()


def rollout(
    server: Server, after: int | None = None, move: Callable[[Server], dict[str, Any]] | None = None, **fields: Any
) -> dict[str, Any]:
    """The last event of a rollout and its trajectories; `after` so many tokens of one of them it is moved."""
    body = {"prompts": [{"id": "q", "prompt": "hello"}], "group_size": 3, "stream": True, "stream_tokens": 8, **fields}
    found: dict[str, Any] = {"trajectories": {}, "tokens": {}, "moves": []}
    with server.http.stream("POST", "/v1/rollouts", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "tokens":
                tokens = found["tokens"].setdefault(event["index"], [])
                assert event["offset"] == len(tokens)
                tokens += event["token_ids"]
                if after is not None and len(tokens) >= after:
                    after = None
                    found["moves"].append((move or move_all)(server))
            elif event["type"] == "trajectory":
                trajectory = event["trajectory"]
                found["trajectories"][trajectory["index"]] = trajectory
            elif event["type"] == "done":
                found["done"] = event
    return found


def engines(server: Server) -> list[dict[str, Any]]:
    return server.http.get("/v1/engines").json()["engines"]


def move_all(server: Server) -> dict[str, Any]:
    """All groups of the rank that has some, to the other one."""
    (busy,) = [engine["rank"] for engine in engines(server) if engine["num_groups"]]
    answer = server.http.post(f"/v1/engines/{busy}/drain")
    assert answer.status_code == 200, answer.text
    restored = server.http.post(f"/v1/engines/{busy}/restore")
    assert restored.status_code == 200, restored.text
    assert restored.json()["state"] == "active"
    return answer.json()


def move_while_paused(server: Server) -> dict[str, Any]:
    with paused(server):
        return move_all(server)


def nums_of_blocks(server: Server) -> list[int]:
    """KV blocks that came with groups, one number per group."""
    return [int(found) for found in re.findall(r"came with (\d+) KV blocks", server.log.read_text())]


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 150},
])  # fmt: skip
def test_a_moved_group_says_what_it_would_have_said(server: Server, sampling: dict[str, Any]) -> None:
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    moved = rollout(server, after=40, sampling=sampling)  # first, since what was said before is in the target's cache
    unmoved = rollout(server, sampling=sampling)
    (answer,) = moved["moves"]
    assert (answer["state"], answer["num_moved"], answer["num_left"]) == ("drained", 1, 0)
    num_different = len({tuple(trajectory["token_ids"][:31]) for trajectory in moved["trajectories"].values()})
    assert nums_of_blocks(server)[-1] >= num_different  # what is full after 40 tokens
    for index in range(3):
        before, after = unmoved["trajectories"][index], moved["trajectories"][index]
        assert after["token_ids"] == before["token_ids"]
        assert after["token_ids"] == moved["tokens"][index]
        assert after["logprobs"] == pytest.approx(before["logprobs"], abs=1e-3)
        assert after["mean_confidence"] == pytest.approx(before["mean_confidence"], rel=1e-3)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}])
def test_model_runner_v2_goes_on_too(v2_server: Server, sampling: dict[str, Any]) -> None:
    fields = {"group_size": 2, "sampling": {"max_tokens": 60, "ignore_eos": True, **sampling}, "stream_tokens": 1}
    unmoved = rollout(v2_server, **fields)
    moved = rollout(v2_server, after=10, **fields)
    assert moved["moves"][0]["num_moved"] == 1
    for index in range(2):
        before, after = unmoved["trajectories"][index], moved["trajectories"][index]
        assert after["token_ids"] == before["token_ids"]
        assert after["logprobs"] == pytest.approx(before["logprobs"], abs=1e-3)
        assert after["mean_confidence"] == pytest.approx(before["mean_confidence"], rel=1e-3)


def test_blocks_that_move_by_nixl_over_tcp_arrive_whole(nixl_server: Server) -> None:
    """As between two hosts without RDMA."""
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    moved = rollout(nixl_server, after=40, sampling=sampling)
    unmoved = rollout(nixl_server, sampling=sampling)
    assert moved["moves"][0]["num_moved"] == 1
    assert nums_of_blocks(nixl_server)[-1] >= 3
    assert "KV blocks of groups that move go by: nixl" in nixl_server.log.read_text()
    for index in range(3):
        assert moved["trajectories"][index]["token_ids"] == unmoved["trajectories"][index]["token_ids"]


def test_scores_stop_strings_and_text_go_on(server: Server) -> None:
    sampling = {"max_tokens": NUM_TOKENS, "min_tokens": 100, "seed": 3, "temperature": 1.0, "stop": ["e"]}
    fields = {"pruning": {"detection_length": 64, "mode": "shadow"}, "return": {"text": True}, "sampling": sampling}
    unmoved = rollout(server, **fields)
    moved = rollout(server, after=40, **fields)
    assert moved["moves"][0]["num_moved"] == 1
    assert sorted(moved["trajectories"]) == sorted(unmoved["trajectories"])
    for index, before in unmoved["trajectories"].items():
        after = moved["trajectories"][index]
        assert (after["token_ids"], after["text"]) == (before["token_ids"], before["text"])
        assert (after["finish_reason"], after["stop_reason"]) == (before["finish_reason"], before["stop_reason"])
        assert after["score"] == pytest.approx(before["score"], abs=1e-3)


def test_requests_that_join_a_group_follow_it(server: Server) -> None:
    """The last of them comes after the move."""
    xargs = {"rollout_group_id": "late", "rollout_group_size": 2, "rollout_num_candidates": 4}

    def ask(num_tokens: int) -> dict[str, Any]:
        body = {"prompt": "hello", "max_tokens": num_tokens, "min_tokens": num_tokens}
        response = server.http.post("/v1/completions", json={**body, "vllm_xargs": xargs}, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    with ThreadPoolExecutor(4) as pool:
        with paused(server):
            first = [pool.submit(ask, num_tokens) for num_tokens in (300, 305, 310)]
            server.wait_until(lambda: server.num_in_engine == 3)
        assert move_all(server)["num_moved"] == 1
        late = pool.submit(ask, 5)
        assert late.result()["finish_reason"] == "length"
        endings = [each.result() for each in first]
    assert [ending["stop_reason"] for ending in endings] == [None, "surplus", "surplus"]


def test_a_drained_rank_gets_nothing_until_it_is_restored(server: Server) -> None:
    before = engines(server)[1]["num_moved_in"]
    for _ in range(2):
        drained = server.http.post("/v1/engines/1/drain", json={"timeout_s": 5})
        assert drained.status_code == 200, drained.text
        assert drained.json()["state"] == "drained"
    refused = server.http.post("/v1/engines/0/drain")
    assert refused.status_code == 409
    assert "last one that is not drained" in refused.json()["error"]["message"]
    generated = server.counter("vllm:generation_tokens_total", engine="1")
    body = {"prompts": [{"prompt": f"hello {i}"} for i in range(6)], "group_size": 2, "sampling": {"max_tokens": 20}}
    assert server.http.post("/v1/rollouts", json=body).status_code == 200
    plain = {"prompt": "hello", "max_tokens": 10}
    for _ in range(3):
        assert server.http.post("/v1/completions", json=plain).status_code == 200
    pinned = server.http.post("/v1/completions", json=plain, headers={"x-data-parallel-rank": "1"})
    assert pinned.status_code == 400
    assert "rank 1 is drained" in pinned.json()["error"]["message"]
    assert [engine["state"] for engine in engines(server)] == ["active", "drained"]
    server.wait_until_idle()
    assert server.counter("vllm:generation_tokens_total", engine="1") == generated
    assert server.http.post("/v1/engines/1/restore").json()["state"] == "active"
    assert server.http.post("/v1/rollouts", json=body).status_code == 200
    server.wait_until(lambda: server.counter("vllm:generation_tokens_total", engine="1") > generated)
    assert engines(server)[1]["num_moved_in"] == before
    assert server.http.post("/v1/engines/2/drain").status_code == 404


def test_what_is_in_no_group_ends_where_it_is(server: Server) -> None:
    body = {"prompt": "hello", "max_tokens": 100, "min_tokens": 100}
    with ThreadPoolExecutor(1) as pool:
        with paused(server):
            asked = pool.submit(server.http.post, "/v1/completions", json=body, timeout=120)
            server.wait_until(lambda: server.num_in_engine == 1)
            (busy,) = [engine["rank"] for engine in engines(server) if engine["num_waiting"]]
            now = server.http.post(f"/v1/engines/{busy}/drain", json={"timeout_s": 0}).json()
            assert (now["state"], now["num_moved"], now["num_left"]) == ("draining", 0, 1)
        assert server.http.post(f"/v1/engines/{busy}/drain").json()["state"] == "drained"
        assert asked.result().json()["usage"]["completion_tokens"] == 100
    server.http.post(f"/v1/engines/{busy}/restore")


def test_a_group_moves_while_generation_is_paused(server: Server) -> None:
    """As for an update of weights; it goes on elsewhere when generation is resumed."""
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 8, "temperature": 1.0}
    unmoved = rollout(server, sampling=sampling)
    found = rollout(server, after=40, move=move_while_paused, sampling=sampling)
    (answer,) = found["moves"]
    assert (answer["state"], answer["num_moved"]) == ("drained", 1)
    for index in range(3):
        assert found["trajectories"][index]["token_ids"] == unmoved["trajectories"][index]["token_ids"]


def test_a_group_moves_before_its_first_token(server: Server) -> None:
    """Paused before it comes, so that all of its candidates wait."""
    sampling = {"max_tokens": 20, "ignore_eos": True, "seed": 9, "temperature": 1.0}
    unmoved = rollout(server, sampling=sampling)
    with ThreadPoolExecutor(1) as pool:
        with paused(server):
            moved = pool.submit(rollout, server, sampling=sampling)
            server.wait_until(lambda: server.num_in_engine == 3)
            answer = move_all(server)
        found = moved.result()
    assert answer["num_moved"] == 1
    for index in range(3):
        assert found["trajectories"][index]["token_ids"] == unmoved["trajectories"][index]["token_ids"]
