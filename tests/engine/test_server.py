"""The server on a real engine (tiny random model): rollouts, OpenAI endpoints, groups of single requests, metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.engine.conftest import LONG, TIMEOUT_S, Server, ends_after, in_one_step, race_joined, said_in
from vllm_rollout.adapter.compat import REJECTS_WHILE_PAUSED, has, lacking
from vllm_rollout.kernel.rules.prompt_key import seed_for

PROMPTS = [
    {"id": "text", "prompt": "hello world"},
    {"id": "ids", "prompt_token_ids": [5, 6, 7, 8]},
    {"id": "chat", "messages": [{"role": "user", "content": "what is 1+1?"}]},
]

MANY = 24
"""Candidates enough for 1,900 steps to take seconds: something can happen to them while they run."""
CHUNK = 50
NUM_TRIES = 3
"""On a machine that stalls for seconds candidates end before anything can happen to them."""
Events = list[dict[str, Any]]


def rollout(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"prompts": PROMPTS, "group_size": 3, "redundancy": 3, "sampling_params": {"max_tokens": 300}, **fields}
    return server.rollout(**body)


def completion(server: Server, **fields: Any) -> httpx.Response:
    body = {"prompt": "hello world", "max_tokens": 300, "temperature": 1, "return_token_ids": True, **fields}
    return server.http.post("/v1/completions", json=body)


@pytest.mark.versions
def test_a_race_returns_exactly_group_size_and_stops_the_others(server: Server) -> None:
    answer = rollout(server, sampling_params=ends_after(50))
    assert [group["prompt_id"] for group in answer["groups"]] == ["text", "ids", "chat"]
    for group in answer["groups"]:
        assert group["status"] == "complete"
        trajectories, others = group["trajectories"], group["candidates"]
        assert [t["index"] for t in trajectories] == sorted(t["index"] for t in trajectories)
        assert (len(trajectories), len(others)) == (3, 3)
        assert {t["index"] for t in trajectories} | {c["index"] for c in others} == set(range(6))
        assert all(c["state"] == "surplus" and c["num_tokens"] <= 50 for c in others)
        for t in trajectories:
            assert t["finish_reason"] == "stop"
            assert len(t["token_ids"]) == len(t["logprobs"]) == t["num_tokens"] == 50
            assert all(logprob <= 0 for logprob in t["logprobs"])
            assert t["mean_confidence"] > 0
            assert t["std_confidence"] > 0
            assert [span["end"] for span in t["weight_versions"][-1:]] == [t["num_tokens"]]


def test_the_engines_own_counter_and_ours_agree_with_usage(server: Server) -> None:
    kinds, states = ("returned", "wasted", "deferred"), ("finished", "surplus", "pruned", "failed")

    def read() -> list[float]:
        server.wait_until_idle()
        ours = [server.counter("vllm_rollout:tokens_total", kind=kind) for kind in kinds]
        ours += [server.counter("vllm_rollout:candidates_total", state=state) for state in states]
        return [server.counter("vllm:generation_tokens_total"), *ours]

    before = read()
    usage = rollout(server)["usage"]
    expected = [*(usage[f"{kind}_tokens"] for kind in ("generated", "returned", "wasted")), 0]
    expected += [usage[f"num_{state}"] for state in states]
    assert [after - b for after, b in zip(read(), before, strict=True)] == expected
    assert usage["generated_tokens"] == usage["returned_tokens"] + usage["wasted_tokens"]


def test_the_same_seed_gives_the_same_group(server: Server) -> None:
    # Of every candidate: which of them are selected depends on the step in which each came in.
    wanted = {
        "sampling_params": {"max_tokens": 200, "seed": 11},
        "early_stop": False,
        "include": ["logprobs", "stopped"],
    }

    def tokens() -> list[dict[int, list[int]]]:
        groups = rollout(server, **wanted)["groups"]
        return [{c["index"]: c["token_ids"] for c in group["trajectories"] + group["candidates"]} for group in groups]

    assert tokens() == tokens()


def test_who_loses_a_tie_comes_back_as_one_that_ended_by_itself(server: Server) -> None:
    fields = {"sampling_params": ends_after(50), "include": ["logprobs", "stopped"]}
    groups = in_one_step(server, 18, lambda: rollout(server, **fields))["groups"]
    others = [candidate for group in groups for candidate in group["candidates"]]
    assert [c["ended_by_itself"] for c in others] == [c["num_tokens"] == 50 for c in others]
    assert all(c["ended_by_itself"] for c in others)


def test_a_group_without_redundancy_equals_the_n_choices_of_stock(server: Server) -> None:
    sampling = {"max_tokens": 60, "seed": 5, "temperature": 1.0}
    group = rollout(server, prompts=[PROMPTS[1]], redundancy=0, sampling_params=sampling)["groups"][0]
    stock = completion(server, prompt=[5, 6, 7, 8], n=3, **sampling | {"seed": seed_for(5, PROMPTS[1]["id"])}).json()
    assert [t["token_ids"] for t in group["trajectories"]] == [c["token_ids"] for c in stock["choices"]]


def test_a_stop_string_ends_a_candidate_and_counts_as_a_finish(server: Server) -> None:
    answer = rollout(server, sampling_params={**LONG, "stop": ["e"]}, include=["text", "logprobs"])
    for group in answer["groups"]:
        assert group["status"] == "complete"
        for t in group["trajectories"]:
            assert (t["finish_reason"], t["stop_reason"]) == ("stop", "e")
            assert "e" not in t["text"]


@pytest.mark.versions
def test_streamed_tokens_are_complete_and_the_stream_ends_with_done(server: Server) -> None:
    body = {"prompts": PROMPTS, "group_size": 2, "redundancy": 2, "sampling_params": {"max_tokens": 200}}
    events = list(server.events(**body, stream_tokens=10))
    tokens = said_in(events, 10)
    kinds = [event["type"] for event in events]
    assert (kinds.count("group"), kinds.count("trajectory")) == (3, 6)
    assert events[-1]["usage"]["generated_tokens"] == sum(len(t) for t in tokens.values())


@pytest.mark.versions
def test_a_client_that_goes_away_stops_its_candidates_and_nobody_elses(server: Server) -> None:
    server.wait_until_idle()
    deferred = server.counter('vllm_rollout:candidates_total{state="deferred"}')
    before = server.counter("vllm:generation_tokens_total")
    body = {"prompts": PROMPTS, "group_size": 4, "redundancy": 4, "sampling_params": LONG}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(rollout, server, prompts=PROMPTS[:1], group_size=2, redundancy=0, sampling_params=LONG)
        with closing(HTTPConnection(urlsplit(server.url).netloc, timeout=TIMEOUT_S)) as leaving:
            leaving.request("POST", "/v1/rollouts", json.dumps(body), {"content-type": "application/json"})
            # The other two may be over by then, on a machine that stalls.
            server.wait_until(lambda: server.num_in_engine >= 24)
        (group,) = other.result()["groups"]
    assert [t["num_tokens"] for t in group["trajectories"]] == [LONG["max_tokens"]] * 2
    server.wait_until_idle()
    server.wait_until(lambda: server.counter('vllm_rollout:candidates_total{state="deferred"}') - deferred == 24)
    # They left when they had just begun: had they gone on, there would be 24 times as much as one of them can say.
    assert server.counter("vllm:generation_tokens_total") - before < 24 * LONG["max_tokens"]

    before = server.counter("vllm:generation_tokens_total")
    body |= {"stream": True, "stream_tokens": 1}
    with httpx.stream("POST", f"{server.url}/v1/rollouts", json=body, timeout=TIMEOUT_S) as response:
        next(response.iter_lines())
    server.wait_until_idle()
    assert server.counter("vllm:generation_tokens_total") - before < 24 * LONG["max_tokens"]


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
@pytest.mark.versions
def test_openai_endpoints_answer_with_exactly_n_choices(server: Server, endpoint: str) -> None:
    xargs = {"rollout_redundancy": 4}
    before = server.counter("vllm_rollout:candidates_total")
    if endpoint == "completions":
        response = completion(server, n=3, vllm_xargs=xargs)
    elif endpoint == "chat":
        body = {"messages": PROMPTS[2]["messages"], "n": 3, "max_tokens": 300, "vllm_xargs": xargs}
        response = server.http.post("/v1/chat/completions", json=body)
    else:
        sampling = {"n": 3, "max_tokens": 300, "extra_args": xargs}
        body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
        response = server.http.post("/inference/v1/generate", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])
    assert not answer.get("kv_transfer_params")
    assert server.counter("vllm_rollout:candidates_total") - before == 7


@pytest.mark.versions
def test_the_server_grades_what_it_generates(server: Server) -> None:
    prompts = [{**prompt, "data": {"pattern": "e"}} for prompt in PROMPTS]
    answer = rollout(server, prompts=prompts, reward="regex", include=["text", "logprobs"])
    for group in answer["groups"]:
        rewards = [float("e" in t["text"]) for t in group["trajectories"]]
        assert [t["reward"] for t in group["trajectories"]] == rewards
        assert group["rewards"]["mean"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize("xargs", [{}, {"rollout_redundancy": 4}])
@pytest.mark.versions
def test_choices_of_openai_answers_are_graded(server: Server, xargs: dict[str, Any]) -> None:
    fields = {"rollout_reward": "regex", "rollout_data": '{"pattern": "e"}', **xargs}
    answer = completion(server, prompt="hello", n=3, vllm_xargs=fields).json()
    grades = answer["kv_transfer_params"]["rollout_rewards"]
    assert [grade["reward"] for grade in grades] == [float("e" in choice["text"]) for choice in answer["choices"]]
    for bad, word in (({"rollout_reward": "none"}, "exact"), ({"rollout_reward": 3}, "name")):
        response = completion(server, prompt="hello", vllm_xargs=bad)
        assert response.status_code == 400
        assert word in response.json()["error"]["message"]
    assert completion(server, prompt="hello", stream=True, vllm_xargs=fields).status_code == 400


def test_many_prompts_in_one_completion_request_stay_prompt_major(server: Server) -> None:
    answer = completion(
        server, prompt=["hello", "what is"], n=2, logprobs=1, vllm_xargs={"rollout_redundancy": 2}
    ).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["prompt_token_ids"] == answer["choices"][1]["prompt_token_ids"]
    assert answer["choices"][1]["prompt_token_ids"] != answer["choices"][2]["prompt_token_ids"]
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


def test_a_streamed_completion_gets_n_whole_choices(server: Server) -> None:
    body = {"prompt": "hello", "n": 2, "max_tokens": 200, "vllm_xargs": {"rollout_redundancy": 3}}
    choices = [choice for event in server.events("/v1/completions", **body) for choice in event["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1]


@pytest.mark.versions
def test_single_requests_with_a_group_id_race_each_other(server: Server) -> None:
    xargs = {"rollout_group_id": "joined", "rollout_group_size": 3, "rollout_num_candidates": 8}
    answers = race_joined(server, xargs, 3, 5, LONG["max_tokens"])
    choices = [answer["choices"][0] for answer in answers]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3 + ["abort"] * 5
    assert all(choice["stop_reason"] == "surplus" for choice in choices[3:])
    assert not any(answer.get("kv_transfer_params") for answer in answers)


def test_siblings_share_the_prompt_in_the_prefix_cache(server: Server) -> None:
    server.wait_until_idle()
    before = server.counter("vllm:prefix_cache_hits_total")
    prompt = {"prompt_token_ids": [9 + i % 400 for i in range(100)]}  # three full blocks of 32
    rollout(server, prompts=[prompt], group_size=4, redundancy=0, sampling_params={"max_tokens": 4})
    assert server.counter("vllm:prefix_cache_hits_total") - before >= 3 * 96


def test_seeded_requests_with_chunked_prefill_do_not_end_the_engine(server: Server) -> None:
    # vLLM 0.32 on CPU dies of this: it rewinds the generator of an unfinished prefill, which a CPU generator cannot.
    prompt = {"prompt_token_ids": [7 + i % 300 for i in range(700)]}
    sampling = {"max_tokens": 8, "seed": 3}
    chunked = rollout(server, prompts=[prompt], sampling_params=sampling, redundancy=0)["groups"][0]
    assert chunked["status"] == "complete"
    again = rollout(server, prompts=[prompt], sampling_params=sampling, redundancy=0)["groups"][
        0
    ]  # from the prefix cache
    assert [t["token_ids"] for t in again["trajectories"]] == [t["token_ids"] for t in chunked["trajectories"]]
    assert server.alive


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature", "temperature"),
        ({"sampling_params": {"logit_bias": {"99999": 1}}}, 400, "sampling_params.logit_bias", "99999"),
        (
            {"sampling_params": {"allowed_token_ids": [99999]}},
            400,
            "sampling_params.allowed_token_ids",
            "allowed_token_ids",
        ),
        ({"sampling_params": {"structured_outputs": {"json": "{"}}}, 400, "sampling_params", "JSON"),
        ({"redundancy": 100}, 400, "redundancy", "--max-num-seqs 103"),
        ({"model": "other"}, 404, "model", "not served"),
        ({"prompts": [{"prompt_token_ids": [5] * 2048}]}, 400, "prompts.0.prompt_token_ids", "max_model_len (2048)"),
        ({"prompts": [{"prompt_token_ids": [99999]}]}, 400, "prompts.0.prompt_token_ids", "99999"),
        ({"prompts": [{"messages": [{"content": "no role"}]}]}, 400, "prompts.0.messages", "role"),
    ],
)
def test_what_only_the_engine_can_refuse_names_the_field_and_disturbs_nobody(
    server: Server, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    body = {"prompts": PROMPTS, "group_size": 3, "redundancy": 3, **fields}
    response = server.http.post("/v1/rollouts", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, status, param), error
    assert words in error["message"]
    assert server.alive


def test_bad_xargs_are_a_400_that_names_them(server: Server) -> None:
    for xargs, word in (
        ({"rollout_redundancy": 100}, "--max-num-seqs 103"),
        ({"rollout_redundancy": "x"}, "integer"),
        ({"rollout_group_id": "g"}, "n is 3"),
        ({"vllm_rollout": "x"}, "set by the server"),
    ):
        response = completion(server, n=3, vllm_xargs=xargs)
        assert response.status_code == 400
        assert word in response.json()["error"]["message"]


@pytest.mark.versions
def test_a_sibling_that_disagrees_with_its_group_is_a_400_with_both_values(server: Server) -> None:
    xargs = {"rollout_group_id": "sizes", "rollout_namespace": "run-1", "rollout_group_size": 2}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(completion, server, **LONG, vllm_xargs=xargs)
        server.wait_until(lambda: server.num_in_engine == 1 or first.done())
        for stream in (False, True):
            other = completion(server, max_tokens=2, stream=stream, vllm_xargs={**xargs, "rollout_group_size": 3})
            assert "rollout_group_size of this group is 2" in other.text
            assert "got 3" in other.text
            assert other.status_code == (200 if stream else 400)
        elsewhere = {**xargs, "rollout_namespace": "run-2", "rollout_group_size": 1}
        assert completion(server, max_tokens=2, vllm_xargs=elsewhere).status_code == 200
        assert first.result().status_code == 200


def stream_and_interfere(server: Server, interfere: Callable[[], None]) -> Events:
    """Stream a group of many long candidates; call `interfere` when each has said something, far from the end.

    31 tokens of the prompt are no full block and are prefilled for each sibling, eight of them per step: they never are
    all at the same length.
    """
    prompts = [{"prompt_token_ids": list(range(9, 9 + 63))}]
    body = {"prompts": prompts, "group_size": MANY, "sampling_params": LONG, "include": ["logprobs", "stopped"]}
    events: list[dict[str, Any]] = []
    silent = set(range(MANY))
    for event in server.events(**body, stream_tokens=CHUNK):
        events.append(event)
        if silent:
            silent.discard(event["index"])
            if not silent:
                interfere()
    assert events[-1]["type"] == "done"
    return events


def in_time(attempt: Callable[[], Events], missed: Callable[[dict[str, Any]], bool]) -> Events:
    """The events of the first attempt in which the interference missed no trajectory, of at most `NUM_TRIES`."""
    for _ in range(NUM_TRIES):
        events = attempt()
        if not any(missed(event["trajectory"]) for event in events if event["type"] == "trajectory"):
            break
    return events


@pytest.mark.parametrize("path", ["/abort_requests", "/pause?mode=abort"])
@pytest.mark.versions
def test_an_abort_delivers_the_tokens_that_were_held_back(server: Server, path: str) -> None:
    before = 0.0

    def attempt() -> Events:
        nonlocal before
        server.wait_until_idle()
        before = server.counter("vllm:generation_tokens_total")
        events = stream_and_interfere(server, lambda: server.http.post(path, json={}).raise_for_status())
        server.http.post("/resume").raise_for_status()
        return events

    events = in_time(attempt, missed=lambda trajectory: True)
    streamed = [0] * MANY
    for event in events:
        if event["type"] == "tokens":
            streamed[event["index"]] += len(event["token_ids"])
    candidates = [event["candidate"] for event in events if event["type"] == "candidate"]
    assert {candidate["state"] for candidate in candidates} == {"failed"}
    assert [c["num_tokens"] for c in sorted(candidates, key=lambda c: c["index"])] == streamed
    # The first token comes at once and a message with every CHUNK after it: what is between was held.
    assert any((num_tokens - 1) % CHUNK for num_tokens in streamed)
    (group,) = [event for event in events if event["type"] == "group"]
    assert group["status"] == "incomplete"
    assert f"{MANY} failed" in group["reason"]
    usage = events[-1]["usage"]
    assert usage["num_failed"] == MANY
    assert usage["wasted_tokens"] == usage["generated_tokens"] == sum(streamed)
    server.wait_until_idle()
    assert server.counter("vllm:generation_tokens_total") - before == sum(streamed)


@pytest.mark.versions
def test_a_rollout_that_comes_while_an_aborting_pause_lasts_waits_or_is_told_to_come_again(server: Server) -> None:
    body = {"prompts": PROMPTS[:1], "group_size": 2, "sampling_params": {"max_tokens": 3}}
    failed = server.counter("vllm_rollout:candidates_total", state="failed")
    server.http.post("/pause?mode=abort", json={}).raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        if has(REJECTS_WHILE_PAUSED):
            response = server.http.post("/v1/rollouts", json=body)
            server.http.post("/resume").raise_for_status()
            assert response.status_code == 503, response.text
            assert "paused" in response.text
        else:
            waiting = pool.submit(server.http.post, "/v1/rollouts", json=body)
            server.wait_until(lambda: server.num_in_engine == 2)
            assert not waiting.done()
            server.http.post("/resume").raise_for_status()
            assert waiting.result().status_code == 200, waiting.result().text
    assert server.counter("vllm_rollout:candidates_total", state="failed") == failed
    assert server.http.post("/v1/rollouts", json=body).status_code == 200


@pytest.mark.versions
def test_the_log_says_what_this_vllm_lacks(server: Server) -> None:
    log = server.log.read_text()
    assert all(line in log for line in lacking())
    assert (" lacks " in log) == bool(lacking())


def test_the_log_says_which_operators_serve(server: Server) -> None:
    assert "model runner V1, token_confidence: c++, update_confidence: c++" in server.log.read_text()


@pytest.mark.versions
def test_the_stock_endpoints_still_work(server: Server) -> None:
    assert server.http.get("/v1/models").json()["data"]
    assert completion(server, n=2).json()["choices"][1]["index"] == 1
    assert server.counter("vllm:num_requests_running") >= 0
    assert server.http.post("/tokenize", json={"prompt": "hello"}).status_code == 200
    body = {"prompt": "hello world", "max_tokens": 4, "vllm_xargs": {"rollout_redundancy": 1}}
    refused = server.http.post("/invocations", json=body)
    assert refused.status_code == 400
    assert "rollout_redundancy: rollout fields are not taken on /invocations" in refused.text
    assert server.http.post("/v1/completions", json=body).is_success
