"""vLLM's Ray backends: engine cores and workers are Ray actors, on two hosts.

Devices are named "GPU" by a platform plugin (`ray_on_cpu`); everything else is vLLM's and ours, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import Server, ends_after, serve_command
from tests.engine.ray_cluster import RayCluster

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

NUM_TRIES = 10
PRUNING = {"detection_length": 8, "keep_ratio": 0.5, "min_labels": 4, "allow_fewer": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(num_hosts=2, gpus_per_host=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: RayCluster, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One engine core per host; the executor is Ray's too."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ("--max-model-len", "2048", "--dtype", "float32", "--api-server-count", "1")
    flags += ("--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-backend", "ray")
    with Server(serve_command(tiny_model, *flags), log, **cluster.environment) as server:
        yield server


def test_every_engine_core_is_an_actor_on_its_host_and_answers_our_calls(server: Server, cluster: RayCluster) -> None:
    assert [(engine["rank"], engine["state"]) for engine in server.engines] == [(0, "active"), (1, "active")]
    log = server.log.read_text()
    # Ray names the host of whoever writes, where it is not the server's own.
    for actor in ("EngineCoreActor", "RayWorkerProc"):
        assert f"({actor} pid=" in log
        assert f"ip={cluster.hosts[1]})" in log


def test_groups_race_on_both_hosts(server: Server) -> None:
    prompts = [{"id": f"q{i}", "prompt": f"hello {i}"} for i in range(4)]
    answer = server.rollout(prompts=prompts, group_size=2, redundancy=2, sampling_params=ends_after(50))
    assert [group["status"] for group in answer["groups"]] == ["complete"] * 4
    assert all(candidate["state"] == "surplus" for group in answer["groups"] for candidate in group["candidates"])
    for rank in "01":
        server.wait_until(lambda rank=rank: server.counter("vllm:generation_tokens_total", engine=rank) > 0)


def test_rewards_teach_a_head_that_prunes_on_both_hosts(server: Server) -> None:
    def learn() -> dict[str, Any]:
        prompts = [{"id": prompt, "prompt": "hello"} for prompt in ("q", "r")]
        sampling = {"min_tokens": 20, "max_tokens": 40}
        answer = server.rollout(prompts=prompts, group_size=8, pruning=PRUNING, sampling_params=sampling)
        posted = server.reward(answer, lambda _, trajectory: trajectory["token_ids"][6] % 2)
        assert posted["counts"]["accepted"] == posted["num_training"] > 0
        return answer

    def has_pruned(group: dict[str, Any]) -> bool:
        return any(candidate["state"] == "pruned" for candidate in group["candidates"])

    def head_is_trained() -> bool:
        return server.http.get("/v1/quality_head/report").json()["head"] is not None

    server.wait_until(lambda: all(has_pruned(group) for group in learn()["groups"]) and head_is_trained())


def drained_on_its_way(server: Server, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[int, dict[str, Any]]]:
    """A rollout whose rank is drained as soon as it says something: the rank, the drain's answer, its trajectories."""
    moved: dict[int, dict[str, Any]] = {}
    drained = None
    for event in server.events(**body, stream_tokens=1):
        if event["type"] == "tokens" and drained is None:
            busy = max(server.engines, key=lambda engine: engine["num_groups"])["rank"]
            drained = server.http.post(f"/v1/engines/{busy}/drain").json()
        elif event["type"] == "trajectory":
            moved[event["trajectory"]["index"]] = event["trajectory"]
    assert drained is not None
    return busy, drained, moved


def test_a_group_moves_to_the_other_host_and_says_what_it_would_have_said(server: Server) -> None:
    sampling = {"seed": 5, "max_tokens": 1000, "ignore_eos": True}
    body = {"prompts": [{"id": "q", "prompt": "hello"}], "group_size": 3, "sampling_params": sampling}
    unmoved = server.rollout(**body)
    for _ in range(NUM_TRIES):
        before = server.engines
        busy, drained, moved = drained_on_its_way(server, body)
        assert (drained["state"], drained["num_left"]) == ("drained", 0)
        if drained["num_moved"]:
            break
        # On a fast machine that stalls it was over before the drain came.
        assert server.http.post(f"/v1/engines/{busy}/restore").json()["state"] == "active"
    assert drained["num_moved"] == 1
    now = server.engines
    assert now[busy]["num_moved_out"] == before[busy]["num_moved_out"] + 1
    assert now[1 - busy]["num_moved_in"] == before[1 - busy]["num_moved_in"] + 1
    for trajectory in unmoved["groups"][0]["trajectories"]:
        assert moved[trajectory["index"]]["token_ids"] == trajectory["token_ids"]
    assert server.http.post(f"/v1/engines/{busy}/restore").json()["state"] == "active"
