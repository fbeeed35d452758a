"""`--rollout-parallelism auto` on a real engine (tiny random model): from one worker to two, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Server, emulating, serve_command
from tests.engine.run_rounds import make_run, play
from vllm_rollout.parts.emulation.step_log import read_steps
from vllm_rollout.parts.rounds.rules.planner import QUIET_ROUNDS

NUM_PROMPTS, GROUP_SIZE = 4, 4
KV_BYTES_PER_WORKER = 4 * 2**20
"""1,024 tokens in one worker, and 2,048 in two, of which each has half of the KV heads."""
CROWDED = {"max_tokens": 200, "ignore_eos": True}
"""16 candidates of 200 tokens: far more than fit, so that some are preempted."""
RUN = {
    "group_size": GROUP_SIZE, "prompts_per_round": NUM_PROMPTS, "prompt_speculation": 1.0, "response_speculation": 1.0,
}  # fmt: skip
ROOMY = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def resizable(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "32", "--rollout-parallelism", "auto")
    flags += ("--kv-cache-memory-bytes", str(KV_BYTES_PER_WORKER), "--rollout-parallelism-devices", "2")
    log = tmp_path_factory.mktemp("resizable") / "server.log"
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    # On a CPU that variable, which every server of these tests has, goes before the flag.
    command = ["env", "--unset", "VLLM_CPU_KVCACHE_SPACE", *serve_command(tiny_model, *flags)]
    with Server(command, log, **environment) as server:
        yield server


def teach(server: Server) -> None:
    """Lengths, a calibration and a quality head."""
    answer = server.rollout(
        prompts=[{"id": f"t{i}", "prompt": f"lesson {i}"} for i in range(20)], group_size=4,
        pruning={"detection_length": 4, "mode": "shadow", "min_labels": 1},
        sampling_params={"max_tokens": 12, "ignore_eos": True, "seed": 1},
    )  # fmt: skip
    server.reward(answer, lambda _, trajectory: trajectory["index"] % 2)
    server.wait_until(lambda: server.http.get("/v1/quality_head").status_code == 200)


def learned(server: Server) -> list[bytes]:
    paths = ("/v1/rollouts/state", "/v1/quality_head", "/v1/quality_head/report")
    return [server.http.get(path).content for path in paths]


def now(server: Server) -> dict[str, Any]:
    return server.http.get("/v1/runs/a").json()["parallelism"]


def complete(server: Server) -> dict[str, Any]:
    body = {"prompt": "hello world", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]


def assert_two_workers_score_and_follow_a_grammar(server: Server) -> None:
    (group,) = server.rollout(
        prompts=[{"prompt": "hi"}], group_size=2, redundancy=2, pruning={"detection_length": 4, "mode": "shadow"},
        include=["text"], sampling_params={"max_tokens": 40, "structured_outputs": {"regex": "[ab]{3,8}"}},
    )["groups"]  # fmt: skip
    assert [candidate["state"] for candidate in group["candidates"]] == ["surplus"] * 2
    for trajectory in group["trajectories"]:
        assert trajectory["mean_confidence"] is not None
        assert re.fullmatch("[ab]{3,8}", trajectory["text"])


def test_rounds_that_preempt_get_a_larger_engine_and_quiet_ones_a_smaller(resizable: Server) -> None:
    server = resizable
    server.http.post("/update_weight_version", json={"new_version": "step-7"}).raise_for_status()
    teach(server)
    run = make_run(server, "a", **RUN)
    said = complete(server)

    answer = play(server, run, sampling_params=CROWDED)
    assert len(answer["groups"]) == NUM_PROMPTS
    assert now(server)["preemptions_per_candidate"] > 0
    assert (now(server)["tensor_parallel_size"], now(server)["next_size"], now(server)["reason"]) == (1, 2, "rise")
    before = learned(server)

    # A trainer that pauses to send weights gets the new engine first, or it would send them to the old one.
    with ThreadPoolExecutor(3) as pool:
        pausing = pool.submit(server.http.post, "/pause", params={"mode": "wait"})
        server.wait_until(lambda: "rebuilding the engine" in server.log.read_text())
        assert server.alive
        waiting = pool.submit(complete, server)
        group = pool.submit(
            server.http.post,
            "/v1/rollouts",
            json={"prompts": [{"prompt": "hi"}], "group_size": 2, "sampling_params": ROOMY},
        )
        pausing.result().raise_for_status()
        assert learned(server) == before
        server.http.post("/resume").raise_for_status()
        assert waiting.result() == said  # the same model on two workers
        # A rollout is about weights, which the trainer sends now.
        server.http.post("/update_weight_version", json={"new_version": "step-8"}).raise_for_status()
        assert group.result().json().get("weight_version") == "step-8", group.result().text
    assert now(server)["tensor_parallel_size"] == 2
    assert server.http.get("/get_world_size").json() == {"world_size": 2}
    assert_two_workers_score_and_follow_a_grammar(server)

    for number in range(QUIET_ROUNDS):
        play(server, run, first=NUM_PROMPTS * (number + 1), sampling_params=ROOMY)
    assert (now(server)["tensor_parallel_size"], now(server)["next_size"], now(server)["reason"]) == (2, 1, "quiet")
    server.http.post("/update_weight_version", json={"new_version": "default"}).raise_for_status()
    # Without a word from a trainer the next round begins with it.
    answer = play(server, run, first=NUM_PROMPTS * (QUIET_ROUNDS + 1), sampling_params=ROOMY)
    assert len(answer["groups"]) == NUM_PROMPTS
    assert now(server)["tensor_parallel_size"] == 1
    assert now(server)["num_rebuilds"] == server.counter("vllm_rollout:engine_rebuilds_total") == 2
    assert now(server)["last_rebuild_s"] > 0
    assert learned(server)[1] == before[1]
    assert complete(server) == said
    totals = server.http.get("/v1/runs/a").json()["totals"]
    assert totals["num_returned"] == totals["num_prompts"] == NUM_PROMPTS * (QUIET_ROUNDS + 2)


DEVICE = {
    "sizes": {
        "1": {"step": {"ms": 2.0, "ms_per_request": 0}, "kv_tokens": 1024},
        "2": {"step": {"ms": 1.0, "ms_per_request": 0}, "kv_tokens": 4096},
    },
    "lengths": {"log_normal": {"mean": 200, "sigma": 0}},
}
"""16 candidates of 200 tokens: more than fit into one, and fewer than fit into two."""


@pytest.fixture(scope="module")
def emulated(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("emulated_sizes")
    flags = ("--max-model-len", "512", "--max-num-seqs", "32", *emulating(folder, DEVICE))
    flags += (
        "--rollout-emulate-log",
        str(folder / "steps"),
        "--rollout-parallelism",
        "auto",
        "--rollout-parallelism-devices",
        "4",
    )
    with Server(serve_command(tiny_model, *flags), folder / "server.log") as server:
        yield server, folder / "steps"


def test_an_emulated_engine_becomes_larger_and_has_the_steps_of_its_size(emulated: tuple[Server, Path]) -> None:
    server, steps = emulated
    run = make_run(server, "a", **RUN)
    first = play(server, run, sampling_params={"seed": 1, "max_tokens": 400})
    assert now(server)["allowed_sizes"] == [1, 2]
    assert (now(server)["next_size"], now(server)["reason"]) == (2, "rise")
    second = play(server, run, first=NUM_PROMPTS, sampling_params={"seed": 1, "max_tokens": 400})
    assert (now(server)["tensor_parallel_size"], now(server)["preemptions_per_candidate"]) == (2, 0)
    assert [len(group["trajectories"]) for group in first["groups"] + second["groups"]] == [4] * 2 * NUM_PROMPTS
    lasted = [step.end - step.start for step in read_steps(steps)[0].steps]
    assert lasted[0] == pytest.approx(0.002, rel=1e-4)
    assert lasted[-1] == pytest.approx(0.001, rel=1e-4)
