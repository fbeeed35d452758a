"""Two LoRA adapters and their base model on one real engine (tiny random model): what is learned of each is its own.

The task: for one adapter prompts of one kind succeed, for the other those of the other kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from conformance.prime_rl import make_adapter
from tests.engine.conftest import Server, serve_command

DETECTION_LENGTH = 8
SHADOW = {"detection_length": DETECTION_LENGTH, "mode": "shadow", "min_labels": 8}
GOOD = {"a": 400, "b": 10, None: 10}
"""First token of the prompts that succeed, by served name."""
NUM_LESSONS = 5


class AdapterServer(Server):
    num_rollouts = 0

    def rollout(self, model: str | None, **fields: Any) -> dict[str, Any]:
        prompts = [
            {"id": f"{kind}-{number}", "prompt_token_ids": [kind, 20 + number, 30 + number]}
            for number in range(8)
            for kind in (10, 400)
        ]
        self.num_rollouts += 1
        sampling = {"min_tokens": 2 * DETECTION_LENGTH, "max_tokens": 40, "seed": 100 * self.num_rollouts}
        body = {"model": model, "prompts": prompts, "group_size": 4, "pruning": SHADOW, "sampling": sampling, **fields}
        response = self.http.post("/v1/rollouts", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str, model: str | None) -> Any:
        response = self.http.get(path, params={} if model is None else {"model": model})
        assert response.status_code == 200, response.text
        return response

    def head_version(self, model: str | None) -> int:
        head = self.get("/v1/quality_head/report", model).json()["head"]
        return 0 if head is None else head["version"]

    def teach(self, model: str | None) -> None:
        """A rollout and its rewards, until the head has taken them in."""
        answer = self.rollout(model)
        version = self.head_version(model)
        rewards = [
            {"prompt_id": group["prompt_id"], "index": t["index"], "reward": is_success(group["prompt_id"], model)}
            for group in answer["groups"]
            for t in group["trajectories"]
        ]
        response = self.http.post(f"/v1/rollouts/{answer['id']}/rewards", json={"rewards": rewards})
        assert response.json()["counts"]["accepted"] == len(rewards), response.text
        self.wait_until(lambda: self.head_version(model) > version)

    def known_of(self, model: str | None) -> list[Any]:
        report, prompts = self.get("/v1/quality_head/report", model), self.get("/v1/rollouts/prompts", model)
        return [report.json(), prompts.json(), self.get("/v1/quality_head", model).content]


def is_success(prompt_id: str, model: str | None) -> float:
    return float(prompt_id.startswith(f"{GOOD[model]}-"))


def scores(answer: dict[str, Any], good: int) -> tuple[list[float], list[float]]:
    """Of trajectories of prompts that begin with `good`, and of the others."""
    by_kind: tuple[list[float], list[float]] = ([], [])
    for group in answer["groups"]:
        for trajectory in group["trajectories"]:
            assert trajectory["signal"] == "head"
            by_kind[not group["prompt_id"].startswith(f"{good}-")].append(trajectory["score"])
    return by_kind


def share_in_order(answer: dict[str, Any], good: int) -> float:
    """How often a good one scores above another."""
    above, below = scores(answer, good)
    return sum(one > other for one in above for other in below) / (len(above) * len(below))


def mild_adapter(model: str, folder: Path, seed: int) -> Path:
    """About as large as the weights that it is added to, so that states still tell prompts apart."""
    file = make_adapter(Path(model), folder, seed) / "adapter_model.safetensors"
    tensors = {name: 1e-3 * tensor if "lora_B" in name else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServer]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [f"{name}={mild_adapter(tiny_model, folder / name, seed)}" for seed, name in enumerate("ab", start=1)]
    flags = ("--max-model-len", "2048", "--max-num-seqs", "128", "--dtype", "float32")
    flags += ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *adapters)
    server = AdapterServer(serve_command(tiny_model, *flags), folder / "server.log")
    for _ in range(NUM_LESSONS):
        for model in GOOD:
            server.teach(model)
    yield server
    server.stop()


def test_rewards_for_one_adapter_leave_the_other_and_the_base_model_unchanged(server: AdapterServer) -> None:
    before = {model: server.known_of(model) for model in GOOD}
    server.teach("a")
    for model in ("b", None):
        assert server.known_of(model) == before[model]
    labels = [known[0]["head"]["num_labels"] for known in (server.known_of("a"), before["a"])]
    assert labels[0] - labels[1] == 64


def test_candidates_of_several_names_run_together_and_each_is_scored_by_the_head_of_its_own(
    server: AdapterServer,
) -> None:
    versions = {model: server.head_version(model) for model in GOOD}
    with ThreadPoolExecutor(len(GOOD)) as pool:
        answers = dict(zip(GOOD, pool.map(server.rollout, GOOD), strict=True))
    for model, answer in answers.items():
        seen = {t["head_version"] for group in answer["groups"] for t in group["trajectories"]}
        assert seen == {versions[model]}
    assert len(set(versions.values())) > 1
    for model, good in GOOD.items():
        assert share_in_order(answers[model], good) > 0.8
    texts = [[t["token_ids"] for group in answers[model]["groups"] for t in group["trajectories"]] for model in GOOD]
    assert texts[0] != texts[1] != texts[2], "the adapters do change what is said"


def test_requests_of_the_openai_endpoints_teach_the_adapter_that_they_name(server: AdapterServer) -> None:
    xargs = {"rollout_redundancy": 1, "rollout_detection_length": DETECTION_LENGTH, "rollout_pruning_mode": "shadow"}
    joins = {"rollout_group_id": "g", "rollout_group_size": 1, "rollout_detection_length": DETECTION_LENGTH}
    before = {model: server.known_of(model) for model in GOOD}
    rewards = []
    for fields in ({"n": 2, "vllm_xargs": xargs}, {"vllm_xargs": {**joins, "rollout_pruning_mode": "shadow"}}):
        body = {"model": "b", "prompt": [10, 20, 30], "max_tokens": 24, "min_tokens": 16, **fields}
        answer = server.http.post("/v1/completions", json=body).json()
        rewards += [{"request_id": answer["id"], "index": each["index"], "reward": 1.0} for each in answer["choices"]]
    posted = server.http.post("/v1/rewards", json={"rewards": rewards}).json()
    assert posted["counts"]["accepted"] == len(rewards) == 3
    assert posted["head_versions"] == {}
    assert posted["adapter_head_versions"] == {"b": {str(DETECTION_LENGTH): before["b"][0]["head"]["version"]}}
    for model in ("a", None):
        assert server.known_of(model) == before[model]
    assert server.known_of("b")[0]["head"]["num_labels"] - before["b"][0]["head"]["num_labels"] == 3


def test_a_state_has_every_name_and_a_head_goes_where_it_is_put(server: AdapterServer) -> None:
    state = server.http.get("/v1/rollouts/state").content
    before = {model: server.known_of(model) for model in GOOD}
    head = before["a"][2]
    put = server.http.put("/v1/quality_head", params={"model": "b"}, content=head)
    assert (put.status_code, put.json()["adapter"]) == (200, "b")
    assert server.known_of("b")[2] == head
    assert share_in_order(server.rollout("b"), GOOD["a"]) > share_in_order(server.rollout("b"), GOOD["b"])
    assert server.http.put("/v1/rollouts/state", content=state).status_code == 204
    restored = {model: server.known_of(model) for model in GOOD}
    for model in GOOD:
        assert restored[model][1:] == before[model][1:]
        for field in ("head", "losses", "signals", "audit"):
            assert restored[model][0][field] == before[model][0][field]
    response = server.http.get("/v1/quality_head/report", params={"model": "c"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
