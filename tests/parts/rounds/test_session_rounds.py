"""Rounds whose candidates are sessions, over HTTP: tests are the harness, and end the turns."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_renamed import REMOVED_NAMES
from tests.parts.sessions.test_sessions import begin, play
from tests.support.waiting import WAIT_S
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.rounds.http.answer_events import events_of_answer
from vllm_rollout.parts.rounds.http.body import RoundRequest, RunRequest
from vllm_rollout.parts.rounds.http.live import Begun
from vllm_rollout.parts.rounds.http.stored import EndedGroup
from vllm_rollout.parts.rounds.with_sessions.http import session_round
from vllm_rollout.parts.sessions.http import service as sessions_module
from vllm_rollout.parts.sessions.http.asked import turn_from_xargs
from vllm_rollout.parts.sessions.http.body import FinishRequest
from vllm_rollout.parts.sessions.http.groups import OpenGroup
from vllm_rollout.parts.sessions.http.service import SessionService

TERMS = {"group_size": 2, "prompts_per_round": 2, "prompt_speculation": 1.5, "response_speculation": 1.5}
ROUNDS = "/v1/runs/a/rounds"


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return make_app(FakeEngine(), database=tmp_path / "runs.sqlite")


def prompts(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "prompt": f"question {i}", "data": i} for i in range(first, first + count)]


async def make(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/runs", json={"id": "a", **TERMS, "sessions": {}, **fields})
    assert response.status_code == 201, response.text
    return response.json()


async def look(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/v1/runs/a")).json()


class Round:
    """A stream of a round, read as far as its next wait for somebody."""

    def __init__(self, app: FastAPI, begun: Begun) -> None:
        self.app, self.service, self.live = app, app.state.session_service, begun.live
        self.told: list[dict[str, Any]] = []
        self.groups: dict[str, str] = {}
        """By prompt: its group, the last one that was declared."""
        self._reading = asyncio.create_task(self._read(begun))

    @classmethod
    async def begin(cls, app: FastAPI, **body: Any) -> Round:
        begun = await app.state.run_service.begin("a", RoundRequest.model_validate({"stream": True, **body}))
        assert isinstance(begun, Begun)
        round = cls(app, begun)
        await round.rest()
        return round

    async def _read(self, begun: Begun) -> None:
        async for event in begun.events:
            self.told.append(event.model_dump())
            if event.type == "declared":
                self.groups[event.prompt_id] = event.group_id

    async def rest(self) -> None:
        """Whatever follows from what has happened has."""
        for _ in range(20):
            await asyncio.sleep(0)

    def types(self, *but: str) -> list[str]:
        return [event["type"] for event in self.told if event["type"] not in ("session", *but)]

    async def finish(self, prompt: str, number: int, reward: float | None = 1.0, num_tokens: int = 3) -> None:
        """One turn of a session, which is all that it says."""
        session = f"{self.groups[prompt]}.{number}"
        play(self.service, session, num_tokens=num_tokens)
        await self.end(session, {} if reward is None else {"reward": reward})

    async def end(self, session: str, body: dict[str, Any]) -> None:
        async with http_of(self.app) as http:
            response = await http.post(f"/v1/sessions/{session}/finish", json=body)
        assert response.status_code == 200, response.text
        await self.rest()

    async def complete(self, *prompts: str, rewards: tuple[float | None, ...] = (0.0, 1.0)) -> None:
        for prompt in prompts:
            for number, reward in enumerate(rewards):
                await self.finish(prompt, number, reward)

    async def over(self) -> dict[str, Any]:
        """The last event of the round."""
        await asyncio.wait_for(self._reading, 60)
        assert self.told[-1]["type"] == "done"
        return self.told[-1]

    async def leave_turns(self) -> None:
        """End the turns that were stopped."""
        for group in self.service._groups.values():
            for turn in list(group.running.values()):
                self.service.end(turn, [100, 101], [110], finish_reason="abort")
        await self.rest()

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


async def test_a_short_round_ends_with_the_first_groups_and_stops_the_others(app, http):
    run = await make(http)
    assert (run["num_fresh_prompts"], run["sessions"]["history"], run["defaults"]) == (3, "strict", {})
    round = await Round.begin(app, prompts=prompts(0, 3), idempotency_key="k")
    assert round.types() == ["round", "declared", "declared", "declared"]
    assert [(each["prompt_id"], each["prompt"], len(each["to_begin"])) for each in round.told[1:]] == [
        (f"q{i}", {"id": f"q{i}", "prompt": f"question {i}", "data": i}, 3) for i in range(3)
    ]
    opened = (await look(http))["open_round"]
    assert [each["prompt_id"] for each in opened["groups"]] == ["q0", "q1", "q2"]

    running = begin(round.service, f"{round.groups['q1']}.0")
    await round.complete("q0")
    assert round.told[-1]["type"] == "group"
    assert [each["reward"] for each in round.told[-1]["trajectories"]] == [0.0, 1.0]
    await round.finish("q2", 0)
    play(round.service, f"{round.groups['q2']}.2")
    with pytest.raises(StopIteration):  # it waits for nothing
        round.service.finish(f"{round.groups['q2']}.2", FinishRequest(reward=1.0)).send(None)
    assert running.session.ended_by == "cancel", "in the call that completes the last group"
    late = turn_from_xargs({}, running.session.id, n=1)
    assert round.service.turn(late, None, [100, 101]) is None, "its later turns are answered at once"
    round.service.end(running, [100, 101], [110] * 5, finish_reason="abort")

    done = await round.over()
    assert (done["kind"], done["deferred"], done["unstarted"]) == ("short", ["q1"], [])
    assert (done["generated_tokens"], done["returned_tokens"]) == (4 * 3 + 5, 4 * 3)
    assert round.types()[4:] == ["group", "group", "deferred", "done"]
    run = await look(http)
    assert (run["queue"], run["unstarted"], run["open_round"], run["totals"]["num_returned"]) == (["q1"], [], None, 2)

    answer = (await http.post(ROUNDS, json={"idempotency_key": "k"})).json()
    assert [(group["prompt_id"], group["status"]) for group in answer["groups"]] == [
        ("q0", "complete"), ("q2", "complete"),
    ]  # fmt: skip
    (segment,) = answer["groups"][0]["trajectories"][0]["segments"]
    assert (segment["token_ids"], segment["mask"]) == ([100, 101, 110, 110, 110], [0, 0, 1, 1, 1])
    assert {key: answer[key] for key in done if key != "type"} == {k: v for k, v in done.items() if k != "type"}
    again = (await http.post(ROUNDS, json={"idempotency_key": "k", "stream": True})).text
    events = [json.loads(line.removeprefix("data: ")) for line in again.split("\n") if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["round", "group", "group", "deferred", "done"]
    assert events[-1] == done


async def test_what_nobody_began_is_first_of_the_next_short_round_and_the_queue_runs_in_a_long_one(app, http):
    await make(http, prompt_speculation=2.0)
    round = await Round.begin(app, prompts=prompts(0, 4))
    begin(round.service, f"{round.groups['q2']}.1")
    await round.complete("q0", "q1")
    assert round.types()[5:7] == ["group", "group"]
    assert sorted(round.types()[7:]) == ["deferred", "unstarted"]
    await round.leave_turns()
    done = await round.over()
    assert (done["deferred"], done["unstarted"], done["num_fresh_prompts"]) == (["q2"], ["q3"], 3)

    round = await Round.begin(app, prompts=prompts(4, 3))
    assert list(round.groups) == ["q3", "q4", "q5", "q6"]
    begin(round.service, f"{round.groups['q3']}.1")
    await round.complete("q4", "q5")
    await round.leave_turns()
    await round.over()
    run = await look(http)
    assert (run["next_round"], run["queue"], run["unstarted"]) == ("long", ["q2", "q3"], ["q6"])

    round = await Round.begin(app)
    assert [len(event["to_begin"]) for event in round.told[1:]] == [2, 2], "a long round has nobody to spare"
    await round.complete("q2")
    assert round.types() == ["round", "declared", "declared", "group"]
    await round.complete("q3")
    done = await round.over()
    assert (done["kind"], done["deferred"], done["num_waiting"]) == ("long", [], 1)


async def test_a_group_that_lacks_sessions_is_deferred_by_a_short_round_and_returned_by_a_long_one(app, http):
    await make(http, sessions={"max_sessions": 3})
    round = await Round.begin(app, prompts=prompts(0, 3))
    for number in (0, 1, 2):
        await round.end(f"{round.groups['q1']}.{number}", {"void": True})
    assert (round.told[-1]["type"], round.told[-1]["reason"]) == ("deferred", "incomplete")
    await round.complete("q0", "q2")
    assert (await round.over())["deferred"] == ["q1"]

    round = await Round.begin(app, kind="long", prompts=prompts(3, 1))
    for number in (0, 1, 2):
        await round.end(f"{round.groups['q1']}.{number}", {"void": True})
    wanted = [event["session_id"] for event in round.told if event.get("state") == "wanted"]
    assert wanted == [f"{round.groups['q1']}.2"], "as many more as max_sessions allows"
    group = round.told[-1]
    assert (group["prompt_id"], group["status"], group["trajectories"]) == ("q1", "incomplete", [])
    assert group["prompt"] == prompts(1, 1)[0]
    assert round.live.ended._writing is None, "what is incomplete may run again"
    assert [each["state"] for each in group["sessions"]] == ["void"] * 3
    await round.complete("q3")
    assert (await round.over())["num_waiting"] == 0


async def test_groups_whose_rewards_are_the_same_leave_the_round_for_the_reserve(app, http):
    await make(http, filter="zero_variance", prompt_speculation=1.0)
    round = await Round.begin(app, prompts=prompts(0, 2), reserve=prompts(2, 2))
    assert list(round.groups) == ["q0", "q1"]
    await round.complete("q0", rewards=(1.0, 1.0))
    assert round.types()[-2:] == ["filtered", "declared"]
    await round.complete("q1")
    await round.complete("q2")
    done = await round.over()
    assert (done["filtered"], done["unstarted"], done["returned_tokens"]) == (["q0"], ["q3"], 12)
    assert (await look(http))["totals"]["num_filtered"] == 1


async def test_a_round_waits_for_what_harnesses_say_of_sessions_that_a_limit_has_ended(app, http, monkeypatch):
    monkeypatch.setattr(session_round, "TICK_S", 0.01)
    await make(http, prompts_per_round=1, prompt_speculation=1.0, sessions={"max_turns": 1, "idle_timeout_s": 50})
    now = [0.0]
    app.state.session_service._clock = lambda: now[0]
    for late in (False, True):
        round = await Round.begin(app, prompts=prompts(int(late), 1), idempotency_key=str(late))
        prompt = f"q{int(late)}"
        first, second = (f"{round.groups[prompt]}.{number}" for number in (0, 1))
        play(round.service, first)
        await round.end(first, {"reward": 0.5})
        play(round.service, second)
        await round.rest()
        assert round.types() == ["round", "declared"], "the group is over, and one reward is to come"
        if late:
            now[0] += 51
        else:
            await round.end(second, {"reward": 0.25})
        await round.over()
        answer = (await http.post(ROUNDS, json={"idempotency_key": str(late)})).json()
        rewards = [each["reward"] for each in answer["groups"][0]["trajectories"]]
        assert rewards == [0.5, None if late else 0.25]


async def test_a_round_whose_harness_is_lost_is_interrupted_and_opens_anew_under_its_key(app, http, monkeypatch):
    for module in (session_round, sessions_module):
        monkeypatch.setattr(module, "TICK_S", 0.01)
    await make(http, sessions={"idle_timeout_s": 50})
    now = [0.0]
    app.state.session_service._clock = lambda: now[0]
    asked = asyncio.create_task(http.post(ROUNDS, json={"prompts": prompts(0, 3), "idempotency_key": "k"}))
    async with asyncio.timeout(WAIT_S):
        while not (groups := ((await look(http))["open_round"] or {}).get("groups")):
            await asyncio.sleep(0)
    service: SessionService = app.state.session_service
    play(service, f"{groups[0]['group_id']}.0")
    for _ in range(3):  # one of its groups is heard of, so that the others may wait
        now[0] += 40
        play(service, f"{groups[0]['group_id']}.0", [100, 101, 110, 110, 110, 0][:2])
        await asyncio.sleep(0.05)
    assert (await look(http))["open_round"]["groups"] == groups
    now[0] += 51
    await asyncio.sleep(0.05)
    now[0] += 51
    response = await asyncio.wait_for(asked, 60)
    assert (response.status_code, "for 50 s (idle_timeout_s)" in response.text) == (504, True)
    assert (await look(http))["open_round"]["state"] == "interrupted"
    assert not [group for group in service._groups.values() if not group.race.is_over]

    round = await Round.begin(app, idempotency_key="k")
    assert list(round.groups) == ["q0", "q1", "q2"]
    await round.complete("q0", "q1")
    assert (await round.over())["unstarted"] == ["q2"]


async def test_who_leaves_a_round_stops_its_sessions_and_a_restart_goes_on_with_those_that_were_not_over(
    app, http, tmp_path
):
    await make(http)
    round = await Round.begin(app, prompts=prompts(0, 3), idempotency_key="k")
    await round.complete("q0")
    before = round.told
    running = begin(round.service, f"{round.groups['q1']}.0")
    response = await http.delete(f"/v1/groups/{round.groups['q1']}")
    assert (response.status_code, "belongs to a round" in response.text) == (409, True)
    await round.live.ended.written()
    await round.leave()
    assert (running.session.ended_by, round.service._num_open_sessions) == ("cancel", 0)
    run = await look(http)
    assert (run["open_round"]["state"], run["open_round"]["groups"]) == ("interrupted", [])
    app.state.run_service._store.owner.close()

    after = make_app(FakeEngine(), database=tmp_path / "runs.sqlite")
    async with http_of(after) as http_after:
        assert (await look(http_after))["sessions"] == run["sessions"]
        round = await Round.begin(after, idempotency_key="k")
        assert round.told[1] == next(event for event in before if event["type"] == "group")
        assert list(round.groups) == ["q1", "q2"]
        await round.complete("q2")
        done = await round.over()
        assert (done["unstarted"], done["num_waiting"]) == (["q1"], 1)
        assert (done["generated_tokens"], done["returned_tokens"]) == (12, 12)
        body = (await http_after.post(ROUNDS, json={"idempotency_key": "k"})).content
    later = make_app(FakeEngine(), database=tmp_path / "runs.sqlite")
    async with http_of(later) as http_later:
        assert (await http_later.post(ROUNDS, json={"idempotency_key": "k"})).content == body
    for task in (*after.state.session_service._tasks, *later.state.session_service._tasks):
        task.cancel()


async def test_a_round_that_had_enough_when_it_was_interrupted_is_over_at_once(app, http):
    """The kept state of its first group is that of its second group, too."""
    await make(http, filter="zero_variance")
    round = await Round.begin(app, prompts=prompts(0, 3), idempotency_key="k")
    await round.complete("q0")
    await round.live.ended.written()
    (first,) = (event for event in round.told if event["type"] == "group")
    number = round.live.opened.entries[1].number
    kept = EndedGroup(None, zlib.compress(json.dumps(first).encode()))
    app.state.run_service._store.keep_ended("a", round.live.owner, {number: kept})
    await round.leave()
    round = await Round.begin(app, idempotency_key="k")
    done = await round.over()
    assert round.types() == ["round", "group", "group", "deferred", "done"]
    assert (done["deferred"], done["generated_tokens"], done["returned_tokens"]) == (["q2"], 12, 12)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"sampling_params": {"temperature": 1.0}},
            "sampling_params: cannot be said of a run whose rounds consist of sessions",
        ),
        ({"reward": "math"}, "reward: cannot be said of a run whose rounds consist of sessions"),
        ({"resume": True}, "resume: must be false for sessions"),
        ({"queue_order": "longest"}, "queue_order: must be first_in for sessions"),
        ({"redundancy": "auto", "response_speculation": None}, "redundancy: must be an integer for sessions"),
        ({"sessions": {"reward": "nobody"}}, "nobody"),
        ({"sessions": {"max_sessions": 2}}, "must be at least group_size + redundancy (3), got 2"),
        ({"sessions": {"turns": 4}}, "sessions.turns: is not a field"),
        ({"prompts_per_round": 10_000}, "prompts_per_round: open groups may have 65536 sessions, got 15000 prompts"),
    ],
)
async def test_what_no_round_of_sessions_can_be_is_refused_when_its_run_is_made(http, fields, said):
    response = await http.post("/v1/runs", json={**TERMS, "sessions": {}, **fields})
    assert (response.status_code, said in response.text) == (400, True), response.text


async def test_a_round_of_sessions_says_nothing_of_samples_and_needs_room(app, http, monkeypatch):
    await make(http)
    for field in ({"sampling_params": {"seed": 1}}, {"stream": True, "stream_tokens": 4}):
        response = await http.post(ROUNDS, json={"prompts": prompts(0, 3), **field})
        assert (response.status_code, "consists of sessions" in response.text) == (400, True), response.text
    monkeypatch.setattr(sessions_module, "MAX_OPEN_SESSIONS", 17)
    response = await http.post(ROUNDS, json={"prompts": prompts(0, 3)})
    assert (response.status_code, "retry-after" in response.headers) == (503, True)
    run = await look(http)
    assert (run["open_round"], run["totals"]["num_prompts"]) == (None, 0), "nothing was taken"


async def test_a_run_of_an_earlier_version_is_the_same_run(http):
    await http.post("/v1/runs", json={"id": "a", **TERMS})
    store = http._transport.app.state.run_service._store  # type: ignore[attr-defined]
    assert "sessions" not in store.read("a").settings


IDLE_S = 50.0
ACTIONS = ("begin", "begin", "end", "end", "finish", "finish", "finish", "void", "cut", "wait", "leave")
MAX_ACTIONS = 40
"""Upper bound of a round's random actions. Then the harness behaves as it should."""


class Harness:
    """The harness of one run."""

    def __init__(self, chance: random.Random, **fields: Any) -> None:
        self.chance = chance
        self.app = make_app(FakeEngine())
        self.service, self.runs = self.app.state.session_service, self.app.state.run_service
        self.now_s = 0.0
        self.service._clock = lambda: self.now_s
        self.request = RunRequest.model_validate({"id": "a", "sessions": {"idle_timeout_s": IDLE_S}, **fields})
        self.back: Counter[str] = Counter()

    def groups(self) -> list[OpenGroup]:
        return [group for group in self.service._groups.values() if not group.race.is_over]

    async def run(self, num_prompts: int, reserve: int) -> None:
        await self.runs.create(self.request)
        handed_in = num = 0
        while True:
            run = await self.runs.read("a")
            fresh = min(run.num_fresh_prompts, num_prompts - handed_in)
            is_last = fresh < run.num_fresh_prompts
            if is_last and not (fresh or run.queue or run.unstarted):
                break
            if is_last:
                fresh = min(fresh, run.prompts_per_round)
            body = {
                "prompts": prompts(handed_in, fresh),
                "idempotency_key": str(num),
                "kind": "long" if is_last else None,
            }
            handed_in, num = handed_in + fresh, num + 1
            if reserve and not is_last and handed_in < num_prompts:
                body["reserve"] = prompts(handed_in, 1)
                handed_in += 1
            await self.play(body)
        assert self.back == {f"q{i}": 1 for i in range(handed_in)}
        assert (self.groups(), self.service._num_open_sessions) == ([], 0)

    async def play(self, body: dict[str, Any], num_actions: int = MAX_ACTIONS) -> None:
        round = await Round.begin(self.app, **body)
        opened = (await self.runs.read("a")).open_round
        taken = [] if opened is None else [*opened.prompt_ids, *opened.reserve]
        for _ in range(num_actions):
            if round._reading.done():
                break
            round = await self.act(round, body["idempotency_key"], taken)
        while not round._reading.done():
            for group in self.groups():
                self.serve(group)
            self.now_s += IDLE_S + 1
            await round.rest()
        if isinstance(error := round._reading.exception(), RequestError):
            assert error.status == 504
            assert num_actions, "the harness does what it should"
            await self.play({"idempotency_key": body["idempotency_key"]}, num_actions // 2)
            return
        done, groups = round.told[-1], [each for each in round.told if each["type"] == "group"]
        returned = [group["prompt_id"] for group in groups]
        self.back.update([*returned, *done["filtered"]])
        if done["kind"] == "short":
            assert all(group["status"] == "complete" for group in groups)
            assert len(groups) <= self.request.prompts_per_round
        left = [*done["deferred"], *done["unstarted"]]
        assert len({*returned, *done["filtered"], *left}) == len(returned) + len(done["filtered"]) + len(left)
        assert {*taken} <= {*returned, *done["filtered"], *left}
        totals = (await self.runs.read("a")).totals
        assert totals.num_prompts == totals.num_returned + totals.num_filtered + totals.num_waiting
        assert totals.num_returned + totals.num_filtered == self.back.total()

    def serve(self, group: OpenGroup) -> None:
        """All its sessions have a turn, and finish."""
        for name in list(group.declared):
            session = group.race.sessions.get(name)
            if session is not None and session.in_turn:
                self.service.end(group.running[name], [100], [110], finish_reason="stop")
            if not group.race.is_over and (session is None or session.is_open):
                if session is None or not session.num_turns:
                    turn = begin(self.service, name, [100])
                    self.service.end(turn, [100], [110], finish_reason="stop")
                self.finish(name, float(name[-1] in "02468"))

    def finish(self, name: str, reward: float | None, *, void: bool = False) -> None:
        finished = asyncio.ensure_future(self.service.finish(name, FinishRequest(reward=reward, void=void)))
        finished.add_done_callback(lambda done: done.exception())

    async def act(self, round: Round, key: str, taken: list[str]) -> Round:
        action = self.chance.choice(ACTIONS)
        groups = [group for group in self.service._groups.values() if group.declared]
        if action == "leave":
            await round.leave()
            assert (await self.runs.read("a")).open_round is None or not self.groups()
            if round._reading.cancelled():
                again = await self.runs.begin("a", RoundRequest(stream=True, idempotency_key=key))
                if isinstance(again, Begun):
                    round = Round(self.app, again)
                    await round.rest()
                    assert round.types()[0] == "round"
                else:  # it was over, and was being written when its client left
                    await self.read_again(round, again)
        elif action == "wait":
            self.now_s += self.chance.choice([1.0, IDLE_S, 2 * IDLE_S])
        elif groups:
            group = self.chance.choice(groups[-6:])
            name = self.chance.choice(group.declared)
            running = group.running.get(name)
            if action in ("end", "cut") and running is not None:
                self.service.end(running, [100], [110], finish_reason="length" if action == "cut" else "stop")
            elif action == "begin" and running is None and not (group.race.sessions.get(name) or _New).num_turns:
                with suppress(RequestError):  # its group has given it up
                    begin(self.service, name, [100])
            elif action in ("finish", "void"):
                reward = None if action == "void" else self.chance.choice([0.0, 1.0, None])
                self.finish(name, reward, void=action == "void")
        await round.rest()
        return round

    async def read_again(self, round: Round, answer: bytes) -> None:
        """Read a round that is over, as a client that repeats its key."""

        async def read() -> None:
            round.told = [event.model_dump() async for event in events_of_answer(answer)]

        round._reading = asyncio.create_task(read())
        await asyncio.wait([round._reading])


class _New:
    num_turns = 0


@pytest.mark.thorough
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),  # of all choices
    num_prompts=st.integers(1, 8),
    filters=st.booleans(),
    speculation=st.sampled_from([1.0, 1.5, 2.0]),
    prompts_per_round=st.integers(1, 3),
)
def test_every_prompt_comes_back_once_whatever_its_sessions_do(
    seed, num_prompts, filters, speculation, prompts_per_round
):
    with pytest.MonkeyPatch.context() as patch:
        for module in (session_round, sessions_module):
            patch.setattr(module, "TICK_S", 0)
        patch.setattr(session_round, "SEE_OUT_S", 0.5)
        harness = Harness(
            random.Random(seed),
            group_size=2,
            prompts_per_round=prompts_per_round,
            prompt_speculation=speculation,
            response_speculation=1.5,
            filter="zero_variance" if filters else None,
        )

        async def bounded() -> None:
            await harness.run(num_prompts, int(filters))
            for task in harness.service._tasks:
                task.cancel()

        asyncio.run(bounded())


@REMOVED_NAMES
async def test_a_run_refuses_a_removed_field_of_its_sessions(http: httpx.AsyncClient, removed: str) -> None:
    body = {"group_size": 2, "prompts_per_round": 2, "sessions": {removed: "variance"}}
    response = await http.post("/v1/runs", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, f"sessions.{removed}")


async def test_trajectories_that_a_round_has_not_returned_do_not_give_way_to_others(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("vllm_rollout.parts.sessions.http.service.MAX_SESSION_HISTORY", 60)
    app = make_app(FakeEngine(), database=tmp_path / "runs.sqlite")
    async with http_of(app) as http:
        await make(http, sessions={"max_turns": 1})
        playing = await Round.begin(app, prompts=prompts(0, 3), idempotency_key="k")
        for number in (0, 1):  # over by their last turns, and their harness still computes the rewards
            play(playing.service, f"{playing.groups['q0']}.{number}", num_tokens=3)
        await playing.rest()
        play(playing.service, f"{playing.groups['q1']}.0", num_tokens=55)
        await playing.rest()
        for number in (0, 1):
            await playing.end(f"{playing.groups['q0']}.{number}", {"reward": float(number)})
        (returned,) = [each for each in playing.told if each["type"] == "group"]
        assert [(each["reward"], len(each["turns"])) for each in returned["trajectories"]] == [(0.0, 1), (1.0, 1)]
        assert all(each["segments"] for each in returned["trajectories"])
        await playing.leave()
