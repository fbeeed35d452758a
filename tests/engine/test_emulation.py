"""Emulated servers: vLLM's own scheduling of made-up candidates, whose lengths, outcomes and scores are known."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.conftest import Server, emulating, lives, said_in, serve_command
from tests.engine.run_rounds import assert_nothing_left
from vllm_rollout import RolloutClient
from vllm_rollout.kernel.client.connection import RolloutError
from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.parts.emulation.fate import Fate, Fates
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.emulation.step_log import LoggedSteps, read_steps
from vllm_rollout.parts.emulation.tokens import succeeded
from vllm_rollout.parts.pruning.api.state_file import LEARNED
from vllm_rollout.parts.rounds.http.saved import parse_saved

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
        self.log_folder = folder / "steps"
        logged = [*emulating(folder, DEVICE), "--rollout-emulate-log", str(self.log_folder)]
        command = serve_command(model, "--max-model-len", "2048", "--max-num-seqs", "256", *logged, *flags)
        super().__init__(command, folder / "server.log", VLLM_SERVER_DEV_MODE="1")

    @property
    def steps(self) -> list[LoggedSteps]:
        return read_steps(self.log_folder)

    def groups(self, prompts: list[list[int]], num_candidates: int, **body: Any) -> list[dict[str, Any]]:
        return self.run(prompts, num_candidates, **body)["groups"]

    def run(self, prompts: list[list[int]], num_candidates: int, **body: Any) -> dict[str, Any]:
        sampling = {"seed": SEED, "max_tokens": 1000, **body.pop("sampling_params", {})}
        named = [{"id": id_of(prompt), "prompt_token_ids": prompt} for prompt in prompts]
        body = {"prompts": named, "group_size": num_candidates, "redundancy": 0, "sampling_params": sampling, **body}
        return self.rollout(**{"include": [], **body})


def prompts_of(num: int, num_tokens: int = 7, first: int = 0) -> list[list[int]]:
    return [[40 + (first + i) % 400, *range(50, 49 + num_tokens)] for i in range(num)]


def id_of(prompt: list[int]) -> str:
    return f"p{prompt[0]}"


def seed_of(prompt: list[int]) -> int:
    """Seed of candidate 0."""
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
    with Emulated(tiny_model, tmp_path_factory.mktemp("emulated")) as server:
        yield server


@pytest.fixture(scope="module")
def slow(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """Four times as long for every step, in the synchronous loop, and two candidates run at once."""
    flags = ("--rollout-emulate-speed", "0.25", "--no-async-scheduling", "--max-num-seqs", "2")
    with Emulated(tiny_model, tmp_path_factory.mktemp("slow"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def drafted(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """A server whose candidates have drafts of each other."""
    with Emulated(tiny_model, tmp_path_factory.mktemp("drafted"), "--enable-rollout-drafts") as server:
        yield server


@pytest.fixture(scope="module")
def ranks(default_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """Two ranks whose groups one API process knows, with steps that last long enough for it to think of them."""
    flags = ("--data-parallel-size", "2", "--api-server-count", "1", "--rollout-emulate-speed", "0.2")
    with Emulated(default_model, tmp_path_factory.mktemp("ranks"), *flags) as server:
        yield server


@pytest.mark.parametrize(("name", "num_prompts", "num"), [("emulated", 8, 4), ("slow", 4, 1), ("ranks", 8, 4)])
def test_groups_are_their_shortest_candidates_in_either_loop_and_on_either_rank(request, name, num_prompts, num):
    server = request.getfixturevalue(name)
    prompts = prompts_of(num_prompts, first=39)  # by at least 12 tokens: candidates begin some steps after each other
    groups = server.groups(prompts, num, redundancy=num)
    assert [returned(group) for group in groups] == [shortest(prompt, 2 * num, num) for prompt in prompts]
    assert [log.rank for log in server.steps if log.steps] == ([0, 1] if name == "ranks" else [0])


def test_candidates_that_were_preempted_have_their_lengths_and_say_the_same_as_they_streamed(emulated):
    before, generated = (emulated.counter(f"vllm:{name}_total") for name in ("num_preemptions", "generation_tokens"))
    prompts = prompts_of(16, first=100)
    body = {"prompts": [{"id": id_of(prompt), "prompt_token_ids": prompt} for prompt in prompts], "group_size": 16}
    sampling = {"seed": SEED, "max_tokens": 1000}
    streamed = said_in(emulated.events(**body, sampling_params=sampling, stream_tokens=7), 7)
    assert emulated.counter("vllm:num_preemptions_total") > before
    emulated.wait_until_idle()
    assert emulated.counter("vllm:generation_tokens_total") - generated == sum(map(len, streamed.values()))
    for prompt in prompts:
        assert [len(streamed[id_of(prompt), index]) for index in range(16)] == lengths_of(prompt, 16)
    (again,) = emulated.groups(prompts[-1:], 16)
    said = [streamed[id_of(prompts[-1]), index] for index in range(16)]
    assert said == [t["token_ids"] for t in again["trajectories"]]


def test_siblings_share_the_prompt_and_only_its_rest_is_prefilled(emulated):
    emulated.wait_until_idle()
    before, hits = len(emulated.steps[0].steps), emulated.counter("vllm:prefix_cache_hits_total")
    emulated.groups(prompts_of(1, num_tokens=321, first=300), 8)
    emulated.wait_until_idle()
    assert emulated.counter("vllm:prefix_cache_hits_total") - hits == 7 * 320
    assert sum(step.prefilled_tokens for step in emulated.steps[0].steps[before:]) == 320


def test_success_can_be_read_from_the_tokens(emulated):
    prompt = prompts_of(1, first=17)[0]
    (group,) = emulated.groups([prompt], 16)
    said = [succeeded(trajectory["token_ids"]) for trajectory in group["trajectories"]]
    assert said == [fate.succeeds for fate in fates_of(prompt, 16)]
    assert 0 < sum(said) < 16


def test_a_candidate_that_max_tokens_cuts_is_truncated_and_lengths_can_be_forced(emulated):
    prompt = prompts_of(1)[0]
    (group,) = emulated.groups([prompt], 8, sampling_params={"max_tokens": 40})
    ends = [(t["num_tokens"], t["finish_reason"]) for t in group["trajectories"]]
    assert ends == [(min(n, 40), "stop" if n <= 40 else "length") for n in lengths_of(prompt, 8)]
    assert {reason for _, reason in ends} == {"stop", "length"}
    forced = [5, 9, 1, 33]
    for group in emulated.groups(prompts_of(2), 4, sampling_params={"extra_args": {"emulate_lengths": forced}}):
        assert [t["num_tokens"] for t in group["trajectories"]] == forced


def test_a_length_that_cannot_be_is_refused_and_the_server_goes_on(emulated):
    body = {"prompt": "hello", "max_tokens": 5, "vllm_xargs": {"emulate_lengths": "long"}}
    answer = emulated.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "emulate_lengths must be a number of tokens" in answer.text
    assert emulated.http.post("/v1/completions", json={**body, "vllm_xargs": {"emulate_lengths": 3}}).is_success


@pytest.mark.parametrize(
    ("path", "prompt"), [("completions", {"prompt": [5, 6]}), ("chat/completions", {"messages": [{"role": "user"}]})]
)
def test_streams_of_siblings_that_wait_until_their_group_is_complete_say_why_they_end(slow, path, prompt):
    def ask(num_tokens: int, **xargs: Any) -> list[tuple[str, str | None]]:
        body = {**prompt, "max_tokens": 1900, "vllm_xargs": {"emulate_lengths": num_tokens, **xargs}}
        choices = [choice for event in slow.events(f"/v1/{path}", **body) for choice in event["choices"]]
        return [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]]

    join = {"rollout_group_id": path, "rollout_group_size": 1, "rollout_num_candidates": 2}
    with ThreadPoolExecutor(5) as pool:
        first = [pool.submit(ask, 500), pool.submit(ask, 250, **join)]
        slow.wait_until(lambda: slow.num_in_engine == 2)
        waiting = [pool.submit(ask, 500, **join) for _ in range(3)]  # two candidates run at once
        assert [answer.result() for answer in waiting] == [[("abort", "surplus")]] * 3
        assert [answer.result() for answer in first] == [[("stop", None)]] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_losers_whose_prompt_was_not_computed_have_the_log_probabilities_form_that_was_asked_for(slow, stream):
    def ask(prompt: list[int], num_tokens: int, **xargs: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 1900, "vllm_xargs": {"emulate_lengths": num_tokens, **xargs}}
        body |= {"echo": True, "logprobs": 1, "stream": stream}
        if not stream:
            return slow.http.post("/v1/completions", json=body).json()["choices"][0]
        first, *_ = [choice for event in slow.events("/v1/completions", **body) for choice in event["choices"]]
        return first

    join = {"rollout_group_id": f"echo-{stream}", "rollout_group_size": 1, "rollout_num_candidates": 2}
    prompt = [5, 6, 7, 8]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, [5, 9], 500), pool.submit(ask, prompt, 250, **join)]
        slow.wait_until(lambda: slow.num_in_engine == 2)
        waiting = [pool.submit(ask, prompt, 500, **join) for _ in range(2)]  # two candidates run at once
        told = [answer.result()["logprobs"]["token_logprobs"] for answer in waiting]
        assert told == [[None] * len(prompt)] * 2
        assert [len(answer.result()["logprobs"]["token_logprobs"]) > 2 for answer in running] == [True, True]


def test_openai_requests_are_answered_with_log_probabilities_and_stop_tokens_are_not_said_by_chance(emulated):
    body = {"prompt": [40, 50, 60], "seed": seed_of([40]), "max_tokens": 1000, "return_token_ids": True}
    (choice,) = emulated.http.post("/v1/completions", json={**body, "logprobs": 2}).json()["choices"]
    (length,) = lengths_of([40, 50, 60], 1)
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == length
    assert choice["finish_reason"] == "stop"
    assert all(logprob < 0 for logprob in choice["logprobs"]["token_logprobs"])
    unwanted = sorted(set(choice["token_ids"][:-2]))[:20]
    body |= {"ignore_eos": True, "stop_token_ids": unwanted, "vllm_xargs": {"emulate_lengths": 300}}
    (choice,) = emulated.http.post("/v1/completions", json=body).json()["choices"]
    assert len(choice["token_ids"]) == 300
    assert choice["token_ids"][-1] == unwanted[0]
    assert not set(choice["token_ids"][:-1]) & set(unwanted)


LONG = {"emulate_lengths": 300}


@pytest.mark.parametrize("group", [{}, {"n": 2, "vllm_xargs": {**LONG, "rollout_redundancy": 2}}], ids=["one", "group"])
def test_log_probabilities_of_prompts_and_of_certain_tokens_have_the_form_of_a_real_device(emulated, group):
    prompt = [40, *range(50, 60)]
    body = {"prompt": prompt, "max_tokens": 6, "return_tokens_as_token_ids": True, "vllm_xargs": LONG, **group}
    for choice in emulated.http.post("/v1/completions", json={**body, "echo": True, "logprobs": 2}).json()["choices"]:
        told = choice["logprobs"]["token_logprobs"]
        assert len(told) == len(prompt) + 6
        assert told[0] is None
        assert all(logprob < 0 for logprob in told[1:])
    asked = {"logprobs": 2, "logprob_token_ids": [7, 9]}
    for choice in emulated.http.post("/v1/completions", json=body | asked).json()["choices"]:
        assert all({"token_id:7", "token_id:9"} <= tops.keys() for tops in choice["logprobs"]["top_logprobs"])


def test_there_are_no_weights_to_check(emulated):
    for action, answer in (
        ({"action": "checksum"}, {"checksums": {}}),
        ({"action": "compare", "baseline": {"a": "1"}}, {"match": False, "mismatches": ["a"]}),
        ({"action": "reset"}, {"status": "reset"}),
    ):
        response = emulated.http.post("/weight_checker", json=action)
        assert (response.status_code, response.json()) == (200, answer)


def test_a_client_that_leaves_ends_its_candidates(emulated):
    emulated.wait_until_idle()
    before = len(emulated.steps[0].steps)
    sampling = {"max_tokens": 1900, "extra_args": {"emulate_lengths": [20, 1900]}}
    body = {"prompts": [{"prompt_token_ids": [40, 41]}], "group_size": 2, "sampling_params": sampling, "stream": True}
    with emulated.http.stream("POST", "/v1/rollouts", json=body) as stream:
        next(stream.iter_lines())  # the short one has ended
    emulated.wait_until_idle()
    assert 20 <= len(emulated.steps[0].steps) - before < 1900


SCORED = {"detection_length": 8, "keep_ratio": 0.5, "min_labels": 32, "mode": "shadow"}
FORCED = {"emulate_lengths": 12}
"""Long enough to be scored, and no longer."""


def scores(groups: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    """Score and success of every trajectory."""
    return [(t["score"], succeeded(t["token_ids"])) for group in groups for t in group["trajectories"]]


def teach(server: Emulated, detection_length: int) -> list[tuple[float, bool]]:
    """Candidates at a detection length of which nothing was known, until there is a head; their scores."""
    plan = {**SCORED, "detection_length": detection_length}
    answer = server.run(prompts_of(40, first=40), 16, pruning=plan, sampling_params={"extra_args": FORCED})
    server.reward(answer, lambda _, trajectory: succeeded(trajectory["token_ids"]))
    query = {"detection_length": detection_length}
    server.wait_until(lambda: server.http.get("/v1/quality_head", params=query).status_code == 200)
    return scores(answer["groups"])


def test_scores_have_the_stated_auc_and_rewards_teach_a_head_which_then_prunes(emulated):
    scored = teach(emulated, 7)
    assert len(scored) == 40 * 16
    positives, negatives = ([score for score, success in scored if success is which] for which in (True, False))
    above = sum(positive > negative for positive in positives for negative in negatives)
    assert above / (len(positives) * len(negatives)) == pytest.approx(AUC, abs=0.03)
    prompts = prompts_of(8, first=90)
    active = {**SCORED, "detection_length": 7, "mode": "active", "rule": "balance"}
    active |= {"allow_fewer": True, "target_positive_ratio": 0.9}
    groups = emulated.groups(prompts, 16, pruning=active, sampling_params={"extra_args": FORCED})
    kept = [success for _, success in scores(groups)]
    fates = Fates(SETTINGS)
    drawn = [fates.of(prompt, seed_of(prompt) + i, i, FORCED).succeeds for prompt in prompts for i in range(16)]
    assert "pruned" in {candidate["state"] for group in groups for candidate in group["candidates"]}
    assert sum(kept) / len(kept) > sum(drawn) / len(drawn) + 0.1


@pytest.mark.versions
def test_what_was_put_is_there_after_a_kill_and_what_was_learned_when_the_server_stops(emulated, tiny_model, tmp_path):
    """Only the server's own process is killed. Its engine core ends with it, so that the address is free."""
    teach(emulated, 9)
    run = {"id": "put", "group_size": 2, "prompts_per_round": 2}
    emulated.http.post("/v1/runs", json=run).raise_for_status()
    state = emulated.http.get("/v1/rollouts/state").content
    flags = ("--rollout-state", str(tmp_path / "state"))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with Emulated(tiny_model, tmp_path / "first", *flags) as server:
        server.http.put("/v1/rollouts/state", content=state).raise_for_status()
        engines = psutil.Process(server._process.pid).children(recursive=True)
        assert any("EngineCore" in engine.name() for engine in engines)
        os.kill(server._process.pid, signal.SIGKILL)
        server.wait_until(lambda: not any(lives(engine) for engine in engines))
    with Emulated(tiny_model, tmp_path / "second", *flags, "--enable-rollout-drafts") as server:
        assert server.http.get("/v1/rollouts/state").content == state
        assert server.http.get("/v1/runs/put").json()["is_durable"]
        teach(server, 10)
        read: list[bytes] = []

        def has_learned_all() -> bool:
            read.append(server.http.get("/v1/rollouts/state").content)
            return read[-2:-1] == read[-1:]

        server.wait_until(has_learned_all)
    _, kept = (tmp_path / "state" / LEARNED).read_bytes().split(b"\n", 1)
    assert kept == parse_saved(read[-1]).learned != parse_saved(state).learned
    assert f"kept what was learned in {tmp_path / 'state'}" in (tmp_path / "second" / "server.log").read_text()


@pytest.mark.versions
def test_an_engine_that_dies_amid_an_update_is_told_at_once_and_the_server_ends(tiny_model, tmp_path):
    """vLLM leaves the calls to it without an answer."""
    with Emulated(tiny_model, tmp_path) as server, RolloutClient(str(server.http.base_url)) as client:
        api = psutil.Process(server._process.pid)
        (engine,) = api.children(recursive=True)
        with pytest.raises(RolloutError, match=r"500.*EngineCore"):
            client.give_weights(engine.kill, "step-1")
        server.wait_until(lambda: not lives(api))


def test_steps_are_stretched_and_follow_each_other_as_the_loop_does(emulated, slow):
    for server, speed in ((emulated, 1.0), (slow, 0.25)):
        server.groups(prompts_of(2), 2)
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


def test_a_candidate_that_goes_on_says_what_it_would_have_said_at_once(emulated):
    tokens = prompts_of(3, first=300)
    run = {"id": "resumed", "group_size": 2, "prompts_per_round": 2, "prompt_speculation": 1.5, "resume": True}
    run |= {"response_speculation": 1.0, "sampling_params": {"seed": SEED, "max_tokens": 1000}, "include": []}
    assert emulated.http.post("/v1/runs", json=run).is_success
    prompts = [{"id": id_of(each), "prompt_token_ids": each} for each in tokens]
    short = emulated.http.post("/v1/runs/resumed/rounds", json={"prompts": prompts}).json()
    (deferred,) = short["deferred"]
    (group,) = emulated.http.post("/v1/runs/resumed/rounds", json={"kind": "long"}).json()["groups"]
    (at_once,) = emulated.groups([each for each in tokens if id_of(each) == deferred], 2)
    said = [[trajectory["token_ids"] for trajectory in each["trajectories"]] for each in (group, at_once)]
    assert said[0] == said[1]
    assert max(trajectory["num_resumed_tokens"] for trajectory in group["trajectories"]) > 0


def num_moved(server: Emulated) -> int:
    return sum(engine["num_moved_in"] for engine in server.engines)


@pytest.mark.parametrize("field", ["migration", "scale_down"])
def test_the_tail_goes_on_on_one_rank(ranks: Emulated, field: str) -> None:
    prompts = prompts_of(6, first=50)
    plain = ranks.groups(prompts, 4)
    before = num_moved(ranks)
    answer = ranks.run(prompts, 4, **{field: "auto"})
    assert [returned(group) for group in answer["groups"]] == [returned(group) for group in plain]
    num = num_moved(ranks) - before
    assert num > 0
    assert [engine["state"] for engine in ranks.engines] == ["active"] * 2
    if field == "scale_down":
        assert (len(answer["freed"]["ranks"]), answer["freed"]["num_moved"]) == (1, num)


NUM_RANDOM_MOVES = 40


def test_moves_at_random_lose_no_token_and_say_none_twice(ranks: Emulated) -> None:
    """Six readers at once, while one rank after the other is drained and restored."""
    stop = threading.Event()

    def read(reader: int) -> int:
        """Rollouts until it is told to stop; how many."""
        num_rollouts = 0
        while not stop.is_set():
            prompt = prompts_of(1, first=100 + 10 * reader + num_rollouts % 10)[0]
            body = {"prompts": [{"id": id_of(prompt), "prompt_token_ids": prompt}], "group_size": 3}
            said = said_in(ranks.events(**body, stream_tokens=1, sampling_params={"seed": SEED, "max_tokens": 1000}))
            assert [len(said[id_of(prompt), index]) for index in range(3)] == lengths_of(prompt, 3)
            num_rollouts += 1
        return num_rollouts

    chance = random.Random(7)
    before = num_moved(ranks)
    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read, reader) for reader in range(6)]
        try:
            while num_moved(ranks) - before < NUM_RANDOM_MOVES:
                assert not any(reader.done() for reader in readers), [reader.result() for reader in readers]
                rank = chance.randrange(2)
                drained = ranks.http.post(f"/v1/engines/{rank}/drain", json={"timeout_s": chance.choice([0, 10])})
                assert drained.json()["reasons"] == {}
                assert ranks.http.post(f"/v1/engines/{rank}/restore").status_code == 200
        finally:
            stop.set()
    assert min(reader.result() for reader in readers) > 0
    assert_nothing_left(ranks)


def test_with_drafts_candidates_say_the_same_in_fewer_steps_and_vllm_counts_them(emulated, drafted):
    prompts, sampling = prompts_of(3, first=500), {"extra_args": {"emulate_lengths": [700, 600, 500, 400]}}
    before = len(emulated.steps[0].steps)
    said = [server.groups(prompts, 4, sampling_params=sampling) for server in (emulated, drafted)]
    tokens = [[t["token_ids"] for group in groups for t in group["trajectories"]] for groups in said]
    assert [sorted(map(len, its)) for its in tokens] == [sorted([700, 600, 500, 400] * 3)] * 2
    assert sorted(tokens[0]) == sorted(tokens[1])
    for server in (emulated, drafted):
        server.wait_until_idle()
    steps = [emulated.steps[0].steps[before:], drafted.steps[0].steps]
    assert len(steps[0]) >= 700
    assert len(steps[1]) < 600
    num_drafts = sum(step.num_drafts for step in steps[1])
    assert num_drafts == drafted.counter("vllm:spec_decode_num_draft_tokens_total") > 100
    accepted = drafted.counter("vllm:spec_decode_num_accepted_tokens_total")
    assert sum(step.num_sampled for step in steps[1]) == 3 * 2200 == sum(s.num_requests for s in steps[1]) + accepted
    for step in steps[1]:
        decoded = 2.0 + 0.01 * (step.num_requests + step.num_drafts)
        assert (step.end - step.start) == pytest.approx(decoded / 1e3)
