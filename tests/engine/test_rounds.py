"""Rounds of runs on a real engine (tiny random model)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.engine.conftest import Server, ends_after, forgetful
from tests.engine.run_rounds import (
    VARIED,
    assert_groups_whole,
    assert_nothing_left,
    make_run,
    num_idle_groups,
    play_out,
)

NUM_TRIES = 10


def reward_by_parity(server: Server, answer: dict[str, Any]) -> None:
    """Rewards that a first token decides, for each trajectory of a round."""
    assert server.reward(answer, lambda _, trajectory: trajectory["token_ids"][0] % 2)["counts"]["accepted"] > 0


@pytest.fixture
def forgetting(server: Server) -> Iterator[Server]:
    with forgetful(server):
        yield server


@pytest.mark.parametrize(("name", "fields"), [
    ("auto", {"redundancy": "auto"}),
    ("dual", {"redundancy": 2, "selection": {"dual_end": {"num_longest": 1, "patience": 1.5}}}),
    ("pruned", {"redundancy": 2, "pruning": {"detection_length": 4, "min_labels": 1}}),
    ("resumed", {"resume": True}),
])  # fmt: skip
def test_every_prompt_of_a_run_comes_back_once_and_nothing_is_left(
    forgetting: Server, name: str, fields: dict[str, Any]
) -> None:
    server, num_idle = forgetting, num_idle_groups(forgetting)
    run = make_run(
        server, name, group_size=3, prompts_per_round=4, prompt_speculation=1.5, sampling_params=VARIED, **fields
    )
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
    assert_nothing_left(server, num_idle)


def round_with_an_abort(server: Server, run_id: str, prompt_id: str) -> list[dict[str, Any]]:
    """The events of a round whose second candidate is aborted as soon as both run."""
    body = {"prompts": [{"id": prompt_id, "prompt": "question"}], "sampling_params": ends_after(1800)}
    events: list[dict[str, Any]] = []
    server.wait_until_idle()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: events.extend(server.events(f"/v1/runs/{run_id}/rounds", **body)))
        server.wait_until(lambda: reading.done() or (events and server.num_in_engine == 2))
        server.http.post("/abort_requests", json={"request_ids": [f"{events[0]['id']}-0-c1"]}).raise_for_status()
        reading.result()
    return events


def test_a_candidate_that_is_lost_is_made_up_for_by_one_other(server: Server) -> None:
    num_idle = num_idle_groups(server)
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
    assert_nothing_left(server, num_idle)
