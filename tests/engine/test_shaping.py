"""Length shaping on a real engine (tiny random model): dual-end with patience, redundancy "auto", recorded traces."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.engine.conftest import Server, forgetful, in_one_step
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.page.recording.file import read_trace
from vllm_rollout.parts.rounds.http.saved import parse_saved

STOPS = list(range(20, 500, 16))
"""Tokens that end a candidate: about one in sixteen, so that lengths are geometric with a long tail."""
GROUP_SIZE, NUM_CANDIDATES = 4, 8


def rollout(server: Server, *ids: str, **fields: Any) -> dict[str, Any]:
    prompts = [{"id": id, "prompt_token_ids": [5, 6, 7 + len(id)]} for id in ids]
    sampling = {"stop_token_ids": STOPS, "max_tokens": 400, "seed": 11, "temperature": 1.0}
    return server.rollout(**{"prompts": prompts, "group_size": GROUP_SIZE, "sampling_params": sampling, **fields})


def lengths(group: dict[str, Any]) -> dict[int, int]:
    return {c["index"]: c["num_tokens"] for c in group["trajectories"] + group["candidates"]}


@pytest.fixture(scope="module")
def whole_pool(server: Server) -> dict[str, Any]:
    """Seeded candidates of a whole pool, all run to their end."""
    dual_end = {"dual_end": {"num_longest": 1}}
    (group,) = rollout(server, "pool", redundancy=4, selection=dual_end)["groups"]
    return group


def test_dual_end_returns_both_ends_of_the_pool(whole_pool: dict[str, Any]) -> None:
    ranked = sorted((num_tokens, index) for index, num_tokens in lengths(whole_pool).items())
    assert len(ranked) == NUM_CANDIDATES
    assert ranked[-1][0] > 2 * ranked[0][0], "lengths have to differ for the test to say anything"
    expected = {index for _, index in [*ranked[: GROUP_SIZE - 1], ranked[-1]]}
    assert {t["index"] for t in whole_pool["trajectories"]} == expected


def test_patience_stops_the_pool_at_the_length_the_rule_says(server: Server, whole_pool: dict[str, Any]) -> None:
    patience = 1.25
    dual_end = {"dual_end": {"num_longest": 1, "patience": patience}}
    answer = in_one_step(server, NUM_CANDIDATES, lambda: rollout(server, "pool", redundancy=4, selection=dual_end))
    (group,) = answer["groups"]
    pool = lengths(whole_pool)
    cap = math.ceil(patience * sorted(pool.values())[GROUP_SIZE - 1])
    assert max(pool.values()) > cap, "somebody has to be too long for the test to say anything"
    expected = {index: min(num_tokens, cap) for index, num_tokens in pool.items()}
    assert lengths(group) == expected
    endings = [
        Ending(index, "finished" if num_tokens <= cap else "surplus", min(num_tokens, cap))
        for index, num_tokens in pool.items()
    ]
    plan = GroupPlan(GROUP_SIZE, NUM_CANDIDATES - GROUP_SIZE, False, "dual_end", 1, patience=patience)
    assert [t["index"] for t in group["trajectories"]] == list(conclude(plan, endings).selected)
    assert {c["index"] for c in group["candidates"] if c["state"] == "surplus"} == {
        index for index, num_tokens in pool.items() if num_tokens > cap
    }


def test_openai_requests_have_patience_too(server: Server, whole_pool: dict[str, Any]) -> None:
    xargs = {"rollout_redundancy": 4, "rollout_selection": "dual_end", "rollout_patience": 1.25}
    body = {"prompt": [5, 6, 11], "n": GROUP_SIZE, "max_tokens": 400, "seed": seed_for(11, "pool")}
    body |= {"temperature": 1.0, "stop_token_ids": STOPS, "vllm_xargs": xargs}
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * GROUP_SIZE
    cap = math.ceil(1.25 * sorted(lengths(whole_pool).values())[GROUP_SIZE - 1])
    assert answer["usage"]["completion_tokens"] <= GROUP_SIZE * cap


def test_auto_gives_more_to_prompts_whose_lengths_vary_more(server: Server) -> None:
    calm = {"stop_token_ids": [6], "logit_bias": {"6": 100}, "min_tokens": 20, "max_tokens": 400}
    wild = {"stop_token_ids": STOPS, "max_tokens": 400, "seed": 3}
    for _ in range(2):
        rollout(server, "calm", early_stop=False, sampling_params=calm)
        rollout(server, "wild", early_stop=False, sampling_params=wild, redundancy=4)
    answer = rollout(server, "calm", "wild", redundancy="auto", selection={"dual_end": {}})
    of_calm, of_wild = (group["allocation"] for group in answer["groups"])
    assert (of_calm["weight"], of_wild["weight"]) == (0.0, 1.0)
    assert of_calm["std_tokens"] == 0.0
    assert of_wild["std_tokens"] > 1.0
    assert of_wild["num_candidates"] == 2 * GROUP_SIZE
    assert of_wild["at_upper_bound"]
    assert of_wild["selection"] == ("shortest" if of_wild["extreme"] else "dual_end")
    budget = answer["budget"]
    assert budget["source"] == "profile"
    assert budget["rho"] > 0
    assert budget["base_s"] > budget["seconds_per_candidate"] > 0
    assert answer["budget"]["total"] == of_calm["num_candidates"] + of_wild["num_candidates"]
    assert [group["status"] for group in answer["groups"]] == ["complete", "complete"]
    assert server.counter("vllm_rollout:prompts_at_upper_bound_total") >= 1


def test_steps_that_take_longer_than_the_profile_says_are_drift_and_said_once(server: Server) -> None:
    long = {"max_tokens": 1900, "ignore_eos": True}
    server.wait_until(
        lambda: (
            rollout(server, "drift", sampling_params=long) and "have drifted from the profile" in server.log.read_text()
        )
    )
    assert server.log.read_text().count("have drifted from the profile") == 1
    assert "vllm-rollout profile tiny --output" in server.log.read_text()
    server.wait_until(
        lambda: (
            rollout(server, "drift", sampling_params=long)
            and server.counter("vllm_rollout:step_time_drift_ratio", batch_sizes="4-7") > 1.25
        )
    )


def test_the_state_holds_the_lengths(server: Server) -> None:
    with forgetful(server):
        rollout(server, "remembered", early_stop=False)
        state = server.http.get("/v1/rollouts/state").content
        learned = parse_saved(state).learned
        rows = [json.loads(line) for line in learned.splitlines()]  # no head was trained: there are lines of JSON only
        assert "id:remembered" in [prompt[0] for kind, prompts in rows[1:] if kind == "prompts" for prompt in prompts]
        rollout(server, "forgotten", early_stop=False)
        assert server.http.put("/v1/rollouts/state", content=state).status_code == 204
        assert server.http.get("/v1/rollouts/state").content == state


def test_every_rollout_is_recorded_for_the_simulator(server: Server) -> None:
    answer = rollout(server, "recorded", redundancy=4)
    lines = [json.loads(line) for line in server.record.read_text().splitlines()]
    (row,) = [line for line in lines if line.get("rollout_id") == answer["id"]]
    (group,) = answer["groups"]
    assert row["prompts"][0]["lengths"] == [num_tokens for _, num_tokens in sorted(lengths(group).items())]
    assert row["prompts"][0]["ends"].count("stop") >= GROUP_SIZE, "one that loses a tie has ended too"
    # Other tests let every candidate of a prompt fail: nothing of those can be replayed.
    replayable = [
        any(end != "failed" for end in prompt["ends"])
        for line in lines
        if "prompts" in line
        for prompt in line["prompts"]
    ]
    assert sum(len(rollout.prompts) for rollout in read_trace(server.record).rollouts) == sum(replayable)
