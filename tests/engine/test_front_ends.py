"""vLLM's Rust front end beside ours, on one emulated engine. Skipped where its binary is not: nothing is fetched."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.front_end import binary
from tests.engine.conftest import TIMEOUT_S, Server, emulating, serve_command
from vllm_rollout.process import free_port

BINARY = binary.found()
pytestmark = pytest.mark.skipif(
    BINARY is None, reason="vllm-rs is not here; `python -m benchmarks.front_end.binary` fetches it (330 MB)"
)
DEVICE = {"step": {"ms": 2.0}, "kv_tokens": 65536, "lengths": {"log_normal": {"mean": 60, "sigma": 0.8, "cap": 600}}}
KEY = {"authorization": "Bearer sk-one"}


class TwoFrontEnds(Server):
    """A server whose own address is the Rust front end's."""

    ours: httpx.Client


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoFrontEnds]:
    folder, port = tmp_path_factory.mktemp("front_ends"), free_port()
    flags = [*emulating(folder, DEVICE), "--rollout-port", str(port), "--api-key", "sk-one"]
    command = serve_command(tiny_model, "--max-model-len", "2048", *flags)
    rust = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(BINARY)}
    with (
        TwoFrontEnds(command, folder / "server.log", **rust) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=KEY, timeout=TIMEOUT_S) as server.ours,
    ):
        server.http.headers.update(KEY)
        server.wait_until(lambda: answers(server.ours))
        yield server


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def complete(http: httpx.Client, request_id: str = "", **body: Any) -> httpx.Response:
    headers = {"x-request-id": request_id} if request_id else {}
    return http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 600, **body}, headers=headers)


def race(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    join = {"rollout_group_id": name, "rollout_group_size": 2, "rollout_num_candidates": 4}
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(
                complete, http, f"{name}-{i}", seed=i,
                vllm_xargs={**join, "rollout_detection_length": 2, "emulate_lengths": 100 + 200 * i},
            )
            for i in range(4)
        ]  # fmt: skip
    return [answer.result().json() for answer in asked]


def test_requests_race_at_either_port_and_are_rewarded_by_their_ids(server: TwoFrontEnds) -> None:
    for http, name in ((server.http, "rust"), (server.ours, "python")):
        answers = race(http, name)
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop", "stop", "abort", "abort"]
        rewards = [{"request_id": answer["id"], "index": 0, "reward": 1.0} for answer in answers]
        told = server.ours.post("/v1/rewards", json={"rewards": rewards}).json()
        assert [result["status"] for result in told["results"]] == ["accepted"] * 2 + ["unfinished"] * 2


def test_rollouts_and_runs_go_on_while_the_rust_front_end_is_asked(server: TwoFrontEnds) -> None:
    sampling = {"max_tokens": 600, "seed": 1}
    prompts = [{"id": f"p{i}", "prompt_token_ids": [5, 6, i]} for i in range(8)]
    with ThreadPoolExecutor(16) as pool:
        plain = [pool.submit(complete, server.http, seed=i) for i in range(32)]
        body = {"prompts": prompts, "group_size": 2, "redundancy": 2, "sampling_params": sampling}
        groups = pool.submit(server.ours.post, "/v1/rollouts", json=body).result().json()["groups"]
        assert {answer.result().status_code for answer in plain} == {200}
    assert Counter(group["status"] for group in groups) == {"complete": 8}
    run = {"id": "run", "group_size": 2, "prompts_per_round": 2, "sampling_params": sampling}
    assert server.ours.post("/v1/runs", json=run).status_code == 201, "one process has all rounds"


def test_what_the_rust_front_end_cannot_say_is_a_500_and_harms_nobody(server: TwoFrontEnds) -> None:
    assert complete(server.http, n=2).status_code == 400
    for xargs in ({"rollout_redundancy": 2}, {"rollout_group_size": 0}, {"emulate_lengths": "long"}):
        assert complete(server.http, vllm_xargs=xargs).status_code == 500
        assert complete(server.ours, vllm_xargs={"rollout_group_size": 0}).status_code == 400
    assert complete(server.http, vllm_xargs={"vllm_rollout": [1]}).status_code == 200
    assert "rollout_redundancy needs rollout_group_size" in server.log.read_text()
    assert server.http.post("/v1/rollouts", json={}).status_code == 404
    assert answers(server.http)
    assert answers(server.ours)
