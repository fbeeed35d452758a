"""Ordinary requests of other people in the same batches as groups: nothing of one shows in the other, and none ends the
engine.

Each round sends a mixture, drawn from a seed, of every kind of foreign request and of every kind of ours. NIGHTLY_SEED
in the environment draws other mixtures.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import HERE, TIMEOUT_S, Server, mild_adapter, python_path, serve_command
from vllm_rollout import RolloutClient
from vllm_rollout.adapter.compat import SCALE_OUT_FLAG, has

SEEDS = [int(os.environ["NIGHTLY_SEED"])] if "NIGHTLY_SEED" in os.environ else [1, 2]
NUM_REQUESTS = 40
MOST_LOGPROBS = 20
FLAGS = [
    *("--max-model-len", "2048", "--max-num-seqs", "64", "--dtype", "float32", "--max-num-batched-tokens", "256"),
    *("--enforce-eager", "--max-logprobs", str(MOST_LOGPROBS)),
    *(["--enable-scale-out"] if has(SCALE_OUT_FLAG) else []),  # before, its endpoints are always there
]
Body = dict[str, Any]


@pytest.fixture(scope="module", params=["drafts", "lora"])
def crowd(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with drafts from memory and two API processes, and one with LoRA adapters that goes by priorities."""
    folder = tmp_path_factory.mktemp("crowd")
    flags = {
        "drafts": ["--enable-rollout-drafts", "--api-server-count", "2"],
        "lora": ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--scheduling-policy", "priority"],
    }[request.param]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if request.param == "lora":
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    with Server(serve_command(tiny_model, *FLAGS, *flags), folder / "log", **environment) as server:
        server.goes_by_priority = request.param == "lora"
        if request.param == "lora":
            server.adapters = [str(mild_adapter(tiny_model, folder / name, seed)) for seed, name in enumerate("abc")]
        yield server


def foreign(chance: random.Random) -> tuple[str, Body]:
    """A request that knows nothing of groups: path and body."""
    prompt = [chance.randrange(3, 400) for _ in range(chance.randrange(1, 60))]
    most = chance.choice([1, 5, 40, 150])
    common: Body = {"temperature": chance.choice([0, 0.7, 1]), "seed": chance.choice([None, 3])}
    completion: Body = {"prompt": prompt, "max_tokens": most, **common}
    chat: Body = {"messages": [{"role": "user", "content": "hello " * chance.randrange(1, 9)}], "max_tokens": most}
    kinds: dict[str, tuple[str, Body]] = {
        "logprobs": ("/v1/completions", {**completion, "logprobs": chance.choice([0, 1, 5, MOST_LOGPROBS])}),
        "prompt logprobs": ("/v1/completions", {**completion, "prompt_logprobs": chance.choice([0, 3])}),
        "echo": ("/v1/completions", {**completion, "echo": True, "logprobs": chance.choice([0, 4])}),
        "several": ("/v1/completions", {**completion, "n": 3, "temperature": 1, "logprobs": 2}),
        "stop": ("/v1/completions", {**completion, "stop": ["e", "zz"], "include_stop_str_in_output": True}),
        "penalties": (
            "/v1/completions",
            {**completion, "presence_penalty": 1.0, "repetition_penalty": 1.3, "min_p": 0.01, "top_k": 7},
        ),
        "bias": ("/v1/completions", {**completion, "logit_bias": {"9": 5}, "min_tokens": 1, "bad_words": ["th"]}),
        "chat": ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": chance.choice([0, 2, 10])}),
        "choice": ("/v1/chat/completions", {**chat, "structured_outputs": {"choice": ["yes", "no"]}}),
        "expression": ("/v1/completions", {**completion, "structured_outputs": {"regex": "[ab]{3,8}"}}),
        "tokens": (
            "/inference/v1/generate",
            {"token_ids": prompt, "sampling_params": {"max_tokens": most, "logprobs": chance.choice([None, 0, 2])}},
        ),
        "named tokens": (
            "/inference/v1/generate",
            {
                "token_ids": prompt,
                "sampling_params": {
                    "max_tokens": most,
                    "logprobs": chance.choice([None, 2]),
                    "logprob_token_ids": [1, 2, 30][: chance.randrange(1, 4)],
                },
            },
        ),
        "raced": ("/v1/completions", {**completion, "n": 2, "temperature": 1, "vllm_xargs": {"rollout_redundancy": 2}}),
    }
    return kinds[chance.choice(sorted(kinds))]


def ours(chance: random.Random) -> Body:
    sampling: Body = {"max_tokens": chance.choice([30, 120, 300]), "seed": chance.choice([None, 7])}
    if chance.random() < 0.3:
        sampling["stop"] = ["zq"]
    body: Body = {
        "prompts": [{"prompt_token_ids": [chance.randrange(3, 12) for _ in range(6)]} for _ in range(2)],
        "group_size": 3,
        "redundancy": chance.choice([0, 3]),
        "sampling_params": sampling,
    }
    if chance.random() < 0.4:
        body["pruning"] = {"detection_length": 16, "mode": "shadow"}
    return body


def beside_adapters(
    server: Server, pool: ThreadPoolExecutor, chance: random.Random, number: int
) -> list[Future[tuple[str, Body, int]]]:
    """Requests for two adapters. Of x, the one of that name before still runs. y gets new weights in place."""
    if not server.adapters:
        return []
    if number:
        unload(server, "x")
    load(server, "x", server.adapters[number])
    with RolloutClient(str(server.http.base_url)) as client:
        client.give_weights(server.adapters[number], f"y-{number}", chance.choice(["keep", "recompute"]), adapter="y")
    requests = [(path, {**body, "model": name}) for name in "xy" for path, body in [foreign(chance) for _ in range(4)]]
    return [pool.submit(send, server, *request, leaves=False) for request in requests]


def send(server: Server, path: str, body: Body, leaves: bool) -> tuple[str, Body, int]:
    """The server's answer to a request. If `leaves`, the client goes away instead."""
    try:
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=0.3 if leaves else TIMEOUT_S, trust_env=False)
    except httpx.TimeoutException:
        return path, body, 0
    return path, body, answer.status_code


def load(server: Server, name: str, path: str) -> None:
    body = {"lora_name": name, "lora_path": path}
    server.http.post("/v1/load_lora_adapter", json=body).raise_for_status()


def unload(server: Server, name: str) -> None:
    server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_and_other_requests_of_every_kind_leave_each_other_alone(crowd: Server, seed: int) -> None:
    chance = random.Random(seed)
    others: list[Future[tuple[str, Body, int]]] = []

    def urgency(body: Body) -> Body:
        return {**body, "priority": chance.randrange(-2, 3)} if crowd.goes_by_priority else body

    with ThreadPoolExecutor(24) as pool:
        groups = [pool.submit(crowd.http.post, "/v1/rollouts", json=urgency(ours(chance))) for _ in range(6)]
        for path, body in [foreign(chance) for _ in range(NUM_REQUESTS)]:
            others.append(pool.submit(send, crowd, path, urgency(body), chance.random() < 0.15))
        others += [future for number in range(3) for future in beside_adapters(crowd, pool, chance, number)]
        groups += [pool.submit(crowd.http.post, "/v1/rollouts", json=ours(chance)) for _ in range(4)]
        for _ in range(3):  # as a trainer does between two updates
            crowd.http.post("/pause", params={"mode": "keep"}).raise_for_status()
            crowd.http.post("/resume").raise_for_status()
        assert [said for future in others if (said := future.result())[2] >= 500] == []
        answers = [future.result() for future in groups]
    for name in "xy" if crowd.adapters else ():
        unload(crowd, name)
    assert crowd.http.get("/health").status_code == 200
    for answer in answers:
        assert answer.status_code == 200, answer.text
        for group in answer.json()["groups"]:
            assert (group["status"], group["off_policy"]) == ("complete", False), group
            for trajectory in group["trajectories"]:
                assert len(trajectory["logprobs"]) == len(trajectory["token_ids"]) == trajectory["num_tokens"]
                assert all(value is not None and value <= 0 for value in trajectory["logprobs"])
    crowd.wait_until_idle()


@pytest.fixture(scope="module")
def faulty(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose code of ours raises by chance, in its engine core and its worker."""
    log = tmp_path_factory.mktemp("faulty") / "log"
    command = serve_command(tiny_model, *FLAGS, "--enable-rollout-drafts")
    with Server(command, log, PLANTED_ERRORS="40", PYTHONPATH=python_path(HERE / "planted_errors")) as server:
        yield server


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
def test_exceptions_of_ours_fail_candidates_and_nobody_else(faulty: Server, seed: int) -> None:
    chance = random.Random(seed)
    with ThreadPoolExecutor(24) as pool:
        groups = [pool.submit(faulty.http.post, "/v1/rollouts", json=ours(chance)) for _ in range(12)]
        requests = [foreign(chance) for _ in range(NUM_REQUESTS)]
        requests = [each for each in requests if "vllm_xargs" not in each[1]]
        others = [pool.submit(send, faulty, *each, leaves=False) for each in requests]
        assert [said for future in others if (said := future.result())[2] >= 500] == []
        answers = [future.result() for future in groups]
    assert faulty.http.get("/health").status_code == 200
    failed = []
    for answer in answers:
        assert answer.status_code == 200, answer.text
        for group in answer.json()["groups"]:
            failed += [candidate for candidate in group["candidates"] if candidate["state"] == "failed"]
    assert failed
    assert all("Planted" in candidate["error"] for candidate in failed)
    (engine,) = faulty.http.get("/v1/engines").json()["engines"]
    assert engine["num_internal_errors"] > 0
    faulty.wait_until_idle()


def test_wide_log_probabilities_come_and_go_beside_a_group(crowd: Server) -> None:
    """Regression: rows of a step are as wide as its widest request."""
    sampling = {"max_tokens": 900, "ignore_eos": True}
    body = {"prompts": [{"prompt_token_ids": [5, 6, 7]}], "group_size": 4, "sampling_params": sampling}
    with ThreadPoolExecutor(2) as pool:
        group = pool.submit(crowd.http.post, "/v1/rollouts", json=body)
        crowd.wait_until(lambda: crowd.num_in_engine >= 4 or group.done())
        for width in (5, 0, MOST_LOGPROBS):
            wide = {"prompt": [3, 4], "max_tokens": 3, "logprobs": width}
            assert crowd.http.post("/v1/completions", json=wide).status_code == 200
        named = {"max_tokens": 3, "logprobs": 2, "logprob_token_ids": [1, 2]}
        answer = crowd.http.post("/inference/v1/generate", json={"token_ids": [3, 4], "sampling_params": named})
        assert answer.status_code == 200, answer.text
        assert group.result().status_code == 200
    assert crowd.http.get("/health").status_code == 200


def test_an_adapter_is_loaded_again_under_its_name_while_the_old_one_runs(crowd: Server) -> None:
    """Each request stays with the adapter that it began with. vLLM tells them apart by name, and ends."""
    if not crowd.adapters:
        pytest.skip("of the server with adapters")

    def ask(name: str, num_tokens: int) -> list[int]:
        body = {"model": name, "prompt": [5, 6, 7], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        answer = crowd.http.post("/v1/completions", json={**body, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    alone = []
    for path in crowd.adapters[:2]:
        load(crowd, "alone", path)
        alone.append(ask("alone", 200))
        unload(crowd, "alone")
    load(crowd, "x", crowd.adapters[0])
    with ThreadPoolExecutor(4) as pool:
        old = pool.submit(ask, "x", 1500)
        crowd.wait_until(lambda: crowd.num_in_engine >= 1 or old.done())
        unload(crowd, "x")
        load(crowd, "x", crowd.adapters[1])
        new = pool.submit(ask, "x", 200)
        crowd.wait_until(lambda: crowd.num_in_engine >= 2 or new.done())
        load(crowd, "y", crowd.adapters[2])
        ask("y", 10)
        assert new.result() == alone[1] != alone[0]
        assert old.result()[:200] == alone[0]
    with RolloutClient(str(crowd.http.base_url)) as client:
        for kv, path, expected in zip(("recompute", "keep"), crowd.adapters[:2], alone, strict=True):
            client.give_weights(path, kv, kv, adapter="x")
            assert ask("x", 200) == expected, "what it says alone, and no KV of the one before"
            assert crowd.engines[0]["weight_version"] == kv
    unload(crowd, "x")
    unload(crowd, "y")
    assert crowd.http.get("/health").status_code == 200


def test_new_weights_of_one_policy_concern_neither_another_one_nor_the_base_model(
    crowd: Server, tiny_model: str
) -> None:
    if not crowd.adapters:
        pytest.skip("a server without adapters")
    prompt = {"prompt_token_ids": [5, 6, 7]}
    sampling = {"max_tokens": 400, "ignore_eos": True, "seed": 3}
    with RolloutClient(str(crowd.http.base_url)) as client, ThreadPoolExecutor(3) as pool:
        client.give_weights(tiny_model, "base-1")
        for name, path in zip("xy", crowd.adapters, strict=False):
            client.give_weights(path, f"{name}-1", adapter=name)
        models = (crowd.http.get("/v1/models").json()["data"][0]["id"], "x", "y")
        feeds = [client.feed(2, 1, max_staleness=0, model=model, sampling_params=sampling) for model in models]
        assert [feed.info.weight_version for feed in feeds] == ["base-1", "x-1", "y-1"]
        running = [pool.submit(client.rollout, [prompt], 2, model=each, sampling_params=sampling) for each in models]
        crowd.wait_until(lambda: crowd.num_in_engine >= 6 or any(each.done() for each in running))
        client.give_weights(crowd.adapters[2], "x-2", adapter="x")
        groups = [each.result().groups[0] for each in running]
        assert [feed.refresh().version for feed in feeds] == [0, 1, 0]
        for feed in feeds:
            feed.put([prompt])
            assert feed.batch().groups[0].born_version == feed.info.weight_version
            feed.delete()
    assert [group.weight_versions for group in groups] == [["base-1"], ["x-1", "x-2"], ["y-1"]]
    assert [group.off_policy for group in groups] == [False, True, False]
    for name in "xy":
        unload(crowd, name)


def test_a_policy_whose_logits_are_not_finite_is_told_in_candidates_warnings_and_log(
    crowd: Server, tiny_model: str, tmp_path: Path
) -> None:
    if crowd.adapters:
        pytest.skip("whole weights")
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    (file,) = broken.glob("*.safetensors")
    save_file(
        {name: torch.full_like(each, torch.nan) for name, each in load_file(file).items()}, file, {"format": "pt"}
    )

    def give(folder: Path | str) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        crowd.http.post("/collective_rpc", json=call).raise_for_status()

    body = {
        "prompts": [{"prompt_token_ids": [5, 6, 7]}],
        "group_size": 2,
        "redundancy": 1,
        "sampling_params": {"max_tokens": 30},
    }
    give(broken)
    try:
        answer = crowd.http.post("/v1/rollouts", json=body).json()
        crowd.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3}).raise_for_status()
    finally:
        give(tiny_model)
    (group,) = answer["groups"]
    assert group["status"] == "incomplete"
    assert [(each["state"], "NaN" in each["error"]) for each in group["candidates"]] == [("failed", True)] * 3
    assert "NaN" in answer["warnings"][0]
    assert crowd.log.read_text().count("logits were NaN") == 1, "once for these weights"
    assert crowd.http.post("/v1/rollouts", json=body).json()["groups"][0]["status"] == "complete"


def test_a_grammar_that_cannot_be_compiled_is_named_as_the_cause(crowd: Server) -> None:
    sampling = {"max_tokens": 30, "structured_outputs": {"grammar": "root ::= missing"}}
    body = {"prompts": [{"prompt_token_ids": [5, 6, 7]}], "group_size": 2, "sampling_params": sampling}
    answer = crowd.http.post("/v1/rollouts", json=body)
    if answer.status_code == 200:  # else it was looked at before anything was launched
        assert all("grammar" in each["error"] for each in answer.json()["groups"][0]["candidates"])
    assert answer.status_code < 500
    assert crowd.http.get("/health").status_code == 200
