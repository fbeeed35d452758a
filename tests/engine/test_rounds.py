"""Rounds of runs on a real engine (tiny random model)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.engine.conftest import Server, ends_after, run_script
from tests.engine.run_rounds import VARIED, assert_groups_whole, assert_nothing_left, make_run, play_out

NUM_TRIES = 10


def reward_by_parity(server: Server, answer: dict[str, Any]) -> None:
    """Rewards that a first token decides, for each trajectory of a round."""
    rewards = [
        {"prompt_id": group["prompt_id"], "index": t["index"], "reward": t["token_ids"][0] % 2}
        for group in answer["groups"]
        for t in group["trajectories"]
    ]
    posted = server.http.post(f"/v1/rollouts/{answer['id']}/rewards", json={"rewards": rewards})
    posted.raise_for_status()
    assert posted.json()["counts"]["accepted"] > 0


def test_a_round_is_over_in_the_step_in_which_enough_groups_are_complete(tiny_model: str) -> None:
    """In the synchronous loop, the only one that vLLM has on a CPU; tests/adapter/test_races.py has both."""
    result = run_script("rounds.py", tiny_model)
    assert result["scheduler"] == "RolloutScheduler"
    cut = ["deferred", 12, False]
    assert result["clear"] == [
        [["finished", 5, False], ["finished", 9, False], ["surplus", 9, False]],
        [["finished", 12, False], ["finished", 7, False], ["surplus", 12, False]],
        [cut] * 3,
        [cut] * 3,
    ]
    assert result["tie"] == [
        [["finished", 5, False], ["finished", 9, False], ["surplus", 9, False]],
        [["surplus", 12, False], ["finished", 12, False], ["finished", 12, False]],
        [["finished", 12, True], ["finished", 11, False], ["surplus", 12, True]],  # said by whoever ends in that step
        [cut] * 3,
    ]
    assert result["clear_left"] == result["tie_left"] == [0, 0, 0]


@pytest.mark.parametrize(("name", "fields"), [
    ("plain", {}),
    ("auto", {"redundancy": "auto"}),
    ("dual", {"redundancy": 2, "selection": {"dual_end": {"num_longest": 1, "patience": 1.5}}}),
    ("pruned", {"redundancy": 2, "pruning": {"detection_length": 4, "min_labels": 1}}),
    ("resumed", {"resume": True}),
])  # fmt: skip
def test_every_prompt_of_a_run_comes_back_once_and_nothing_is_left(
    server: Server, name: str, fields: dict[str, Any]
) -> None:
    state = server.http.get("/v1/rollouts/state").content
    run = make_run(server, name, group_size=3, prompts_per_round=4, prompt_speculation=1.5, sampling=VARIED, **fields)
    answers = play_out(server, run, num_short=3, after=partial(reward_by_parity, server) if name == "pruned" else None)
    assert_groups_whole(answers, 3)
    assert {answer["kind"] for answer in answers} == {"short", "long"}
    for answer in answers:
        assert bool(answer["deferred"] or answer["unstarted"]) is (answer["kind"] == "short")
    if name == "pruned":
        scored = [t for a in answers for g in a["groups"] for t in g["trajectories"] if t["score"] is not None]
        assert scored
        assert all(t["num_tokens"] > 4 for t in scored)
        assert sum(answer["usage"]["num_pruned"] for answer in answers) > 0
    if name == "auto":
        assert all(answer["budget"] for answer in answers if answer["kind"] == "short")
    if name == "resumed":
        assert any(t["num_resumed_tokens"] for a in answers for g in a["groups"] for t in g["trajectories"])
    assert_nothing_left(server)
    # Other tests share the server: what this one has taught it goes, its head among it.
    server.http.put("/v1/rollouts/state", content=state).raise_for_status()


def round_with_an_abort(server: Server, run_id: str, prompt_id: str) -> list[dict[str, Any]]:
    """The events of a round whose second candidate is aborted as soon as both run."""
    body = {"prompts": [{"id": prompt_id, "prompt": "question"}], "sampling": ends_after(1800), "stream": True}
    events: list[dict[str, Any]] = []

    def read() -> None:
        with server.http.stream("POST", f"/v1/runs/{run_id}/rounds", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))

    server.wait_until_idle()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        server.wait_until(lambda: reading.done() or (events and server.num_in_engine == 2))
        server.http.post("/abort_requests", json={"request_ids": [f"{events[0]['id']}-0-c1"]}).raise_for_status()
        reading.result()
    return events


def test_a_candidate_that_is_lost_is_made_up_for_by_one_other(server: Server) -> None:
    run = make_run(server, "lost", group_size=2, prompts_per_round=1, prompt_speculation=1.0, response_speculation=1.0)
    for number in range(NUM_TRIES):
        events = round_with_an_abort(server, run["id"], f"q{number}")
        if any(event["type"] == "candidate" for event in events):
            break  # else they had ended before the abort came: a fast machine that stalls
    (group,) = [event for event in events if event["type"] == "group"]
    assert (group["status"], group["selected"]) == ("complete", [0, 2])
    (lost,) = [event["candidate"] for event in events if event["type"] == "candidate"]
    assert (lost["index"], lost["state"]) == (1, "failed")
    assert lost["num_tokens"] < 1800
    ends = [event["trajectory"] for event in events if event["type"] == "trajectory"]
    assert [t["num_tokens"] for t in ends] == [1800, 1800]
    assert_nothing_left(server)
