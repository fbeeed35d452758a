"""Emulated servers: vLLM's own scheduling of made-up candidates, whose lengths, outcomes and scores are known."""

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Server, serve_command
from tests.engine.run_rounds import assert_nothing_left
from vllm_rollout.emulation.fate import Fate, Fates
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.emulation.step_log import LoggedSteps, read_steps
from vllm_rollout.emulation.tokens import succeeded
from vllm_rollout.group.plans.prompt_key import seed_for

SEED = 1000
AUC = 0.85
DEVICE = {
    "step": {"ms": 2.0, "ms_per_request": 0.01},
    "kv_tokens": 6144,
    "lengths": {"log_normal": {"mean": 60, "sigma": 0.8, "cap": 600}},
    "score": {"auc": AUC},
}
SETTINGS = Settings.model_validate(DEVICE)


class Emulated(Server):
    """A server of an emulated device, with the log of its steps."""

    def __init__(self, model: str, folder: Path, *flags: str) -> None:
        device = folder / "device.json"
        device.write_text(json.dumps(DEVICE))
        self.log_folder = folder / "steps"
        command = serve_command(model, "--max-model-len", "2048", "--max-num-seqs", "256", "--emulate", str(device))
        super().__init__([*command, "--emulate-log", str(self.log_folder), *flags], folder / "server.log")

    @property
    def steps(self) -> list[LoggedSteps]:
        return read_steps(self.log_folder)

    def rollout(self, prompts: list[list[int]], num_candidates: int, **body: Any) -> dict[str, Any]:
        body = {"group_size": num_candidates, "redundancy": 0, **body}
        sampling = {"seed": SEED, "max_tokens": 1000, **body.pop("sampling", {})}
        answer = self.http.post(
            "/v1/rollouts",
            json={
                "prompts": [{"id": id_of(prompt), "prompt_token_ids": prompt} for prompt in prompts],
                "sampling": sampling,
                "return": {"logprobs": False},
                **body,
            },
        )
        assert answer.status_code == 200, answer.text
        return answer.json()


def prompts_of(num: int, num_tokens: int = 7, first: int = 0) -> list[list[int]]:
    return [[40 + (first + i) % 400, *range(50, 49 + num_tokens)] for i in range(num)]


def id_of(prompt: list[int]) -> str:
    return f"p{prompt[0]}"


def seed_of(prompt: list[int]) -> int:
    """Of candidate 0."""
    return seed_for(SEED, id_of(prompt))


def fates_of(prompt: list[int], num_candidates: int) -> list[Fate]:
    fates = Fates(SETTINGS)
    return [fates.of(prompt, seed_of(prompt) + index, index, {}) for index in range(num_candidates)]


def lengths_of(prompt: list[int], num_candidates: int) -> list[int]:
    return [fate.length for fate in fates_of(prompt, num_candidates)]


def returned(group: dict[str, Any]) -> list[tuple[int, int]]:
    """(length, index) of a group's trajectories, in order of length."""
    return sorted((trajectory["num_tokens"], trajectory["index"]) for trajectory in group["trajectories"])


def shortest(prompt: list[int], num_candidates: int, group_size: int) -> list[tuple[int, int]]:
    return sorted((length, index) for index, length in enumerate(lengths_of(prompt, num_candidates)))[:group_size]


@pytest.fixture(scope="module")
def emulated(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    server = Emulated(tiny_model, tmp_path_factory.mktemp("emulated"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def slow(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """Four times as long for every step, in the synchronous loop."""
    folder = tmp_path_factory.mktemp("slow")
    server = Emulated(tiny_model, folder, "--emulate-speed", "0.25", "--no-async-scheduling")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def narrow(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """Two candidates run at once."""
    server = Emulated(tiny_model, tmp_path_factory.mktemp("narrow"), "--max-num-seqs", "2")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def ranks(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    folder = tmp_path_factory.mktemp("ranks")
    server = Emulated(tiny_model, folder, "--data-parallel-size", "2", "--api-server-count", "1")
    yield server
    server.stop()


def test_groups_are_their_shortest_candidates_and_each_has_its_length(emulated):
    prompts = prompts_of(8)
    answer = emulated.rollout(prompts, 4, redundancy=4)
    assert [returned(group) for group in answer["groups"]] == [shortest(prompt, 8, 4) for prompt in prompts]


def test_the_synchronous_loop_says_the_same(slow):
    prompts = prompts_of(4)
    answer = slow.rollout(prompts, 2, redundancy=2)
    assert [returned(group) for group in answer["groups"]] == [shortest(prompt, 4, 2) for prompt in prompts]


def test_candidates_that_were_preempted_have_their_lengths_and_say_the_same(emulated):
    before = emulated.counter("vllm:num_preemptions_total")
    prompts = prompts_of(16, first=100)
    answer = emulated.rollout(prompts, 16)
    assert emulated.counter("vllm:num_preemptions_total") > before
    for prompt, group in zip(prompts, answer["groups"], strict=True):
        assert [(t["index"], t["num_tokens"]) for t in group["trajectories"]] == list(enumerate(lengths_of(prompt, 16)))
    again = emulated.rollout(prompts[-1:], 16)
    said, said_again = ([t["token_ids"] for t in a["groups"][-1]["trajectories"]] for a in (answer, again))
    assert said == said_again


def test_siblings_share_the_prompt_and_only_its_rest_is_prefilled(emulated):
    emulated.wait_until_idle()
    before, hits = len(emulated.steps[0].steps), emulated.counter("vllm:prefix_cache_hits_total")
    emulated.rollout(prompts_of(1, num_tokens=321, first=300), 8)
    emulated.wait_until_idle()
    assert emulated.counter("vllm:prefix_cache_hits_total") - hits == 7 * 320
    assert sum(step.prefilled_tokens for step in emulated.steps[0].steps[before:]) == 320


def test_success_can_be_read_from_the_tokens(emulated):
    prompt = prompts_of(1, first=17)[0]
    (group,) = emulated.rollout([prompt], 16)["groups"]
    said = [succeeded(trajectory["token_ids"]) for trajectory in group["trajectories"]]
    assert said == [fate.succeeds for fate in fates_of(prompt, 16)]
    assert 0 < sum(said) < 16


def test_a_candidate_that_max_tokens_cuts_is_truncated(emulated):
    prompt = prompts_of(1)[0]
    (group,) = emulated.rollout([prompt], 8, sampling={"max_tokens": 40})["groups"]
    ends = [(t["num_tokens"], t["finish_reason"]) for t in group["trajectories"]]
    assert ends == [(min(n, 40), "stop" if n <= 40 else "length") for n in lengths_of(prompt, 8)]
    assert {reason for _, reason in ends} == {"stop", "length"}


def test_lengths_can_be_forced(emulated):
    prompts, forced = prompts_of(2), [5, 9, 1, 33]
    answer = emulated.rollout(prompts, 4, sampling={"extra_args": {"emulate_lengths": forced}})
    assert [[t["num_tokens"] for t in group["trajectories"]] for group in answer["groups"]] == [forced, forced]


def test_a_length_that_cannot_be_is_refused_and_the_server_goes_on(emulated):
    body = {"prompt": "hello", "max_tokens": 5, "vllm_xargs": {"emulate_lengths": "long"}}
    answer = emulated.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "emulate_lengths must be a number of tokens" in answer.text
    assert emulated.http.post("/v1/completions", json={**body, "vllm_xargs": {"emulate_lengths": 3}}).is_success


@pytest.mark.parametrize(
    ("path", "prompt"), [("completions", {"prompt": [5, 6]}), ("chat/completions", {"messages": [{"role": "user"}]})]
)
def test_streams_of_siblings_that_wait_until_their_group_is_complete_say_why_they_end(narrow, path, prompt):
    def ask(num_tokens: int, **xargs: Any) -> list[tuple[str, str | None]]:
        body = {**prompt, "max_tokens": 1900, "stream": True, "vllm_xargs": {"emulate_lengths": num_tokens, **xargs}}
        events = narrow.http.post(f"/v1/{path}", json=body).text.splitlines()
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]]

    join = {"rollout_group_id": path, "rollout_group_size": 1, "rollout_num_candidates": 2}
    with ThreadPoolExecutor(5) as pool:
        first = [pool.submit(ask, 1900), pool.submit(ask, 500, **join)]
        narrow.wait_until(lambda: narrow.num_in_engine == 2)
        waiting = [pool.submit(ask, 1900, **join) for _ in range(3)]  # two candidates run at once
        assert [answer.result() for answer in waiting] == [[("abort", "surplus")]] * 3
        assert [answer.result() for answer in first] == [[("stop", None)]] * 2


def test_openai_requests_are_answered_with_log_probabilities(emulated):
    body = {"prompt": [40, 50, 60], "seed": seed_of([40]), "max_tokens": 1000, "logprobs": 2, "return_token_ids": True}
    (choice,) = emulated.http.post("/v1/completions", json=body).json()["choices"]
    (length,) = lengths_of([40, 50, 60], 1)
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == length
    assert choice["finish_reason"] == "stop"
    assert all(logprob < 0 for logprob in choice["logprobs"]["token_logprobs"])


def test_stop_tokens_are_not_said_by_chance(emulated):
    body = {"prompt": [41, 50, 60], "seed": SEED, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
    (choice,) = emulated.http.post("/v1/completions", json=body).json()["choices"]
    unwanted = sorted(set(choice["token_ids"]))[:20]
    body |= {"stop_token_ids": unwanted, "vllm_xargs": {"emulate_lengths": 300}}
    (choice,) = emulated.http.post("/v1/completions", json=body).json()["choices"]
    assert len(choice["token_ids"]) == 300
    assert choice["token_ids"][-1] == unwanted[0]
    assert not set(choice["token_ids"][:-1]) & set(unwanted)


def test_a_client_that_leaves_ends_its_candidates(emulated):
    emulated.wait_until_idle()
    before = len(emulated.steps[0].steps)
    sampling = {"max_tokens": 1900, "extra_args": {"emulate_lengths": [20, 1900]}}
    body = {"prompts": [{"prompt_token_ids": [40, 41]}], "group_size": 2, "sampling": sampling, "stream": True}
    with emulated.http.stream("POST", "/v1/rollouts", json=body) as stream:
        next(stream.iter_lines())  # the short one has ended
    emulated.wait_until_idle()
    assert 20 <= len(emulated.steps[0].steps) - before < 1900


SCORED = {"detection_length": 8, "keep_ratio": 0.5, "min_labels": 32, "mode": "shadow"}
FORCED = {"emulate_lengths": 12}
"""Long enough to be scored, and no longer."""


def scored_candidates(answer: dict[str, Any]) -> list[tuple[str, int, float, bool]]:
    """(prompt, index, score, success) of every trajectory."""
    return [
        (group["prompt_id"], trajectory["index"], trajectory["score"], succeeded(trajectory["token_ids"]))
        for group in answer["groups"]
        for trajectory in group["trajectories"]
    ]


def test_scores_have_the_stated_auc(emulated):
    answer = emulated.rollout(prompts_of(40, first=40), 16, pruning=SCORED, sampling={"extra_args": FORCED})
    scored = scored_candidates(answer)
    assert len(scored) == 40 * 16
    positives = [score for *_, score, success in scored if success]
    negatives = [score for *_, score, success in scored if not success]
    above = sum(positive > negative for positive in positives for negative in negatives)
    assert above / (len(positives) * len(negatives)) == pytest.approx(AUC, abs=0.03)


def test_rewards_teach_calibration_and_a_head_which_then_prune(emulated):
    pruning = {**SCORED, "detection_length": 7}  # another one: nothing is known at it
    answer = emulated.rollout(prompts_of(40, first=40), 16, pruning=pruning, sampling={"extra_args": FORCED})
    rewards = [
        {"prompt_id": prompt_id, "index": index, "reward": float(success)}
        for prompt_id, index, _, success in scored_candidates(answer)
    ]
    posted = emulated.http.post(f"/v1/rollouts/{answer['id']}/rewards", json={"rewards": rewards})
    assert posted.is_success, posted.text
    query = {"detection_length": 7}
    emulated.wait_until(lambda: emulated.http.get("/v1/quality_head", params=query).status_code == 200)
    prompts = prompts_of(8, first=90)
    active = {**pruning, "mode": "active", "rule": "balance", "allow_fewer": True, "target_positive_ratio": 0.9}
    answer = emulated.rollout(prompts, 16, pruning=active, sampling={"extra_args": FORCED})
    kept = [success for *_, success in scored_candidates(answer)]
    fates = Fates(SETTINGS)
    drawn = [fates.of(prompt, seed_of(prompt) + i, i, FORCED).succeeds for prompt in prompts for i in range(16)]
    assert "pruned" in {candidate["state"] for group in answer["groups"] for candidate in group["candidates"]}
    assert sum(kept) / len(kept) > sum(drawn) / len(drawn) + 0.1


def test_what_was_learned_is_saved_and_restored(emulated):
    state = emulated.http.get("/v1/rollouts/state").content
    assert emulated.http.put("/v1/rollouts/state", content=state).status_code == 204
    assert emulated.http.get("/v1/rollouts/state").content == state


def test_what_was_put_is_there_after_a_kill(emulated, tiny_model, tmp_path):
    query = {"detection_length": 9}
    pruning = {**SCORED, **query}
    answer = emulated.rollout(prompts_of(40, first=40), 16, pruning=pruning, sampling={"extra_args": FORCED})
    rewards = [{"prompt_id": id, "index": i, "reward": float(good)} for id, i, _, good in scored_candidates(answer)]
    emulated.http.post(f"/v1/rollouts/{answer['id']}/rewards", json={"rewards": rewards}).raise_for_status()
    emulated.wait_until(lambda: emulated.http.get("/v1/quality_head", params=query).status_code == 200)
    run = {"id": "put", "group_size": 2, "prompts_per_round": 2}
    emulated.http.post("/v1/runs", json=run).raise_for_status()
    head = emulated.http.get("/v1/quality_head", params=query).content
    state = emulated.http.get("/v1/rollouts/state").content

    def start(number: int) -> Emulated:
        (folder := tmp_path / str(number)).mkdir()
        return Emulated(tiny_model, folder, "--rollout-state", str(tmp_path / "state"))

    def killed(server: Emulated) -> None:
        os.killpg(server._process.pid, signal.SIGKILL)
        server.stop()

    server = start(0)
    server.http.put("/v1/quality_head", content=head).raise_for_status()
    killed(server)
    server = start(1)
    assert server.http.get("/v1/quality_head").content == head
    server.http.put("/v1/rollouts/state", content=state).raise_for_status()
    killed(server)
    server = start(2)
    assert server.http.get("/v1/rollouts/state").content == state
    assert server.http.get("/v1/runs/put").json()["is_durable"]
    server.stop()


def test_steps_are_stretched_and_follow_each_other_as_the_loop_does(emulated, slow):
    emulated.rollout(prompts_of(2), 4)
    slow.rollout(prompts_of(2), 4)
    for server, speed in ((emulated, 1.0), (slow, 0.25)):
        server.wait_until_idle()
        (log,) = server.steps
        assert log.speed == speed
        for step in log.steps:
            assert (step.end - step.start) * speed == pytest.approx((2.0 + 0.01 * step.num_requests) / 1e3)
            assert step.launched <= step.start < step.end <= step.read
        assert all(before.end <= after.start for before, after in pairwise(log.steps))
    # Synchronous: a step is launched when the one before has been read. Asynchronous: while it runs.
    assert all(before.read <= after.launched for before, after in pairwise(slow.steps[0].steps))
    going_on = [(before, after) for before, after in pairwise(emulated.steps[0].steps) if after.goes_on]
    assert any(after.launched < before.end for before, after in going_on)


def test_two_ranks_share_the_groups(ranks):
    prompts = prompts_of(8)
    answer = ranks.rollout(prompts, 4, redundancy=4)
    assert [returned(group) for group in answer["groups"]] == [shortest(prompt, 8, 4) for prompt in prompts]
    assert [log.rank for log in ranks.steps if log.steps] == [0, 1]


def test_a_candidate_that_goes_on_says_what_it_would_have_said_at_once(emulated):
    tokens = prompts_of(3, first=300)
    run = {"id": "resumed", "group_size": 2, "prompts_per_round": 2, "prompt_speculation": 1.5, "resume": True}
    run |= {"response_speculation": 1.0, "sampling": {"seed": SEED, "max_tokens": 1000}, "return": {"logprobs": False}}
    assert emulated.http.post("/v1/runs", json=run).is_success
    prompts = [{"id": id_of(each), "prompt_token_ids": each} for each in tokens]
    short = emulated.http.post("/v1/runs/resumed/rounds", json={"prompts": prompts}).json()
    (deferred,) = short["deferred"]
    long = emulated.http.post("/v1/runs/resumed/rounds", json={"kind": "long"}).json()
    (group,) = long["groups"]
    at_once = emulated.rollout([each for each in tokens if id_of(each) == deferred], 2)["groups"][0]
    said = [trajectory["token_ids"] for trajectory in group["trajectories"]]
    assert said == [trajectory["token_ids"] for trajectory in at_once["trajectories"]]
    assert max(trajectory["num_resumed_tokens"] for trajectory in group["trajectories"]) > 0


@pytest.fixture(scope="module")
def movable(default_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """Two ranks whose groups one API process knows, with steps that last long enough for it to think of them."""
    flags = ("--data-parallel-size", "2", "--api-server-count", "1", "--emulate-speed", "0.2")
    server = Emulated(default_model, tmp_path_factory.mktemp("movable"), *flags)
    yield server
    server.stop()


def engines_of(server: Emulated) -> list[dict[str, Any]]:
    return server.http.get("/v1/engines").json()["engines"]


@pytest.mark.parametrize("field", ["migration", "scale_down"])
def test_the_tail_goes_on_on_one_rank(movable: Emulated, field: str) -> None:
    prompts = prompts_of(6, first=50)
    plain = movable.rollout(prompts, 4)
    before = engines_of(movable)
    moved = movable.rollout(prompts, 4, **{field: "auto"})
    after = engines_of(movable)
    assert [returned(group) for group in moved["groups"]] == [returned(group) for group in plain["groups"]]
    num_moved = sum(engine["num_moved_in"] for engine in after) - sum(engine["num_moved_in"] for engine in before)
    assert num_moved > 0
    assert [engine["state"] for engine in after] == ["active"] * 2
    if field == "scale_down":
        assert len(moved["freed"]["ranks"]) == 1
        assert moved["freed"]["num_moved"] == num_moved


NUM_RANDOM_MOVES = 200


def test_moves_at_random_lose_no_token_and_say_none_twice(ranks: Emulated) -> None:
    """Six readers at once, while one rank after the other is drained and restored."""
    stop = threading.Event()

    def read(reader: int) -> int:
        """Rollouts until it is told to stop; how many."""
        num_rollouts = 0
        while not stop.is_set():
            prompt = prompts_of(1, first=100 + 10 * reader + num_rollouts % 10)[0]
            body = {"prompts": [{"id": id_of(prompt), "prompt_token_ids": prompt}], "group_size": 3, "stream": True}
            body |= {"stream_tokens": 1, "sampling": {"seed": SEED, "max_tokens": 1000}}
            tokens: dict[int, list[int]] = {}
            ended: dict[int, list[int]] = {}
            with ranks.http.stream("POST", "/v1/rollouts", json=body) as response:
                for line in response.iter_lines():
                    event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": None}
                    if event["type"] == "tokens":
                        said = tokens.setdefault(event["index"], [])
                        assert event["offset"] == len(said)
                        said += event["token_ids"]
                    elif event["type"] == "trajectory":
                        trajectory = event["trajectory"]
                        assert trajectory["index"] not in ended
                        ended[trajectory["index"]] = trajectory["token_ids"]
            assert tokens == ended
            assert [len(ended[index]) for index in range(3)] == lengths_of(prompt, 3)
            num_rollouts += 1
        return num_rollouts

    chance = random.Random(7)
    before = sum(engine["num_moved_in"] for engine in engines_of(ranks))
    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read, reader) for reader in range(6)]
        try:
            while sum(engine["num_moved_in"] for engine in engines_of(ranks)) - before < NUM_RANDOM_MOVES:
                assert not any(reader.done() for reader in readers), [reader.result() for reader in readers]
                rank = chance.randrange(2)
                drained = ranks.http.post(f"/v1/engines/{rank}/drain", json={"timeout_s": chance.choice([0, 10])})
                assert drained.json()["reasons"] == {}
                assert ranks.http.post(f"/v1/engines/{rank}/restore").status_code == 200
        finally:
            stop.set()
    assert min(reader.result() for reader in readers) > 0
    assert_nothing_left(ranks)
