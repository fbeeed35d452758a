"""Sessions over a real server of two emulated ranks: OpenAI clients that know nothing race, turn by turn."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import count, pairwise
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.kills.ranks import rank_processes
from tests.engine.conftest import NO_KEEPALIVE, Server, emulating, serve_command
from tests.support.waiting import WAIT_S, wait_until
from vllm_rollout import AgentGroup, AgentSession, AsyncRolloutClient, Void
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.emulation.tokens import succeeded
from vllm_rollout.parts.page.recording.file import parse_row
from vllm_rollout.parts.page.recording.session_rows import SessionGroupRow
from vllm_rollout.parts.sessions.with_shaping.simulated import SessionGroup, SessionTerms, draw_course, run_sessions
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate

DEVICE = {
    "step": {"ms": 4.0},
    "kv_tokens": 60_000,
    "lengths": {"log_normal": {"mean": 20, "sigma": 0.3}},
    "score": {"auc": 0.9},
}
LONG = 1500
"""Tokens of a turn that no test waits for: 6 s."""
NAMES = count()


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sessions")
    flags = ["--max-model-len", "2048", "--data-parallel-size", "2", "--api-server-count", "2", "--max-num-seqs", "64"]
    flags += ["--rollout-record", str(folder / "trace.jsonl")]
    command = serve_command(tiny_model, *emulating(folder, DEVICE), *flags)
    with Server(command, folder / "server.log", VLLM_SERVER_DEV_MODE="1") as server:
        server.record = folder / "trace.jsonl"
        yield server


class Harness:
    """Sends turns by a session id, and knows nothing else."""

    def __init__(self, server: Server, session: str, **fields: Any) -> None:
        self.http = server.http
        self.session, self.fields = session, fields
        self.prompt = list(range(60, 160))

    def turn(self, num_tokens: int | None = 5, **fields: Any) -> dict[str, Any]:
        """The choice that answers it; the conversation goes on with its tokens and three of a tool."""
        response = self.ask(num_tokens, **fields)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        self.prompt += [*choice["token_ids"], 71, 72, 73]
        return choice

    def ask(self, num_tokens: int | None = 5, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        forced = {} if num_tokens is None else {"emulate_lengths": num_tokens}
        xargs = {**forced, **self.fields, **fields.pop("vllm_xargs", {})}
        body = {"prompt": self.prompt, "max_tokens": 1800, "return_token_ids": True, "vllm_xargs": xargs, **fields}
        return self.http.post("/v1/completions", json=body, headers={"x-session-id": self.session, **(headers or {})})

    def finish(self, **body: Any) -> dict[str, Any]:
        response = self.http.post(f"/v1/sessions/{self.session}/finish", json=body)
        assert response.status_code == 200, response.text
        return response.json()


def declared(server: Server, group_size: int, redundancy: int = 0, **fields: Any) -> tuple[str, list[Harness]]:
    body = {"group_size": group_size, "redundancy": redundancy, **fields}
    response = server.http.post("/v1/groups", json=body)
    assert response.status_code == 201, response.text
    group = response.json()
    return group["id"], [Harness(server, id) for id in group["to_begin"]]


def group(server: Server, id: str) -> dict[str, Any]:
    return server.http.get(f"/v1/groups/{id}").json()


def is_lost(choice: dict[str, Any]) -> bool:
    return (choice["finish_reason"], choice["stop_reason"]) == ("abort", "surplus")


def in_turn(server: Server, id: str, session: str) -> bool:
    return {"id": session, "state": "turn"}.items() <= next(
        (each for each in group(server, id)["sessions"] if each["id"] == session), {}
    ).items()


def test_when_enough_have_finished_the_others_stop_amid_their_turns_and_are_answered_at_once_later(server):
    id, (winner, amid, between, unbegun) = declared(server, 1, 3)
    between.turn()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(amid.turn, LONG)
        for _ in range(3):
            winner.turn()
        wait_until(lambda: in_turn(server, id, amid.session))
        told = winner.finish(reward=1.0)
        stopped = running.result()
    assert (told["state"], told["group_status"]) == ("finished", "complete")
    assert is_lost(stopped)
    assert len(stopped["token_ids"]) < LONG / 2
    steps = server.counter("vllm:generation_tokens_total")
    for late in (amid, between, unbegun):
        choice = late.turn(LONG)
        assert (is_lost(choice), choice["token_ids"]) == (True, [])
        for fields in ({"logprobs": 2}, {"echo": True, "logprobs": 2}, {"logprobs": 2, "logprob_token_ids": [7]}):
            num_prompt = len(late.prompt)
            choice = late.turn(LONG, **fields)
            assert (is_lost(choice), choice["token_ids"]) == (True, [])
            told = choice["logprobs"]["token_logprobs"]
            assert told == ([None] * num_prompt if "echo" in fields else [])
    assert server.counter("vllm:generation_tokens_total") == steps
    found = group(server, id)
    ends = {each["id"]: each["state"] for each in found["sessions"]}
    assert ends.pop(winner.session) == "finished"
    assert list(ends.values()) == ["surplus"] * 3
    assert (found["status"], found["selected"], found["returned_tokens"]) == ("complete", [winner.session], 15)
    assert found["generated_tokens"] == 15 + 5 + len(stopped["token_ids"])


def aborted(server: Server, path: str, body: dict[str, Any], header: str, id: str) -> tuple[int, dict[str, Any]]:
    """Number of requests that one abort call stopped, and the answer of the aborted request."""
    server.wait_until_idle()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.http.post, path, json=body, headers={"x-request-id": header})
        wait_until(lambda: server.num_in_engine >= 4)
        with httpx.Client(base_url=server.url) as another:
            response = another.post("/abort_requests", json={"request_ids": [id]})
        assert response.status_code == 200, response.text
        answer = running.result()
    assert answer.status_code == 200, answer.text
    return response.json()["aborted"], answer.json()


EIGHTY_LONG_GROUPS = {
    "prompts": [{"prompt_token_ids": [60, at]} for at in range(70, 150)],
    "group_size": 4,
    "sampling_params": {"max_tokens": 1800, "extra_args": {"emulate_lengths": LONG}},
}


@pytest.mark.parametrize("attempt", range(3))  # a connection may come to either process
def test_the_external_id_of_a_request_stops_its_whole_group_in_whichever_process(server, attempt):
    xargs = {"rollout_redundancy": 1, "emulate_lengths": LONG}
    body = {"prompt": [60, 61], "n": 3, "max_tokens": 1800, "vllm_xargs": xargs}
    num, answer = aborted(server, "/v1/completions", body, f"a{attempt}", f"cmpl-a{attempt}")
    assert num == 4
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort"] * 3
    num, answer = aborted(server, "/v1/rollouts", EIGHTY_LONG_GROUPS, f"b{attempt}", f"b{attempt}")
    assert 4 <= num < 320, "others start in place of those that were stopped"
    assert answer["id"].startswith(f"rollout-b{attempt}-")
    assert {group["status"] for group in answer["groups"]} == {"incomplete"}
    assert answer["usage"]["num_failed"] == 320


def test_rollouts_that_only_wait_for_places_are_aborted_from_either_process(server):
    """Aborts and rollouts come to either process. Of a rollout that waits, no engine core knows."""
    names = [f"waits{number}" for number in range(6)]
    server.wait_until_idle()
    with ThreadPoolExecutor(len(names)) as pool:
        running = [
            pool.submit(server.http.post, "/v1/rollouts", json=EIGHTY_LONG_GROUPS, headers={"x-request-id": name})
            for name in names
        ]
        wait_until(lambda: server.num_in_engine >= 128)

        def are_over() -> bool:
            """Abort all that is not over: a rollout may come after its first abort."""
            for name, answer in reversed([*zip(names, running, strict=True)]):  # most of them wait
                if not answer.done():
                    with httpx.Client(base_url=server.url) as another:
                        another.post("/abort_requests", json={"request_ids": [name]}).raise_for_status()
            return all(each.done() for each in running)

        wait_until(are_over)
        answers = [each.result().json() for each in running]
    assert [answer["usage"]["num_failed"] for answer in answers] == [320] * len(names)
    assert sum(answer["usage"]["generated_tokens"] == 0 for answer in answers) >= 2


def test_a_turn_whose_prompt_fills_the_context_has_not_happened_and_is_told_why(server):
    id, (harness,) = declared(server, 1)
    harness.turn()
    harness.prompt = [*harness.prompt, *[71] * (2048 - len(harness.prompt))]
    for fields in ({}, {"max_tokens": None}):
        response = harness.ask(**fields)
        assert response.status_code == 400
        assert "fills the context" in response.json()["error"]["message"]
    (session,) = group(server, id)["sessions"]
    assert (session["state"], session["num_turns"]) == ("between_turns", 1)
    harness.finish(reward=1.0)


def recorded(server: Server, id: str) -> SessionGroupRow | None:
    rows = map(parse_row, server.record.read_text().splitlines())
    return next((row for row in rows if isinstance(row, SessionGroupRow) and row.id == id), None)


def test_what_became_of_a_group_is_recorded_as_its_clients_hear_it(server):
    id, (winner, amid, void, _) = declared(server, 2, 2, max_tokens=1700)
    for session in (winner, void, winner, amid, winner):
        session.turn()
    void.finish(void=True)
    winner.finish(reward=0.5)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(amid.turn, LONG)
        wait_until(lambda: in_turn(server, id, amid.session))
        found = group(server, id)
        heard = [server.http.get(f"/v1/sessions/{each['id']}").json()["turns"] for each in found["sessions"]]
        assert server.http.delete(f"/v1/groups/{id}").status_code == 204
        stopped = len(running.result()["token_ids"])
    wait_until(lambda: recorded(server, id))
    row = recorded(server, id)
    assert (row.status, row.reason, row.group_size, row.num_candidates) == ("deferred", "it was cancelled", 2, 4)
    assert (row.max_tokens, row.rank in (0, 1), row.selected) == (1700, True, [])
    told = [(each.id, each.state, each.reward) for each in row.sessions]
    states = {winner.session: "finished", void.session: "void", amid.session: "deferred"}
    assert told == [(each["id"], states[each["id"]], each["reward"]) for each in found["sessions"]]
    of_amid = next(each for each in row.sessions if each.id == amid.session)
    assert (of_amid.num_tokens, of_amid.turns[-1].num_tokens) == (5 + stopped, stopped)
    assert of_amid.turns.pop().ended_s >= of_amid.ended_s
    for session, turns in zip(row.sessions, heard, strict=True):
        times = [time for turn in session.turns for time in turn[:2]]
        assert times == sorted(times)
        assert session.ended_s <= row.seconds + 0.001
        assert session.gaps_s == pytest.approx([turn["waited_s"] for turn in turns[1:]], abs=0.1)
        assert [(each.num_tokens, each.num_prompt_tokens, each.history) for each in session.turns] == [
            (turn["num_tokens"], turn["num_prompt_tokens"], turn["history"]) for turn in turns
        ]
        for before, after in pairwise(session.turns):
            assert before.num_prompt_tokens - 16 <= after.num_cached_tokens < after.num_prompt_tokens


def test_a_streamed_turn_ends_when_its_session_has_lost(server):
    id, (winner, loser) = declared(server, 1, 1)
    body = {"prompt": [60, 61], "max_tokens": 1800, "stream": True, "vllm_xargs": {"emulate_lengths": LONG}}
    http = httpx.Client(base_url=server.url, limits=NO_KEEPALIVE, timeout=60)
    headers = {"x-session-id": loser.session}
    chunks = []
    with http, http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: "))["choices"][0])
                if len(chunks) == 3:
                    winner.turn()
                    winner.finish()
    assert 3 <= len(chunks) < LONG / 2
    assert is_lost(chunks[-1])
    (of_loser,) = [each for each in group(server, id)["sessions"] if each["id"] == loser.session]
    assert of_loser["num_tokens"] > 0


def test_the_first_turn_may_say_the_group_and_the_last_one_that_it_is_the_last(server):
    name = f"named-{next(NAMES)}"
    fields = {"rollout_group_id": name, "rollout_group_size": 2, "rollout_num_candidates": 3}
    a, b, c = (Harness(server, f"{name}/{letter}", **fields) for letter in "abc")
    a.turn(), b.turn(), c.turn()
    a.turn(vllm_xargs={"rollout_last": True})
    b.turn(vllm_xargs={"rollout_last": True})
    assert is_lost(c.turn())
    found = group(server, name)
    assert (found["status"], found["selected"], found["to_begin"]) == ("complete", [a.session, b.session], [])
    other = Harness(server, a.session, **{**fields, "rollout_group_size": 1})
    response = other.ask()
    assert (response.status_code, "of this session's group is 2" in response.text) == (400, True)
    assert is_lost(Harness(server, f"{name}/d", **fields).turn()), "it came too late"


def test_void_sessions_are_refilled(server):
    id, (a, b) = declared(server, 2, 0, max_sessions=3)
    a.turn(), b.turn()
    told = a.finish(void=True)
    assert (told["state"], told["num_wanted"], len(told["wanted"])) == ("void", 1, 1)
    b.finish()
    third = Harness(server, told["wanted"][0])
    third.turn()
    assert third.finish()["group_status"] == "complete"
    assert group(server, id)["selected"] == [b.session, third.session]


def test_limits_of_a_session_cap_its_last_turn(server):
    id, (session,) = declared(server, 1, 0, max_tokens=12)
    assert session.turn(9)["finish_reason"] == "stop"
    choice = session.turn(9)
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 3)
    found = group(server, id)
    assert (found["sessions"][0]["state"], found["sessions"][0]["ended_by"]) == ("truncated", "max_tokens")
    assert found["status"] == "complete", "nobody else is left"
    assert session.finish(reward=0.5)["reward"] == 0.5


def test_one_turn_at_a_time_and_one_whose_client_leaves_has_not_been(server):
    id, (session, _) = declared(server, 1, 1)
    may_leave = threading.Event()
    running = threading.Thread(target=leave_amid, args=(server, session, may_leave))
    running.start()
    wait_until(lambda: in_turn(server, id, session.session))
    second = session.ask()
    assert (second.status_code, "one may run at a time" in second.text) == (409, True)
    early = session.http.post(f"/v1/sessions/{session.session}/finish", json={})
    assert early.status_code == 409
    may_leave.set()
    running.join(WAIT_S)
    wait_until(lambda: not in_turn(server, id, session.session))
    assert group(server, id)["sessions"][0]["num_turns"] == 0
    assert session.turn()["finish_reason"] == "stop"
    session.finish()
    again = session.http.post(f"/v1/sessions/{session.session}/finish", json={})
    assert (again.status_code, "was finished before" in again.text) == (409, True)


def leave_amid(server: Server, session: Harness, may_leave: threading.Event) -> None:
    body = {"prompt": session.prompt, "max_tokens": 1800, "vllm_xargs": {"emulate_lengths": LONG}}
    connection = HTTPConnection(urlsplit(server.url).netloc)
    headers = {"content-type": "application/json", "x-session-id": session.session}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    may_leave.wait(WAIT_S)
    connection.close()


def test_the_trajectory_is_what_the_engine_saw_and_another_history_is_refused_where_it_begins(server):
    id, (session,) = declared(server, 1)
    begin = list(session.prompt)
    first = session.turn(logprobs=0)["token_ids"]
    second = session.turn(logprobs=0)["token_ids"]
    other = 71 if first[0] != 71 else 72  # each a letter of its own
    told_otherwise = [*begin, other, *session.prompt[len(begin) + 1 :]]
    session.prompt, right = told_otherwise, session.prompt
    response = session.ask()
    assert response.status_code == 400
    assert "turn 3 of session" in response.text
    assert f"token {len(begin)} " in response.text
    session.prompt = right
    third = session.turn(logprobs=0)["token_ids"]
    found = session.http.get(f"/v1/sessions/{session.session}").json()
    (segment,) = found["segments"]
    tool = [71, 72, 73]
    assert segment["token_ids"] == [*begin, *first, *tool, *second, *tool, *third]
    assert segment["mask"] == [0] * 100 + [1] * 5 + [0] * 3 + [1] * 5 + [0] * 3 + [1] * 5
    assert [bool(value) for value in segment["logprobs"]] == [bool(mask) for mask in segment["mask"]]
    assert [turn["history"] for turn in found["turns"]] == ["first", "extended", "extended"]
    assert session.http.delete(f"/v1/groups/{id}").status_code == 204
    assert session.http.get(f"/v1/sessions/{session.session}").status_code == 404


def test_a_history_that_may_be_rewritten_makes_segments(server):
    _, (session,) = declared(server, 1, history="rewritable")
    session.turn()
    session.prompt = [80, 81, 82]
    session.turn()
    found = session.http.get(f"/v1/sessions/{session.session}").json()
    assert [len(each["token_ids"]) for each in found["segments"]] == [105, 8]
    assert [(turn["history"], turn["segment"]) for turn in found["turns"]] == [("first", 0), ("rewritten", 1)]


def test_harnesses_are_told_what_becomes_of_their_sessions(server):
    id, (a, b, c) = declared(server, 1, 2)
    events: list[dict[str, Any]] = []
    begun = threading.Event()

    def listen() -> None:
        with httpx.stream("GET", f"{server.url}/v1/sessions/events?group={id}", timeout=60) as response:
            for line in response.iter_lines():
                begun.set()
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))

    listener = threading.Thread(target=listen)
    listener.start()
    begun.wait(30)
    for session in (a, b, c):
        session.turn()
    a.finish(void=True)
    b.finish(reward=1)
    listener.join(30)
    assert [(each.get("session_id"), each.get("state")) for each in events] == [
        *((session.session, "wanted") for session in (a, b, c)),
        (a.session, "void"),
        (b.session, "finished"),
        (c.session, "surplus"),
        (None, None),
    ]
    assert (events[-1]["status"], events[-1]["selected"]) == ("complete", [b.session])
    afterwards = server.http.get("/v1/sessions/events", params={"group": id}).text
    assert afterwards.count("event: session") == 3


def test_the_group_of_a_stranger_is_not_there(server):
    id, (session,) = declared(server, 1)
    session.turn()
    stranger = {"authorization": "Bearer somebody-else"}
    for method, path in (
        ("GET", f"/v1/groups/{id}"),
        ("DELETE", f"/v1/groups/{id}"),
        ("POST", f"/v1/sessions/{session.session}/finish"),
        ("GET", f"/v1/sessions/{session.session}"),
        ("GET", f"/v1/sessions/events?group={id}"),
    ):
        body = {"json": {}} if method == "POST" else {}
        assert server.http.request(method, path, headers=stranger, **body).status_code == 404
    choice = session.ask(headers=stranger).json()["choices"][0]
    assert choice["finish_reason"] == "stop", "to others it is no session at all"
    assert group(server, id)["sessions"][0]["num_turns"] == 1


def test_sessions_of_a_group_share_a_rank_and_move_between_turns_when_it_is_drained(server):
    id, sessions = declared(server, 4)
    ranks = []
    for session in sessions:
        session.turn()
    busy = [each["num_groups"] for each in server.http.get("/v1/engines").json()["engines"]]
    assert sum(busy) == 0, "between turns nothing is in the engine"
    hits = server.counter("vllm:prefix_cache_hits_total")
    for session in sessions:
        session.turn()
    assert server.counter("vllm:prefix_cache_hits_total") > hits, "their own turns before are there"
    for rank in (0, 1):
        drained = server.http.post(f"/v1/engines/{rank}/drain", json={"timeout_s": 10}).json()
        ranks.append(drained["state"])
        for session in sessions:
            assert session.turn()["finish_reason"] == "stop"
        server.http.post(f"/v1/engines/{rank}/restore")
    assert ranks == ["drained", "drained"]
    for session in sessions:
        session.finish()
    assert group(server, id)["status"] == "complete"


def test_many_at_once_lose_nothing_while_ranks_are_drained(server):
    ids, over = [], threading.Event()

    def drain() -> int:
        number = 0
        while not over.is_set():
            rank = number % 2
            drained = server.http.post(f"/v1/engines/{rank}/drain", json={"timeout_s": 20}).json()
            assert drained["state"] == "drained", drained
            assert server.http.post(f"/v1/engines/{rank}/restore").status_code == 200
            number += 1
        return number

    def play(harness: Harness, number: int) -> None:
        for turn in range(1 + number % 4):
            if is_lost(harness.turn(3 + (number * 7 + turn) % 40)):
                return
        response = harness.http.post(f"/v1/sessions/{harness.session}/finish", json={"void": number % 11 == 0})
        assert response.status_code in (200, 409)

    with ThreadPoolExecutor(48) as pool:
        draining, playing = pool.submit(drain), []
        for first in range(12):
            id, sessions = declared(server, 4, 4)
            ids.append(id)
            playing += [pool.submit(play, session, first + n) for n, session in enumerate(sessions)]
        for each in playing:
            each.result(120)
        over.set()
        assert draining.result(60) > 0
    wait_until(lambda: server.num_in_engine == 0)
    for id in ids:
        found = group(server, id)
        assert (found["status"], len(found["selected"])) == ("complete", 4)
        assert {each["state"] for each in found["sessions"]} <= {"finished", "surplus", "void"}
        of = {each["id"]: each["num_tokens"] for each in found["sessions"]}
        assert found["returned_tokens"] == sum(of[session] for session in found["selected"])


def test_the_server_grades_the_whole_conversation(server):
    """The reward is a regular expression in what follows the first generated token, the tool's words included."""
    said = server.http.post("/detokenize", json={"tokens": [71, 72, 73]}).json()["prompt"]
    assert said
    id, (right, wrong) = declared(server, 2, reward="regex", data={"pattern": re.escape(said)})
    right.turn()
    right.turn()
    wrong.turn()
    told = right.finish()
    assert (told["reward"], told["reward_status"]) == (1.0, "ok")
    assert wrong.finish()["reward"] == 0.0, "the tool spoke after its last turn, and nothing came of it"
    assert {each["reward"] for each in group(server, id)["sessions"]} == {0.0, 1.0}


def test_a_session_of_which_nobody_hears_is_void(server):
    id, (silent, other) = declared(server, 1, 1, idle_timeout_s=0.5)
    silent.turn()
    wait_until(lambda: group(server, id)["status"] != "running")
    found = group(server, id)
    assert (found["status"], found["sessions"][0]["state"], found["sessions"][0]["ended_by"]) == (
        "incomplete",
        "void",
        "idle",
    )
    assert other.ask().status_code == 409


def test_sessions_are_scored_in_the_turn_that_was_said_and_their_rewards_teach(server):
    """A cold head stops nobody; from its rewards on, those whose second turn looks bad stop in it, after 8 tokens."""
    pruning = {"detection_length": 8, "min_labels": 8, "keep_ratio": 0.5}
    seen: list[str] = []
    for _ in range(24):
        id, sessions = declared(server, 4, 4, pruning=pruning, pruning_turn=2, early_stop=False, audit_ratio=0)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda session: session.turn(5), sessions))
            choices = list(pool.map(lambda session: session.turn(60), sessions))
        for session, choice in zip(sessions, choices, strict=True):
            if choice["stop_reason"] == "pruned":
                assert len(choice["token_ids"]) < 20
                assert is_lost(session.turn())
            else:
                session.finish(reward=float(succeeded(choice["token_ids"])))
        found = group(server, id)
        assert found["status"] == "complete"
        seen = [each["state"] for each in found["sessions"]]
        assert seen.count("finished") >= 4
        if "pruned" in seen:
            break
    assert "pruned" in seen
    ends = {each["ended_by"] for each in found["sessions"] if each["state"] == "pruned"}
    assert ends == {"score"}


def test_a_group_may_be_an_audit_in_which_nobody_is_stopped(server):
    id, sessions = declared(server, 2, 6, audit_ratio=1)
    assert len(sessions) == 2
    for session in sessions:
        session.turn()
    sessions[0].finish()
    assert sessions[1].turn()["finish_reason"] == "stop"
    assert sessions[1].finish()["group_status"] == "complete"
    assert len(group(server, id)["selected"]) == 2


def test_when_a_rank_dies_its_turns_fail_and_its_sessions_go_on_elsewhere(server):
    """The last test: the server has one rank afterwards."""
    groups = [declared(server, 1, 1) for _ in range(4)]
    for at, (_, sessions) in enumerate(groups):
        sessions[0].turn(headers={"x-data-parallel-rank": str(at % 2)})
        sessions[1].turn()  # on the same rank
    with ThreadPoolExecutor() as pool:
        running = {id: pool.submit(sessions[0].ask, LONG) for id, sessions in groups}
        for id, sessions in groups:
            wait_until(lambda id=id, name=sessions[0].session: in_turn(server, id, name))
        os.kill(rank_processes(server._process.pid)[1].pid, signal.SIGKILL)
        wait_until(lambda: all(running[id].done() for id, _ in groups[1::2]))
        for _, sessions in groups:
            assert sessions[1].turn()["finish_reason"] == "stop"
            sessions[1].finish()
        statuses = [each.result().status_code for each in running.values()]
    assert statuses[::2] == [200, 200]
    assert set(statuses[1::2]) <= {500, 503}
    for id, sessions in groups:
        assert group(server, id)["selected"] == [sessions[1].session]
        assert is_lost(sessions[0].turn())


def test_an_emulated_policy_asks_for_tools_until_its_last_turn(tiny_model, tmp_path):
    marker = " calls a tool"
    device = {**DEVICE, "turns": {"mean": 3, "marker": marker}, "lengths": {"log_normal": {"mean": 3, "sigma": 1}}}
    command = serve_command(tiny_model, *emulating(tmp_path, device), "--max-model-len", "2048")
    with Server(command, tmp_path / "server.log") as server:

        def play(harness: Harness, seed: int) -> list[str]:
            texts = []
            while not texts or texts[-1].endswith(marker):
                choice = harness.turn(None, seed=seed)
                assert choice["finish_reason"] == "stop"
                texts.append(choice["text"])
            harness.finish(reward=float(succeeded(choice["token_ids"])))
            return texts

        once, again = ([play(harness, seed) for seed, harness in enumerate(declared(server, 12)[1])] for _ in range(2))
    assert once == again
    assert 1 in map(len, once)
    assert max(map(len, once)) > 2


def test_where_all_are_waited_for_the_replay_of_the_simulator_tells_every_token(server):
    """Turns and failing tools of the same conversations; what takes time is the benchmark's."""
    terms = SessionTerms(turns=3, tool_tokens=3, tool_failures=0.3)
    size, redundancy = 3, 1
    courses = [[draw_course(terms, 12, Random(f"{group}/{n}")) for n in range(8)] for group in range(6)]

    async def run(session: AgentSession) -> float:
        prompt, course = [60 + session.prompt] * 40, courses[session.prompt][session.number]
        for number, num_tokens in enumerate(course.turns):
            fields = {"max_tokens": 100, "return_token_ids": True, "vllm_xargs": {"emulate_lengths": num_tokens}}
            answer = await session.complete(prompt, **fields)
            prompt = [*prompt, *answer["choices"][0]["token_ids"], 71, 72, 73]
            if course.fails and number == len(course.turns) - 1:
                raise Void("the tool failed")
        return 1.0

    async def collect() -> list[AgentGroup]:
        async with AsyncRolloutClient(server.url) as client:
            groups = client.agents(range(len(courses)), size, redundancy, run=run, early_stop=False)
            return sorted([each async for each in groups], key=lambda group: group.position)

    plan = GroupPlan(size, redundancy, early_stop=False)
    pools = [[PoolCandidate(sum(c.turns), "stop", sum(c.turns), False, None, None) for c in each] for each in courses]
    races = [SessionGroup("q", plan, its, 40, courses=each) for its, each in zip(pools, courses, strict=True)]
    run_sessions(Machine(), races, terms)
    ran = [
        (group.status, group.generated_tokens, sorted(
            (each.number, each.state == "void", each.num_turns, each.num_tokens)
            for each in (*group.trajectories, *group.others)
        ))
        for group in asyncio.run(collect())
    ]  # fmt: skip
    assert ran == [
        (race.result.status, race.result.generated_tokens, [
            (each.index, each.is_void, each.num_turns, each.num_tokens) for each in race.sessions.sessions.values()
        ])
        for race in races
    ]  # fmt: skip
    assert max(len(each) for _, _, each in ran) > size + redundancy, "some were replaced"


def test_runs_and_their_rewards_reach_one_process_whoever_is_asked(server):
    """Each request is a connection of its own, and the kernel chooses between two processes."""
    terms = {
        "id": "whole",
        "prompts_per_round": 2,
        "group_size": 2,
        "prompt_speculation": 1.0,
        "sampling_params": {"max_tokens": 8},
    }
    made = [server.http.post("/v1/runs", json={**terms, "filter": "zero_variance"}).status_code for _ in range(8)]
    assert made == [201] + [200] * 7
    prompts = [{"id": f"q{i}", "prompt": "What is it?"} for i in range(2)]
    answers, left, id = [], [], None
    for event in server.events("/v1/runs/whole/rounds", prompts=prompts, idempotency_key="k"):
        id = id or event.get("id")
        if event["type"] == "group":
            prompt_id = event["prompt_id"]
            rewards = [{"prompt_id": prompt_id, "index": i, "reward": float(prompt_id == "q1" and i)} for i in range(2)]
            answers.append(server.http.post(f"/v1/rollouts/{id}/rewards", json={"rewards": rewards}).json())
        elif event["type"] == "filtered":
            left.append(event["prompt_id"])
    assert (sorted(answer["filtered"] for answer in answers), left) == ([[], ["q0"]], ["q0"])
    totals = [server.http.get("/v1/runs/whole").json()["totals"]["num_prompts"] for _ in range(8)]
    assert len(set(totals)) == 1


def test_a_feed_of_agents_gives_batches_while_weights_get_names_and_others_are_served(server):
    """Two harnesses, whose requests reach either process, beside ordinary requests. Long ones lose their races."""
    prompts = [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(16)]
    lost: list[str] = []

    async def run(session: AgentSession) -> float:
        prompt = list(range(60, 160))
        try:
            for _ in range(2):
                xargs = {"emulate_lengths": LONG if session.number == 2 else 5}
                answer = await session.complete(prompt, return_token_ids=True, max_tokens=1800, vllm_xargs=xargs)
                prompt += [*answer["choices"][0]["token_ids"], 71, 72, 73]
        except asyncio.CancelledError:
            lost.append(session.id)
            raise
        return float(session.number)

    async def others(client: httpx.AsyncClient, over: asyncio.Event) -> int:
        statuses = []
        while not over.is_set():
            response = await client.post("/v1/completions", json={"prompt": "hi", "n": 2, "max_tokens": 20})
            statuses.append(response.status_code)
        assert set(statuses) == {200}
        return len(statuses)

    async def train() -> None:
        over = asyncio.Event()
        async with (
            asyncio.timeout(WAIT_S),
            httpx.AsyncClient(base_url=server.url, limits=NO_KEEPALIVE, timeout=WAIT_S) as http,
            AsyncRolloutClient(server.url) as client,
            client.feed(
                2, 4, id="agents", redundancy=1, max_staleness=1, on_update="recompute", sessions={"max_turns": 4}
            ) as feed,
            feed.agents(run),
            feed.agents(run),
        ):
            beside = asyncio.create_task(others(http, over))
            await feed.put(prompts)
            seen = []
            async for batch in feed:
                for group in batch.groups:
                    assert [each.num_turns for each in group.trajectories] == [2, 2]
                    assert (batch.version - group.born, batch.max_staleness) <= (1, 1)
                    assert all(sum(each.mask) == its.num_tokens for its in group.trajectories for each in its.segments)
                seen += [group.prompt_id for group in batch.groups]
                body = {"new_version": f"agents-{batch.batch}"}
                (await http.post("/update_weight_version", json=body)).raise_for_status()
            totals = (await feed.refresh()).totals
            over.set()
            assert await beside > 0
            assert (sorted(seen), totals.num_failed, len(lost)) == (sorted(each["id"] for each in prompts), 0, 16)
        (await asyncio.to_thread(server.http.post, "/update_weight_version", json={"new_version": "default"}))

    asyncio.run(train())
