"""Candidates that go on in a long round, on a real engine (tiny random model).

A prompt's length says how many tokens its candidates may have, so that the short prompts are deferred.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Server, said_in

MAX_MODEL_LEN = 2048
FAST, SLOW = 1950, 1700
"""Tokens of prompts."""
GREEDY = {"temperature": 0, "ignore_eos": True}


def prompts(name: str) -> list[dict[str, Any]]:
    """Two that are returned by the short round, two that are deferred."""
    sizes = {"fast": FAST, "slow": SLOW}
    return [
        {"id": f"{name}-{kind}{i}", "prompt_token_ids": [3 + (7 * k + i) % 500 for k in range(size)]}
        for kind, size in sizes.items()
        for i in range(2)
    ]


def short_round(server: Server, name: str, **fields: Any) -> dict[str, Any]:
    """A run `name` after its short round."""
    body = {"id": name, "group_size": 2, "prompts_per_round": 2, "prompt_speculation": 2.0, "response_speculation": 1.0}
    body |= {"sampling_params": GREEDY, "include": ["text", "logprobs"], "resume": True, **fields}
    response = server.http.post("/v1/runs", json=body)
    assert response.status_code == 201, response.text
    response = server.http.post(f"/v1/runs/{name}/rounds", json={"prompts": prompts(name)})
    assert response.status_code == 200, response.text
    assert sorted(response.json()["deferred"]) == [f"{name}-slow0", f"{name}-slow1"]
    return response.json()


def long_round(server: Server, name: str, **fields: Any) -> dict[str, Any]:
    response = server.http.post(f"/v1/runs/{name}/rounds", json={"kind": "long", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def name_weights(server: Server, version: str) -> None:
    server.http.post("/update_weight_version", json={"new_version": version}).raise_for_status()


def load_weights(server: Server, version: str) -> None:
    """As a trainer does it between two rounds; they are those of before under another name."""
    server.http.post("/pause").raise_for_status()
    server.http.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
    name_weights(server, version)
    server.http.post("/resume").raise_for_status()


@pytest.mark.parametrize(("first", "second", "off_policy"), [
    ("default", "default", True),  # nobody names versions
    ("one", "one", False),
    ("one", "two", True),
])  # fmt: skip
def test_greedy_candidates_that_go_on_say_what_they_would_have_said_at_once(
    server: Server, first: str, second: str, off_policy: bool
) -> None:
    name = f"{first}-{second}"
    name_weights(server, first)
    short_round(server, name)
    if second != first:
        load_weights(server, second)
    try:
        answer = long_round(server, name)
        slow = prompts(name)[2:]
        at_once = server.rollout(prompts=slow, group_size=2, sampling_params=GREEDY, include=["text", "logprobs"])
    finally:
        name_weights(server, "default")
    assert answer["off_policy"] is off_policy
    for group, whole in zip(answer["groups"], at_once["groups"], strict=True):
        assert group["prompt_id"] == whole["prompt_id"]
        assert group["prompt_token_ids"] == whole["prompt_token_ids"]
        for ours, theirs in zip(group["trajectories"], whole["trajectories"], strict=True):
            num, joint = MAX_MODEL_LEN - SLOW, ours["num_resumed_tokens"]
            assert 0 < joint < num
            assert ours["token_ids"] == theirs["token_ids"]
            assert ours["num_tokens"] == theirs["num_tokens"] == num
            assert ours["text"] == theirs["text"]
            assert (ours["finish_reason"], ours["stop_reason"]) == ("length", None)
            assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-3)
            assert ours["mean_confidence"] == pytest.approx(theirs["mean_confidence"], rel=1e-3)
            assert ours["std_confidence"] == pytest.approx(theirs["std_confidence"], rel=1e-2)
            assert ours["off_policy"] is off_policy
            spans = [(span["version"], span["start"], span["end"]) for span in ours["weight_versions"]]
            assert spans == ([(first, 0, num)] if first == second else [(first, 0, joint), (second, joint, num)])
    usage = answer["usage"]
    assert usage["returned_tokens"] == 4 * (MAX_MODEL_LEN - SLOW)
    assert usage["wasted_tokens"] == 0
    assert usage["generated_tokens"] + usage["resumed_tokens"] == usage["returned_tokens"]


def test_a_stream_begins_with_what_was_kept(server: Server) -> None:
    short_round(server, "stream")
    events = list(server.events("/v1/runs/stream/rounds", kind="long", stream_tokens=50))
    assert len(said_in(events)) == 4
    ended = [event["trajectory"] for event in events if event["type"] == "trajectory"]
    assert all(0 < trajectory["num_resumed_tokens"] < trajectory["num_tokens"] for trajectory in ended)


def test_candidates_are_scored_at_the_same_token_as_at_once(server: Server) -> None:
    """Candidates that had a score before are not scored again."""
    num_slow = MAX_MODEL_LEN - SLOW
    for name, length, is_scored in (("early", 4, False), ("late", num_slow - 4, True)):
        short_round(server, name, pruning={"detection_length": length, "mode": "shadow"})
        answer = long_round(server, name)
        trajectories = [t for group in answer["groups"] for t in group["trajectories"]]
        assert answer["usage"]["num_scored"] == (4 if is_scored else 0)
        assert all((t["score"] is not None) is is_scored for t in trajectories)
        assert all(t["survival_probability"] == 1 for t in trajectories)
        assert all(t["confidence"] is None for t in trajectories)
