"""Pruning and learning on a real engine (tiny random model): a head learns from posted rewards, and what it learned
stops candidates, survives failures and restarts.

The task: a prompt of one kind always succeeds, of the other kind never. The hidden states tell them apart.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save

from tests.engine.conftest import HERE, Server, ends_after, python_path, race_joined, serve_command
from vllm_rollout.adapter.compat import WEIGHT_SPANS, has

DETECTION_LENGTH = 8
SHADOW = {"detection_length": DETECTION_LENGTH, "mode": "shadow", "min_labels": 8}
ACTIVE = {"detection_length": DETECTION_LENGTH, "min_labels": 8}
KINDS = (10, 400)
"""First token of a prompt of each kind; the second kind succeeds."""
NUM_KINDS_PROMPTS = 8
NUM_LESSONS = 6


class LearningServer(Server):
    """A server whose quality head is taught by this module: with seeds, so that it learns the same every time."""

    taught = False
    num_rollouts = 0

    def rollout(self, **fields: Any) -> dict[str, Any]:
        prompts = [
            {"id": f"{kind}-{number}", "prompt_token_ids": [kind, 20 + number, 30 + number]}
            for number in range(NUM_KINDS_PROMPTS)
            for kind in KINDS
        ]
        self.num_rollouts += 1
        sampling = {"min_tokens": 2 * DETECTION_LENGTH, "max_tokens": 40, "seed": 100 * self.num_rollouts}
        body = {"prompts": prompts, "group_size": 4, "sampling": sampling, **fields}
        response = self.http.post("/v1/rollouts", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def post_rewards(self, answer: dict[str, Any]) -> dict[str, Any]:
        rewards = [
            {"prompt_id": group["prompt_id"], "index": t["index"], "reward": float(is_success(group["prompt_id"]))}
            for group in answer["groups"]
            for t in group["trajectories"]
        ]
        response = self.http.post(f"/v1/rollouts/{answer['id']}/rewards", json={"rewards": rewards})
        assert response.status_code == 200, response.text
        return response.json()

    def report(self, detection_length: int = DETECTION_LENGTH) -> dict[str, Any]:
        response = self.http.get("/v1/quality_head/report", params={"detection_length": detection_length})
        assert response.status_code == 200, response.text
        return response.json()

    def head(self) -> bytes:
        response = self.http.get("/v1/quality_head", params={"detection_length": DETECTION_LENGTH})
        assert response.status_code == 200, response.text
        return response.content

    def head_version(self) -> int:
        head = self.report()["head"]
        return 0 if head is None else head["version"]

    def teach(self) -> None:
        """One shadow rollout with its rewards, until the head has taken them in."""
        version = self.head_version() if self.taught else 0
        self.post_rewards(self.rollout(pruning=SHADOW))
        self.wait_until_learned(version)
        self.taught = True

    def wait_until_learned(self, version: int) -> None:
        """What one post teaches makes one version after `version`."""
        self.wait_until(lambda: self.head_version() > version)


def is_success(prompt_id: str) -> bool:
    return prompt_id.startswith(f"{KINDS[1]}-")


def learning_server(model: str, state: Path, log: Path) -> LearningServer:
    flags = ("--max-model-len", "2048", "--max-num-seqs", "64", "--dtype", "float32", "--rollout-state", str(state))
    flags += ("--worker-extension-cls", "trainer_extension.TrainerExtension")
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": python_path(HERE)}
    return LearningServer(serve_command(model, *flags), log, **environment)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


@pytest.fixture(scope="module")
def server(tiny_model: str, files: Path) -> Iterator[LearningServer]:
    server = learning_server(tiny_model, files / "state" / "rollout.json", files / "server.log")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def taught(server: LearningServer) -> LearningServer:
    for _ in range(NUM_LESSONS):
        server.teach()
    return server


def test_nothing_is_pruned_and_the_answer_says_so_while_nothing_is_learned(server: LearningServer) -> None:
    cold = {"detection_length": DETECTION_LENGTH, "min_labels": 1000}
    answer = server.rollout(pruning=cold, redundancy=4, early_stop=False)  # all reach the detection length
    assert answer["usage"]["num_scored"] == answer["usage"]["num_candidates"]
    assert answer["usage"]["num_pruned"] == 0
    assert any("cold start" in warning for warning in answer["warnings"])
    trajectory = answer["groups"][0]["trajectories"][0]
    assert trajectory["success_probability"] is None
    assert trajectory["survival_probability"] == 1


@pytest.mark.versions
def test_groups_behind_the_openai_endpoints_learn_too(server: LearningServer) -> None:
    """By the ids of their answers: a completion of two prompts, a chat, and requests that join a group."""
    xargs = {"rollout_redundancy": 1, "rollout_detection_length": 4, "rollout_pruning_mode": "shadow"}
    common = {"temperature": 1.0, "max_tokens": 12, "min_tokens": 8}
    body = {**common, "prompt": [[10, 20, 30], [10, 21, 31]], "n": 2, "vllm_xargs": xargs}
    completion = server.http.post("/v1/completions", json=body).json()
    messages = [{"role": "user", "content": "2 + 2"}]
    body = {**common, "messages": messages, "n": 3, "vllm_xargs": xargs}
    chat = server.http.post("/v1/chat/completions", json=body).json()
    named = [(answer["id"], choice["index"]) for answer in (completion, chat) for choice in answer["choices"]]
    assert len(named) == 2 * 2 + 3
    join = {"rollout_group_id": "g", "rollout_group_size": 1, "rollout_detection_length": 4}
    body = {**common, "prompt": [10, 22, 32], "vllm_xargs": {**join, "rollout_pruning_mode": "shadow"}}
    joined = server.http.post("/v1/completions", json=body).json()
    body = {"rewards": [{"request_id": id, "index": index, "reward": 1.0} for id, index in [*named, (joined["id"], 0)]]}
    response = server.http.post("/v1/rewards", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["counts"]["accepted"] == 8, response.text
    assert response.json()["num_training"] == 8
    again = server.http.post("/v1/rewards", json=body, headers={"authorization": "Bearer another"}).json()
    assert again["counts"]["unknown"] == 8, "another client's"


@pytest.mark.versions
def test_a_head_learns_from_posted_rewards_alone(taught: LearningServer) -> None:
    answer = taught.rollout(pruning=SHADOW)
    scores: dict[bool, list[float]] = {True: [], False: []}
    for group in answer["groups"]:
        for trajectory in group["trajectories"]:
            assert trajectory["signal"] == "head"
            assert trajectory["head_version"] == taught.head_version() > 0
            scores[is_success(group["prompt_id"])].append(trajectory["score"])
    ordered = [good > bad for good in scores[True] for bad in scores[False]]
    assert sum(ordered) / len(ordered) > 0.9
    report = taught.report()
    assert report["signals"]["head"]["auc"] > 0.8  # all versions, the first ones too
    assert report["head"]["num_labels"] >= NUM_LESSONS * 2 * NUM_KINDS_PROMPTS * 4
    assert report["num_evicted"] == 0


def test_shadow_mode_stops_nothing_and_says_what_it_would_have_stopped(taught: LearningServer) -> None:
    answer = taught.rollout(pruning=SHADOW, redundancy=4, early_stop=False)
    candidates = [c for group in answer["groups"] for c in group["trajectories"] + group["candidates"]]
    assert answer["usage"]["num_pruned"] == 0
    assert any(candidate["would_prune"] for candidate in candidates)
    assert all(candidate["survival_probability"] == 1 for candidate in candidates)


@pytest.mark.versions
def test_pruned_candidates_stop_with_the_token_they_were_judged_by(taught: LearningServer) -> None:
    before = taught.counter("vllm_rollout:candidates_total", state="pruned")
    answer = taught.rollout(pruning=ACTIVE, redundancy=4)
    pruned = [c for group in answer["groups"] for c in group["candidates"] if c["state"] == "pruned"]
    assert len(pruned) == answer["usage"]["num_pruned"] > 0
    assert {candidate["num_tokens"] for candidate in pruned} == {DETECTION_LENGTH}
    assert taught.counter("vllm_rollout:candidates_total", state="pruned") - before == len(pruned)
    for group in answer["groups"]:
        assert group["status"] == "complete"
        assert len(group["trajectories"]) == 4  # the floor: never fewer than group_size can finish
        for trajectory in group["trajectories"]:
            assert 0 < trajectory["survival_probability"] <= 1
    usage = answer["usage"]
    assert usage["generated_tokens"] == usage["returned_tokens"] + usage["wasted_tokens"]


def test_groups_may_come_back_smaller_when_the_request_allows_it(taught: LearningServer) -> None:
    answer = taught.rollout(pruning={**ACTIVE, "allow_fewer": True, "keep_ratio": 0.5}, group_size=8)
    sizes = [len(group["trajectories"]) for group in answer["groups"]]
    assert all(group["status"] == "complete" for group in answer["groups"])
    assert sum(sizes) + answer["usage"]["num_pruned"] == 8 * len(sizes)
    assert 0.3 < sum(sizes) / (8 * len(sizes)) < 0.7


def test_two_clients_that_post_the_same_rewards_teach_once(taught: LearningServer) -> None:
    answer = taught.rollout(pruning=SHADOW)
    version, labels = taught.head_version(), taught.report()["head"]["num_labels"]
    with ThreadPoolExecutor(2) as pool:
        counts = [posted["counts"] for posted in pool.map(taught.post_rewards, [answer] * 2)]
    num_trajectories = 4 * 2 * NUM_KINDS_PROMPTS
    assert sorted(count["accepted"] for count in counts) == [0, num_trajectories]
    assert sorted(count["duplicate"] for count in counts) == [0, num_trajectories]
    assert taught.report()["head"]["num_labels"] == labels + num_trajectories
    taught.wait_until_learned(version)


def test_a_detection_length_that_no_candidate_can_reach_is_said_once(taught: LearningServer) -> None:
    answer = taught.rollout(pruning={"detection_length": 64}, redundancy=4)
    assert answer["usage"]["num_scored"] == 0
    (warning,) = answer["warnings"]
    assert "64" in warning
    assert "max_tokens" in warning


@pytest.mark.versions
def test_openai_requests_get_exactly_n_choices_of_a_pruned_group(taught: LearningServer) -> None:
    before = taught.counter("vllm_rollout:candidates_total", state="pruned")
    body = {
        "prompt": [KINDS[0], 21, 31],
        "n": 3,
        **ends_after(30),
        "seed": 1,
        "vllm_xargs": {
            "rollout_redundancy": 5,
            "rollout_detection_length": DETECTION_LENGTH,
            "rollout_min_labels": 8,
            "rollout_keep_ratio": 0.4,
        },
    }
    response = taught.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    assert taught.counter("vllm_rollout:candidates_total", state="pruned") > before


@pytest.mark.versions
def test_single_requests_that_join_a_group_are_pruned(taught: LearningServer) -> None:
    xargs = {
        "rollout_group_id": "pruned",
        "rollout_group_size": 6,
        "rollout_num_candidates": 6,
        "rollout_detection_length": DETECTION_LENGTH,
        "rollout_min_labels": 8,
        "rollout_keep_ratio": 0.1,
        "rollout_allow_fewer": True,
    }
    answers = race_joined(taught, xargs, 3, 3, 200)
    choices = [answer["choices"][0] for answer in answers]
    stopped = [choice for choice in choices if choice["finish_reason"] == "abort"]
    assert stopped
    assert all(choice["stop_reason"] == "pruned" for choice in stopped)
    assert len(stopped) < len(choices)  # one at least is able to finish


def test_several_lengths_and_ends_are_learned_by_heads_of_their_own(taught: LearningServer) -> None:
    lengths = [6, 12]
    plan = {**SHADOW, "detection_length": lengths, "final_score": True}
    for _ in range(3):
        answer = taught.rollout(pruning=plan)
        assert taught.post_rewards(answer)["num_training"] == 3 * 4 * 2 * NUM_KINDS_PROMPTS
        num_learned = 4 * 2 * NUM_KINDS_PROMPTS
        taught.wait_until(lambda: all(taught.report(at)["head"] is not None for at in (*lengths, 0)))
    trial = taught.http.get("/v1/quality_head/detection_lengths").json()
    assert [row["detection_length"] for row in trial["lengths"]] == lengths
    assert trial["num_candidates"] == 3 * num_learned
    assert trial["lengths"][0]["cost_ratio"] < trial["lengths"][1]["cost_ratio"]
    for at in (*lengths, 0):
        report = taught.report(at)
        assert (report["num_awaiting"], report["num_evicted"]) == (0, 0)
        assert report["head"]["num_labels"] == 3 * num_learned
    # Also of what ends before it can be scored.
    answer = taught.rollout(pruning=plan, sampling={"max_tokens": 4, "seed": 77})
    finals: dict[bool, list[float]] = {True: [], False: []}
    for group in answer["groups"]:
        for trajectory in group["trajectories"]:
            assert trajectory["score"] is None
            finals[is_success(group["prompt_id"])].append(trajectory["final_score"])
    ordered = [good > bad for good in finals[True] for bad in finals[False]]
    assert sum(ordered) / len(ordered) > 0.7, "learned at 16 to 40 tokens, asked at 4"
    assert taught.post_rewards(answer)["counts"]["accepted"] == num_learned


def test_a_head_can_be_taken_out_and_put_back(taught: LearningServer) -> None:
    weights = taught.head()
    answer = taught.http.put("/v1/quality_head", content=weights)
    assert answer.status_code == 200, answer.text
    assert answer.json()["detection_length"] == DETECTION_LENGTH
    assert taught.http.put("/v1/quality_head", content=b"no head").status_code == 422


def test_no_head_and_no_state_that_a_client_makes_up_stops_the_engine(taught: LearningServer) -> None:
    """What is refused changes nothing, and the engine goes on: rollout, reward, report, save, restore."""
    head, state = taught.head(), taught.http.get("/v1/rollouts/state").content
    tensors, metadata = load(head), header(head)["__metadata__"]
    heads = {
        "version": save(tensors, {**metadata, "version": str(10**24)}),
        "length": save(tensors, {**metadata, "detection_length": str(10**30)}),
        "values": save({**tensors, "w2": tensors["w2"] * 1e30}, metadata),
        "scale": save({**tensors, "scale": tensors["scale"] * 0}, metadata),
        "shape": save({**tensors, "mean": tensors["mean"][:1]}, metadata),
        "claim": struct.pack("<Q", 64) + b'{"w1":{"dtype":"F32","shape":[2147483648,4096],"data_offsets":[0,4]}}'[:64],
        "cut": head[: len(head) // 2],
        "noise": bytes(range(256)) * 16,
    }
    lines = state[: state.index(b'["head"')].splitlines()
    rest = state[len(b"\n".join(lines)) + 1 :]
    states = {
        "recent": changed(lines, "learning", lambda row: row[1]["calibrators"][1].update(recent=[1e200] * 9)) + rest,
        "tokens": changed(lines, "outcomes", lambda row: row[2][0].__setitem__(-1, 10**30)) + rest,
        "survival": changed(lines, "outcomes", lambda row: row[2][0].__setitem__(7, -1.0)) + rest,
        "lengths": changed(lines, "lengths", lambda row: row[1].update(dataset=[10**24, 1.0, 1.0])) + rest,
        "head": b"\n".join(lines) + b'\n["head",5]\nabcde["end",1]\n',
        "cut": state[: len(state) // 2],
        "deep": b"[" * 100_000,
    }
    for path, cases in (("/v1/quality_head", heads), ("/v1/rollouts/state", states)):
        for name, data in cases.items():
            answer = taught.http.put(path, content=data)
            assert answer.status_code == 422, (path, name, answer.text)
            assert answer.json()["error"]["message"], name
    assert taught.head() == head
    assert taught.http.put("/v1/rollouts/state", content=state).status_code == 204
    taught.teach()
    assert taught.alive


def header(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length])


def changed(lines: list[bytes], kind: str, change: Callable[[list[Any]], None]) -> bytes:
    """A state's rows with the first of a kind changed."""
    rows = [json.loads(line) for line in lines]
    change(next(row for row in rows if isinstance(row, list) and row[:1] == [kind]))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.versions
def test_the_head_outlives_a_weight_update_and_scores_name_the_version(taught: LearningServer) -> None:
    version = taught.head_version()
    response = taught.http.post("/update_weight_version", json={"new_version": "step-1"})
    assert response.status_code == 200, response.text
    answer = taught.rollout(pruning=SHADOW)
    for group in answer["groups"]:
        for trajectory in group["trajectories"]:
            assert trajectory["score_weight_version"] == ("step-1" if has(WEIGHT_SPANS) else None)
            assert trajectory["head_version"] == version


def test_generation_goes_on_when_training_fails_and_training_goes_on_after_it(taught: LearningServer) -> None:
    version = taught.head_version()
    assert taught.http.post("/collective_rpc", json={"method": "break_training"}).status_code == 200
    try:
        posted = taught.post_rewards(taught.rollout(pruning=SHADOW))
        assert posted["counts"]["accepted"] == 4 * 2 * NUM_KINDS_PROMPTS
        taught.wait_until(lambda: "training of the quality head failed" in taught.log.read_text())
        assert taught.alive
        answer = taught.rollout(pruning=ACTIVE, redundancy=4)
        assert all(group["status"] == "complete" for group in answer["groups"])
        assert answer["groups"][0]["trajectories"][0]["head_version"] == version
    finally:
        assert taught.http.post("/collective_rpc", json={"method": "mend_training"}).status_code == 200
    taught.teach()
    assert taught.head_version() > version


@pytest.mark.versions
def test_what_was_learned_survives_a_restart(taught: LearningServer, tiny_model: str, files: Path) -> None:
    """Last: it stops the module's server."""
    report, weights = taught.report(), taught.head()
    taught.stop()
    again = learning_server(tiny_model, files / "state" / "rollout.json", files / "again.log")
    try:
        assert load(again.head()).keys() == load(weights).keys()
        assert all(load(again.head())[name].equal(tensor) for name, tensor in load(weights).items())
        restored = again.report()
        assert restored["head"] == report["head"]
        assert restored["signals"] == report["signals"]
    finally:
        again.stop()


def test_a_state_of_another_model_ends_the_start_with_both_names(tiny_model: str, files: Path) -> None:
    """After the restart, whose state it takes."""
    log = files / "other.log"
    path = files / "state" / "rollout.json"
    flags = ("--max-model-len", "1024", "--rollout-state", str(path), "--served-model-name", "another")
    with pytest.raises(Exception, match="ended"):
        Server(serve_command(tiny_model, *flags), log)
    text = log.read_text()
    assert str(path) in text
    assert "'another'" in text
