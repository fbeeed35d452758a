"""Two data-parallel ranks and two API processes: the siblings of a group meet on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from tests.engine.conftest import Server, race_joined, serve_command
from tests.engine.run_rounds import VARIED, assert_groups_whole, make_run, play_out
from vllm_rollout import RolloutClient
from vllm_rollout.kernel.rules.other_requests import LATE_S

NUM_RANKS = 2


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--max-model-len", "1024", "--data-parallel-size", str(NUM_RANKS), "--max-num-queued-reqs", "64")
    flags += ("--dtype", "float32")  # in bfloat16 vLLM's attention for AMX ends a worker by SIGILL on some machines
    flags += ("--rollout-state", str(folder / "state"))
    with Server(serve_command(tiny_model, *flags), folder / "server.log", VLLM_SERVER_DEV_MODE="1") as server:
        yield server


def tokens_by_rank(server: Server) -> list[float]:
    return [server.counter("vllm:generation_tokens_total", engine=str(rank)) for rank in range(NUM_RANKS)]


def rank_of(server: Server, answer: dict[str, Any], before: list[float]) -> int:
    """Rank that ran a rollout of one group. `before`: tokens by rank when the rollout began."""
    generated = answer["usage"]["generated_tokens"]
    # Two API processes count, each at its own pace: idle engines do not mean that all is counted.
    server.wait_until(lambda: sum(tokens_by_rank(server)) - sum(before) == generated)
    (rank,) = [rank for rank in range(NUM_RANKS) if tokens_by_rank(server)[rank] > before[rank]]
    return rank


def test_a_group_runs_on_one_rank_and_the_next_one_on_the_other(server: Server) -> None:
    used = []
    for _ in range(8):  # either of two API processes may take a request, each with turns of its own
        before = tokens_by_rank(server)
        body = {
            "prompts": [{"prompt": "hello"}],
            "group_size": 2,
            "redundancy": 2,
            "sampling_params": {"max_tokens": 200},
        }
        answer = server.rollout(**body)
        used.append(rank_of(server, answer, before))
        assert answer["groups"][0]["status"] == "complete"
    assert set(used) == set(range(NUM_RANKS))


def test_groups_keep_off_a_rank_that_ordinary_requests_keep_busy(server: Server) -> None:
    """Whichever API processes have them: each sees what the engine cores count.

    A count may come late on a machine that stalls, so one or two of eight may go astray; half would without counts.
    """
    over = Event()

    def keep_busy(max_tokens: int) -> None:
        body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
        while not over.is_set():
            server.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "0"})

    with ThreadPoolExecutor(12) as pool:
        busy = [pool.submit(keep_busy, 400 + 40 * number) for number in range(12)]
        try:
            server.wait_until(lambda: server.num_in_engine >= 10)
            time.sleep(2 * LATE_S)
            before = tokens_by_rank(server)[1]
            body = {"prompts": [{"prompt": "hello"}], "group_size": 2, "sampling_params": {"max_tokens": 4}}
            answers = [server.rollout(**body) for _ in range(8)]
            generated = sum(answer["usage"]["generated_tokens"] for answer in answers)
            server.wait_until(lambda: tokens_by_rank(server)[1] - before >= 0.75 * generated)
        finally:
            over.set()
    for each in busy:
        each.result()
    server.wait_until_idle()


def test_requests_that_join_a_group_meet_whichever_api_process_takes_them(server: Server) -> None:
    xargs = {"rollout_group_id": "meet", "rollout_group_size": 2, "rollout_num_candidates": 6}
    answers = race_joined(server, xargs, 2, 4, 900)
    choices = [answer["choices"][0] for answer in answers]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2 + ["abort"] * 4
    assert all(choice["stop_reason"] == "surplus" for choice in choices[2:])


def test_both_ranks_learn_every_label_and_score_with_the_same_head(server: Server) -> None:
    pruning = {"detection_length": 8, "mode": "shadow", "min_labels": 4}

    def rollout() -> tuple[int, dict[str, Any]]:
        before = tokens_by_rank(server)
        body = {"prompts": [{"id": "q", "prompt": "hello"}], "group_size": 8, "pruning": pruning}
        body["sampling_params"] = {"min_tokens": 20, "max_tokens": 40}
        answer = server.rollout(**body)
        return rank_of(server, answer, before), answer

    def report() -> dict[str, Any]:
        return server.http.get("/v1/quality_head/report").json()

    num_labels, used = 0, set()
    while used != set(range(NUM_RANKS)) or num_labels < 160:
        rank, answer = rollout()
        used.add(rank)
        posted = server.reward(answer, lambda _, trajectory: trajectory["token_ids"][6] % 2)
        assert posted["counts"]["accepted"] == posted["num_training"] == 8
        num_labels += 8
        signals = report()["signals"]["confidence"]
        assert signals["num_positive"] + signals["num_negative"] == num_labels
    server.wait_until(lambda: report()["head"] is not None)

    def versions() -> dict[int, int]:
        """The head that scored the newest rollout of each rank."""
        scored = {}
        while len(scored) < NUM_RANKS:
            rank, answer = rollout()
            scored[rank] = answer["groups"][0]["trajectories"][0]["head_version"]
        return scored

    server.wait_until(lambda: set(versions().values()) == {report()["head"]["version"]})


def test_a_round_stops_on_all_ranks_when_enough_groups_are_complete(server: Server) -> None:
    """No rank sees the groups of the others: an API process counts, and cuts them a message later."""
    run = make_run(server, "cut", group_size=3, prompts_per_round=6, prompt_speculation=1.5, sampling_params=VARIED)
    for number in range(3):
        now = server.http.get("/v1/runs/cut").json()
        prompts = [{"id": f"{number}-{i}", "prompt": f"question {i}"} for i in range(now["num_fresh_prompts"])]
        events = list(server.events(f"/v1/runs/{run['id']}/rounds", prompts=prompts))
        done = events[-1]
        assert done["type"] == "done"
        assert sum(event["type"] == "group" for event in events) == 6
        assert len(done["deferred"]) + len(done["unstarted"]) == (3 if now["next_round"] == "short" else 0)


def test_any_api_process_goes_on_with_a_run(server: Server) -> None:
    run = make_run(server, "shared", group_size=2, prompts_per_round=3, prompt_speculation=1.5, sampling_params=VARIED)
    answers = play_out(server, run, num_short=4)
    assert_groups_whole(answers, 2)
    for _ in range(8):  # whichever process answers
        server.http.headers["connection"] = "close"
        seen = server.http.get("/v1/runs/shared").json()
        assert (seen["num_rounds"], seen["totals"]["num_waiting"]) == (len(answers), 0)
    del server.http.headers["connection"]


def test_a_feed_stops_its_groups_on_both_ranks_at_an_update_and_they_go_on(server: Server) -> None:
    sampling = {"max_tokens": 900, "min_tokens": 900, "seed": 3}
    terms = {"max_staleness": 1, "on_update": "stop", "on_stale": "defer", "sampling_params": sampling}
    server.wait_until(lambda: server.num_in_engine == 0)
    time.sleep(2 * LATE_S)
    before = tokens_by_rank(server)
    with RolloutClient(server.url) as client, client.feed(2, 4, id="ranks", **terms) as feed:
        feed.put({"id": f"q{i}", "prompt_token_ids": [20 + i, 30, 40]} for i in range(4))
        server.wait_until(
            lambda: all(now > then + 20 for now, then in zip(tokens_by_rank(server), before, strict=True))
        )
        server.http.post("/update_weight_version", json={"new_version": "ranks-1"}).raise_for_status()
        batch = feed.batch()
    server.http.post("/update_weight_version", json={"new_version": "default"}).raise_for_status()
    assert (sorted(group.prompt_id for group in batch.groups), batch.failed) == (["q0", "q1", "q2", "q3"], [])
    for trajectory in (each for group in batch.groups for each in group.trajectories):
        assert [span["version"] for span in trajectory.weight_versions][-1] == "ranks-1"
        assert 0 < trajectory.num_resumed_tokens < trajectory.num_tokens == 900


def test_a_group_that_the_servers_queue_has_no_room_for_is_refused_as_a_whole(server: Server) -> None:
    """Last: nothing tells when the engine is rid of those it had let in, whose tokens would be taken for others'."""
    body = {"prompts": [{"prompt": "hello"}], "group_size": 40, "redundancy": 40}
    # None of those let in ends and makes room while the others come.
    body["sampling_params"] = {"max_tokens": 900, "ignore_eos": True}
    response = server.http.post("/v1/rollouts", json=body)
    assert response.status_code == 503
    assert response.json()["error"]["message"]
