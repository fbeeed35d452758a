"""Pruning and learning on a real engine (tiny random model): a head learns from posted rewards, and what it learned
stops candidates. What is learned of an adapter is its own.

The task: prompts of one kind succeed, of the other kind never; which ones depends on the model. The hidden states tell
them apart.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from safetensors.torch import load, save

from tests.engine.conftest import Server, ends_after, forgetful, race_joined

DETECTION_LENGTH = 8
SHADOW = {"detection_length": DETECTION_LENGTH, "mode": "shadow", "min_labels": 8}
ACTIVE = {"detection_length": DETECTION_LENGTH, "min_labels": 8}
KINDS = (10, 400)
"""First token of a prompt of each kind."""
GOOD = {None: 400, "a": 10, "b": 400}
"""The kind that succeeds, by served name."""
GROUP_SIZE, NUM_PROMPTS = 4, 16
NUM_TRAJECTORIES = GROUP_SIZE * NUM_PROMPTS
NUM_LESSONS = 5


class Pupil:
    """A name of a server, taught with seeds, so that it learns the same every time."""

    def __init__(self, server: Server, model: str | None) -> None:
        self.server, self.model = server, model
        self.num_rollouts = 0

    def rollout(self, **fields: Any) -> dict[str, Any]:
        prompts = [
            {"id": f"{kind}-{number}", "prompt_token_ids": [kind, 20 + number, 30 + number]}
            for number in range(NUM_PROMPTS // 2)
            for kind in KINDS
        ]
        self.num_rollouts += 1
        sampling = {"min_tokens": 2 * DETECTION_LENGTH, "max_tokens": 40, "seed": 100 * self.num_rollouts}
        body = {"model": self.model, "prompts": prompts, "group_size": GROUP_SIZE, "sampling_params": sampling}
        return self.server.rollout(**{**body, "pruning": SHADOW, **fields})

    def is_success(self, prompt_id: str) -> bool:
        return prompt_id.startswith(f"{GOOD[self.model]}-")

    def reward(self, answer: dict[str, Any]) -> dict[str, Any]:
        return self.server.reward(answer, lambda prompt_id, _: self.is_success(prompt_id))

    def get(self, path: str, detection_length: int = DETECTION_LENGTH) -> Any:
        params = {"model": self.model} if self.model else {}
        response = self.server.http.get(path, params={"detection_length": detection_length, **params})
        assert response.status_code == 200, response.text
        return response

    def report(self, detection_length: int = DETECTION_LENGTH) -> dict[str, Any]:
        return self.get("/v1/quality_head/report", detection_length).json()

    @property
    def head(self) -> bytes:
        return self.get("/v1/quality_head").content

    @property
    def head_version(self) -> int:
        head = self.report()["head"]
        return 0 if head is None else head["version"]

    def teach(self) -> None:
        """One rollout with its rewards, until the head has taken them in."""
        answer = self.rollout()
        version = self.head_version if self.num_rollouts > 1 else 0
        assert self.reward(answer)["counts"]["accepted"] == NUM_TRAJECTORIES
        self.server.wait_until(lambda: self.head_version > version)

    @property
    def knowledge(self) -> list[Any]:
        prompts = self.server.http.get("/v1/rollouts/prompts", params={"model": self.model} if self.model else {})
        return [self.report(), prompts.json(), self.head]

    def share_in_order(self, answer: dict[str, Any], score: str = "score") -> float:
        """Share of pairs in which a success scores above a failure."""
        scores: dict[bool, list[float]] = {True: [], False: []}
        for group in answer["groups"]:
            scores[self.is_success(group["prompt_id"])] += [t[score] for t in group["trajectories"]]
        ordered = [good > bad for good in scores[True] for bad in scores[False]]
        return sum(ordered) / len(ordered)


@pytest.fixture(scope="module")
def pupils(server: Server) -> Iterator[dict[str | None, Pupil]]:
    with forgetful(server):
        pupils = {model: Pupil(server, model) for model in GOOD}
        for _ in range(NUM_LESSONS):
            for pupil in pupils.values():
                pupil.teach()
        yield pupils


@pytest.fixture
def taught(pupils: dict[str | None, Pupil]) -> Pupil:
    """The pupil of the base model."""
    return pupils[None]


def seen_in(answer: dict[str, Any], field: str) -> set[Any]:
    """Values of a field of the trajectories."""
    return {t[field] for group in answer["groups"] for t in group["trajectories"]}


@pytest.mark.versions
def test_groups_behind_the_openai_endpoints_learn_too(server: Server) -> None:
    """By the ids of their answers: a completion of two prompts, a chat, and requests that join a group."""
    shadow = {"rollout_detection_length": 4, "rollout_pruning_mode": "shadow"}
    common = {"temperature": 1.0, "max_tokens": 12, "min_tokens": 8, "vllm_xargs": {**shadow, "rollout_redundancy": 1}}
    bodies = [
        ("completions", {"prompt": [[10, 20, 30], [10, 21, 31]], "n": 2}),
        ("chat/completions", {"messages": [{"role": "user", "content": "2 + 2"}], "n": 3}),
        ("completions", {
            "prompt": [10, 22, 32], "vllm_xargs": {**shadow, "rollout_group_id": "learns", "rollout_group_size": 1},
        }),
    ]  # fmt: skip
    answers = [server.http.post(f"/v1/{path}", json={**common, **body}).json() for path, body in bodies]
    rewards = [
        {"request_id": answer["id"], "index": choice["index"], "reward": 1.0}
        for answer in answers
        for choice in answer["choices"]
    ]
    assert len(rewards) == 2 * 2 + 3 + 1
    posted = server.http.post("/v1/rewards", json={"rewards": rewards}).json()
    assert (posted["counts"]["accepted"], posted["num_training"]) == (8, 8), posted
    another = {"authorization": "Bearer another"}
    again = server.http.post("/v1/rewards", json={"rewards": rewards}, headers=another).json()
    assert again["counts"]["unknown"] == 8, "another client's"


@pytest.mark.versions
def test_a_head_learns_from_posted_rewards_alone(taught: Pupil) -> None:
    answer = taught.rollout()
    assert seen_in(answer, "signal") == {"head"}
    assert seen_in(answer, "head_version") == {taught.head_version}
    assert taught.share_in_order(answer) > 0.9
    report = taught.report()
    assert report["signals"]["head"]["auc"] > 0.8  # all versions, the first ones too
    assert report["head"]["num_labels"] >= NUM_LESSONS * NUM_TRAJECTORIES
    assert report["num_evicted"] == 0


def test_shadow_mode_stops_nothing_and_says_what_it_would_have_stopped(taught: Pupil) -> None:
    answer = taught.rollout(redundancy=4, early_stop=False)
    candidates = [c for group in answer["groups"] for c in group["trajectories"] + group["candidates"]]
    assert (answer["usage"]["num_pruned"], answer["usage"]["num_scored"]) == (0, len(candidates))
    assert any(candidate["would_prune"] for candidate in candidates)
    assert all(candidate["survival_probability"] == 1 for candidate in candidates)


@pytest.mark.versions
def test_pruned_candidates_stop_with_the_token_they_were_judged_by(taught: Pupil) -> None:
    before = taught.server.counter("vllm_rollout:candidates_total", state="pruned")
    answer = taught.rollout(pruning=ACTIVE, redundancy=4)
    pruned = [c for group in answer["groups"] for c in group["candidates"] if c["state"] == "pruned"]
    assert len(pruned) == answer["usage"]["num_pruned"] > 0
    assert {candidate["num_tokens"] for candidate in pruned} == {DETECTION_LENGTH}
    assert taught.server.counter("vllm_rollout:candidates_total", state="pruned") - before == len(pruned)
    for group in answer["groups"]:
        assert group["status"] == "complete"
        assert len(group["trajectories"]) == GROUP_SIZE  # the floor: never fewer than group_size can finish
    assert all(0 < probability <= 1 for probability in seen_in(answer, "survival_probability"))


@pytest.mark.versions
def test_openai_requests_get_exactly_n_choices_of_a_pruned_group(taught: Pupil) -> None:
    before = taught.server.counter("vllm_rollout:candidates_total", state="pruned")
    xargs = {"rollout_redundancy": 5, "rollout_detection_length": DETECTION_LENGTH, "rollout_min_labels": 8}
    body = {"prompt": [KINDS[0], 21, 31], "n": 3, **ends_after(30), "seed": 1}
    body["vllm_xargs"] = {**xargs, "rollout_keep_ratio": 0.4}
    answer = taught.server.http.post("/v1/completions", json=body).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    assert taught.server.counter("vllm_rollout:candidates_total", state="pruned") > before


@pytest.mark.versions
def test_single_requests_that_join_a_group_are_pruned(taught: Pupil) -> None:
    xargs = {
        "rollout_group_id": "pruned", "rollout_group_size": 6, "rollout_num_candidates": 6,
        "rollout_detection_length": DETECTION_LENGTH, "rollout_min_labels": 8, "rollout_keep_ratio": 0.1,
        "rollout_allow_fewer": True,
    }  # fmt: skip
    choices = [answer["choices"][0] for answer in race_joined(taught.server, xargs, 3, 3, 200)]
    stopped = [choice["stop_reason"] for choice in choices if choice["finish_reason"] == "abort"]
    assert set(stopped) == {"pruned"}
    assert len(stopped) < len(choices)  # one at least is able to finish


def test_several_lengths_and_ends_are_learned_by_heads_of_their_own(taught: Pupil) -> None:
    lengths = [6, 12]
    plan = {**SHADOW, "detection_length": lengths, "final_score": True}
    for _ in range(3):
        assert taught.reward(taught.rollout(pruning=plan))["num_training"] == 3 * NUM_TRAJECTORIES
    at_all = (*lengths, 0)

    def labels() -> list[int]:
        return [(taught.report(at)["head"] or {"num_labels": 0})["num_labels"] for at in at_all]

    taught.server.wait_until(lambda: labels() == [3 * NUM_TRAJECTORIES] * 3)
    trial = taught.server.http.get("/v1/quality_head/detection_lengths").json()
    assert [row["detection_length"] for row in trial["lengths"]] == lengths
    assert trial["num_candidates"] == 3 * NUM_TRAJECTORIES
    assert trial["lengths"][0]["cost_ratio"] < trial["lengths"][1]["cost_ratio"]
    # Also of what ends before it can be scored.
    answer = taught.rollout(pruning=plan, sampling_params={"max_tokens": 4, "seed": 77})
    assert seen_in(answer, "score") == {None}
    assert taught.share_in_order(answer, "final_score") > 0.7, "learned at 16 to 40 tokens, asked at 4"
    assert taught.reward(answer)["counts"]["accepted"] == NUM_TRAJECTORIES


def test_no_head_and_no_state_that_a_client_makes_up_stops_the_engine(taught: Pupil) -> None:
    """tests/parts/pruning/test_learning_calls.py has what else they may be; here, that a real worker goes on."""
    http, head = taught.server.http, taught.head
    state = http.get("/v1/rollouts/state").content
    tensors, metadata = load(head), json.loads(head[8 : 8 + struct.unpack_from("<Q", head)[0]])["__metadata__"]
    bad_heads = [
        save({**tensors, "w2": tensors["w2"] * 1e30}, metadata),
        save({**tensors, "mean": tensors["mean"][:1]}, metadata),
        struct.pack("<Q", 64) + b'{"w1":{"dtype":"F32","shape":[2147483648,4096],"data_offsets":[0,4]}}'[:64],
        head[: len(head) // 2],
        b"no head",
    ]
    rows = state[: state.index(b'["head"')]
    bad_states = [rows + b'["head",5]\nabcde["end",1]\n', state[: len(state) // 2], b"[" * 100_000]
    for path, cases in (("/v1/quality_head", bad_heads), ("/v1/rollouts/state", bad_states)):
        for data in cases:
            answer = http.put(path, content=data)
            assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True), (path, answer.text)
    assert taught.head == head
    taught.teach()


@pytest.mark.versions
def test_the_head_outlives_a_weight_update_and_scores_name_the_version(taught: Pupil) -> None:
    version, http = taught.head_version, taught.server.http
    http.post("/update_weight_version", json={"new_version": "step-1"}).raise_for_status()
    try:
        answer = taught.rollout()
    finally:
        http.post("/update_weight_version", json={"new_version": "default"}).raise_for_status()
    assert seen_in(answer, "score_weight_version") == {"step-1"}
    assert seen_in(answer, "head_version") == {version}


def test_generation_goes_on_when_training_fails_and_training_goes_on_after_it(taught: Pupil) -> None:
    version, server = taught.head_version, taught.server
    server.http.post("/collective_rpc", json={"method": "break_training"}).raise_for_status()
    try:
        assert taught.reward(taught.rollout())["counts"]["accepted"] == NUM_TRAJECTORIES
        server.wait_until(lambda: "training of the quality head failed" in server.log.read_text())
        answer = taught.rollout(pruning=ACTIVE, redundancy=4)
        assert {group["status"] for group in answer["groups"]} == {"complete"}
        assert seen_in(answer, "head_version") == {version}
    finally:
        server.http.post("/collective_rpc", json={"method": "mend_training"}).raise_for_status()
    taught.teach()
    assert taught.head_version > version


def test_rewards_for_one_adapter_leave_the_other_and_the_base_model_unchanged(pupils: dict[str | None, Pupil]) -> None:
    before = {model: pupil.knowledge for model, pupil in pupils.items()}
    pupils["a"].teach()
    assert [pupils[model].knowledge for model in ("b", None)] == [before["b"], before[None]]
    assert pupils["a"].report()["head"]["num_labels"] - before["a"][0]["head"]["num_labels"] == NUM_TRAJECTORIES


def test_candidates_of_several_names_run_together_and_each_is_scored_by_the_head_of_its_own(
    pupils: dict[str | None, Pupil],
) -> None:
    seeds = {"min_tokens": 2 * DETECTION_LENGTH, "max_tokens": 40, "seed": 7}
    with ThreadPoolExecutor(len(GOOD)) as pool:
        answers = list(pool.map(lambda pupil: pupil.rollout(sampling_params=seeds), pupils.values()))
    for pupil, answer in zip(pupils.values(), answers, strict=True):
        assert seen_in(answer, "head_version") == {pupil.head_version}
        assert pupil.share_in_order(answer) > 0.8
    said = [[t["token_ids"] for group in answer["groups"] for t in group["trajectories"]] for answer in answers]
    assert said[0] != said[1] != said[2], "the adapters do change what is said"


def test_requests_of_the_openai_endpoints_teach_the_adapter_that_they_name(pupils: dict[str | None, Pupil]) -> None:
    server, before = pupils["b"].server, {model: pupil.knowledge for model, pupil in pupils.items()}
    shadow = {"rollout_detection_length": DETECTION_LENGTH, "rollout_pruning_mode": "shadow"}
    joins = {"rollout_group_id": "names-b", "rollout_group_size": 1}
    rewards = []
    for fields in ({"n": 2, "vllm_xargs": {"rollout_redundancy": 1, **shadow}}, {"vllm_xargs": {**joins, **shadow}}):
        body = {"model": "b", "prompt": [10, 20, 30], "max_tokens": 24, "min_tokens": 16, **fields}
        answer = server.http.post("/v1/completions", json=body).json()
        rewards += [{"request_id": answer["id"], "index": each["index"], "reward": 1.0} for each in answer["choices"]]
    posted = server.http.post("/v1/rewards", json={"rewards": rewards}).json()
    assert posted["counts"]["accepted"] == len(rewards) == 3
    assert posted["head_versions"] == {}
    assert posted["adapter_head_versions"] == {"b": {str(DETECTION_LENGTH): before["b"][0]["head"]["version"]}}
    assert [pupils[model].knowledge for model in ("a", None)] == [before["a"], before[None]]
    assert pupils["b"].report()["head"]["num_labels"] - before["b"][0]["head"]["num_labels"] == 3


def test_a_state_has_every_name_and_a_head_goes_where_it_is_put(pupils: dict[str | None, Pupil]) -> None:
    a, b = pupils["a"], pupils["b"]
    state = a.server.http.get("/v1/rollouts/state").content
    before = {model: pupil.knowledge for model, pupil in pupils.items()}
    put = a.server.http.put("/v1/quality_head", params={"model": "b"}, content=a.head)
    assert (put.status_code, put.json()["adapter"]) == (200, "b")
    assert b.head == a.head
    assert b.share_in_order(b.rollout()) < 0.5, "it knows what is good for the other"
    assert a.server.http.put("/v1/rollouts/state", content=state).status_code == 204
    for model, pupil in pupils.items():
        restored = pupil.knowledge
        assert restored[1:] == before[model][1:]
        for field in ("head", "losses", "signals", "audit"):
            assert restored[0][field] == before[model][0][field]
    response = a.server.http.get("/v1/quality_head/report", params={"model": "c"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
