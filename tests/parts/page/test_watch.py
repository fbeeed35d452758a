"""Events for viewers: they agree with the file, follow running rollouts, and cost nothing without viewers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.kernel.http.conftest import http_of, make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.moving.fakes import FakeMoves
from tests.parts.page.fakes import FakePage
from tests.support.waiting import eventually
from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.http.engine import PreparedPrompt
from vllm_rollout.kernel.http.plan_port import GroupRecord
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.moving.rules.load import RankState, RunningGroup
from vllm_rollout.parts.page.calls import LAST_TOKENS
from vllm_rollout.parts.page.http import viewers
from vllm_rollout.parts.page.http.plan import PagePlan
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.page.http.viewers import MAX_BEHIND, Viewer, Viewers
from vllm_rollout.parts.page.http.watched import SeenGroup, WatchedRollout
from vllm_rollout.parts.page.recording.rows import RolloutRow
from vllm_rollout.parts.sessions.with_page.http.seen import SeenSessions

Event = tuple[str, Any]


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "TICK_S", 0.01)


def viewers_of(app: FastAPI) -> Viewers:
    return app.state.rollout_service.part(PagePlan).viewers


def body(*ids: str, **fields: Any) -> dict[str, Any]:
    prompts = [{"id": id, "prompt": f"prompt {id}"} for id in ids]
    return {"prompts": prompts, "group_size": 2, "redundancy": 2, "sampling_params": {"max_tokens": 30}, **fields}


class Watching:
    """A viewer, and all that it was told."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.told: list[Event] = []

    async def until(self, is_it: Callable[[str, Any], bool]) -> Any:
        """The next event for which `is_it` is true."""
        name = ""
        async with asyncio.timeout(30):
            async for line in self._lines:
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.told.append((name, json.loads(line.removeprefix("data: "))))
                    if is_it(*self.told[-1]):
                        return self.told[-1][1]
        raise AssertionError("the feed has an end")

    def all(self, name: str) -> list[Any]:
        return [data for its, data in self.told if its == name]


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[Watching]:
    async with httpx.AsyncClient(base_url=url) as http, http.stream("GET", "/v1/rollouts/watch") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Watching(answer.aiter_lines())


def is_over(name: str, data: Any) -> bool:
    return name == "rollout" and data["state"] != "running"


async def test_a_viewer_sees_groups_begin_run_and_end_and_at_last_what_the_file_has(engine: FakeEngine, tmp_path: Path):
    engine.step_s, engine.lengths = 0.02, {0: 40, 1: 5, 2: 38, 3: 30}
    path = tmp_path / "trace.jsonl"
    with serving(make_app(engine, recorder=TraceRecorder(path))) as url:
        async with watching(url) as viewer, httpx.AsyncClient(base_url=url, timeout=30) as http:
            server = await viewer.until(lambda name, _: name == "server")
            assert (server["num_ranks"], server["live"]) == (1, True)
            answer = (await http.post("/v1/rollouts", json=body("a", "b"))).json()
            row = await viewer.until(is_over)
            async with watching(url) as later:  # it is told what is over, too
                assert await later.until(is_over) == row
    assert [data["state"] for data in viewer.all("rollout")] == ["running", "over"]
    assert viewer.all("rollout")[0]["prompts"] == []
    told = [group["prompt"]["status"] for group in viewer.all("group")]
    assert told.count("complete") <= 2, "each once, but for those that ended as their rollout did: its row has them"
    ended = row["prompts"][0]["ended_s"]
    assert 0.05 < ended[1] < ended[3] <= row["prompts"][0]["over_s"] <= row["seconds"]
    ends = [group["prompt"]["ends"] for group in viewer.all("group") if group["position"] == 0]
    assert ends[0] == ["running"] * 4
    assert ["running", "stop", "running", "running"] in ends
    assert row["prompts"][0]["ends"] == ["surplus", "stop", "surplus", "stop"]
    (line,) = path.read_text().splitlines()
    assert RolloutRow.model_validate(row) == RolloutRow.model_validate_json(line)
    assert (row["rollout_id"], row["num_candidates"]) == (answer["id"], 8)
    assert row["prompts"][0]["selected"] == [1, 3]
    assert {"rank": 0, "state": "active"}.items() <= viewer.all("ranks")[-1]["ranks"][0].items()


async def test_the_engine_is_asked_only_while_somebody_looks(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []
    states = engine.part(FakeMoves).rank_states

    async def counted() -> list[RankState]:
        asked.append(asyncio.get_running_loop().time())
        return await states()

    monkeypatch.setattr(FakeMoves, "rank_states", lambda self: counted())
    app = make_app(engine)
    with serving(app) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            await http.post("/v1/rollouts", json=body("a"))
        before = len(asked)  # once, for a gauge
        await asyncio.sleep(0.1)
        assert len(asked) == before
        async with watching(url) as one, watching(url) as two:
            for viewer in (one, two, one, two):
                await viewer.until(lambda name, _: name == "ranks")
        await eventually(lambda: not viewers_of(app)._viewers, every_s=0.01)
        num_asked = len(asked)
        await asyncio.sleep(0.1)
        assert before < len(asked) == num_asked


async def test_viewers_are_told_also_while_the_engine_says_nothing(engine, monkeypatch, caplog):
    async def fails(self: Any) -> list[RankState]:
        raise ZeroDivisionError

    monkeypatch.setattr(FakeMoves, "rank_states", fails)
    with serving(make_app(engine)) as url:
        async with watching(url) as viewer:
            for _ in range(2):
                assert (await viewer.until(lambda name, _: name == "ranks"))["ranks"] == []
    assert "the page failed" in caplog.text


async def test_viewers_are_told_on_after_a_tick_that_failed(engine, monkeypatch):
    changes, num_failed = SeenSessions.changes, 0

    def fails_at_first(self: SeenSessions) -> list[bytes]:
        nonlocal num_failed
        num_failed += 1
        if num_failed < 3:
            raise ZeroDivisionError
        return changes(self)

    monkeypatch.setattr(SeenSessions, "changes", fails_at_first)
    with serving(make_app(engine)) as url:
        async with watching(url) as viewer:
            await viewer.until(lambda name, _: name == "ranks" and num_failed > 3)


async def test_a_client_that_leaves_and_a_rank_that_dies_are_seen(engine: FakeEngine):
    engine.step_s, engine.losses = 0.01, {"a": 3}
    with serving(make_app(engine)) as url:
        async with watching(url) as viewer, httpx.AsyncClient(base_url=url) as http:
            await http.post("/v1/rollouts", json=body("a", on_engine_failure="retry"))
            row = await viewer.until(is_over)
            assert (row["prompts"][0]["status"], len(row["prompts"][0]["lengths"])) == ("complete", 4)
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/v1/rollouts", json=body("b", sampling_params={"min_tokens": 4000}), timeout=0.2)
            assert (await viewer.until(is_over))["state"] == "left"


async def test_texts_are_there_while_it_runs_and_if_somebody_looked_at_its_end(engine: FakeEngine, app: FastAPI):
    engine.step_s = 0.005
    with serving(app) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            unseen = (await http.post("/v1/rollouts", json=body("a"))).json()
            assert (await http.get(f"/v1/rollouts/watch/{unseen['id']}/0")).status_code == 404
            async with watching(url) as viewer:
                await viewer.until(lambda name, _: name == "server")
                answer = (await http.post("/v1/rollouts", json=body("a", include=["text", "logprobs"]))).json()
                await viewer.until(is_over)
            told = (await http.get(f"/v1/rollouts/watch/{answer['id']}/0")).json()
            assert (await http.get(f"/v1/rollouts/watch/{answer['id']}/1")).status_code == 404
    (group,) = answer["groups"]
    assert told["prompt_id"] == "a"
    assert {c["index"]: c["text"] for c in told["candidates"] if c["selected"]} == {
        t["index"]: t["text"] for t in group["trajectories"]
    }
    assert {c["end"] for c in told["candidates"] if not c["selected"]} == {"surplus"}


async def test_what_runs_tells_its_last_tokens_until_it_ends(
    engine: FakeEngine, app: FastAPI, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(viewers, "TICK_S", 0.001)  # for so long readers share what the engine said
    engine.step_s, engine.part(FakePage).most_last_tokens = 0.005, 3
    engine.lengths = {0: 2, 1: 400, 2: 400, 3: 400}
    with serving(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http, watching(url) as viewer:
            await viewer.until(lambda name, _: name == "server")
            asked = body("a", sampling_params={"max_tokens": 400}, include=["text", "logprobs"])
            answering = asyncio.create_task(http.post("/v1/rollouts", json=asked))
            row = await viewer.until(lambda name, data: name == "group" and data["prompt"]["ends"][0] == "stop")
            path = f"/v1/rollouts/watch/{row['rollout_id']}/0"
            first, later = [(await http.get(path)).json()["candidates"] for _ in range(2)]
            await asyncio.sleep(0.01)
            engine.dead = True
            unheard = (await http.get(path)).json()["candidates"]
            engine.dead = False
            (group,) = (await answering).json()["groups"]
            last = (await http.get(path)).json()["candidates"]
    whole = {t["index"]: t["text"] for t in group["trajectories"]}
    for told in (first, later):
        assert [(c["index"], c["end"]) for c in told] == [(0, "stop"), *[(i, "running") for i in (1, 2, 3)]]
        for candidate in told:
            words = whole[candidate["index"]].split() if candidate["index"] in whole else None
            start, num = candidate["offset"], candidate["num_tokens"]
            assert len(candidate["text"].split()) == num - start <= 3
            assert words is None or candidate["text"].split() == words[start:num]
    assert later[1]["num_tokens"] >= first[1]["num_tokens"] > 0
    assert [c["index"] for c in unheard] == [0]
    assert "running" not in {c["end"] for c in last}


async def test_who_comes_later_is_not_told_what_nobody_was_told_in_time(app: FastAPI):
    """A rollout that began in the last moment of a viewer, and ended unseen, does not run for the next one."""
    async with http_of(app) as http:
        feed = viewers_of(app).feed()
        await anext(feed)
        posting = asyncio.create_task(http.post("/v1/rollouts", json=body("a")))
        await eventually(lambda: viewers_of(app)._running)
        await feed.aclose()
        await posting
        feed = viewers_of(app).feed()
        told = await anext(feed) + await anext(feed)
        await feed.aclose()
    states = [json.loads(line[6:])["state"] for line in told.split(b"\n") if line.startswith(b'data: {"rollout_id"')]
    assert states == ["over"]


async def test_who_reads_a_running_group_in_the_same_tick_shares_one_question(
    engine: FakeEngine, app: FastAPI, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []
    may_answer, call_all = threading.Event(), FakeEngine.call_all  # the server has a thread and a loop of its own

    async def slow(engine: FakeEngine, operation: Operation[Any, Any], argument: Any) -> list[Any]:
        if operation is LAST_TOKENS:
            asked.append(argument)
            await eventually(may_answer.is_set, every_s=0.001)
        return await call_all(engine, operation, argument)

    num_reading, texts = 0, viewers.Viewers.texts

    async def counted(its: viewers.Viewers, *args: Any) -> Any:
        nonlocal num_reading
        num_reading += 1
        return await texts(its, *args)

    monkeypatch.setattr(viewers.Viewers, "texts", counted)
    monkeypatch.setattr(FakeEngine, "call_all", slow)
    monkeypatch.setattr(viewers, "TICK_S", 0.05)
    engine.step_s, engine.lengths = 0.005, dict.fromkeys(range(4), 2000)
    with serving(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http, watching(url) as viewer:
            await viewer.until(lambda name, _: name == "server")
            answering = asyncio.create_task(
                http.post("/v1/rollouts", json=body("a", sampling_params={"max_tokens": 2000}))
            )
            row = await viewer.until(lambda name, _: name == "group")
            path = f"/v1/rollouts/watch/{row['rollout_id']}/0"
            leaves, *stay = [asyncio.create_task(http.get(path)) for _ in range(4)]
            await eventually(lambda: asked and num_reading == 4, every_s=0.001)
            leaves.cancel()
            may_answer.set()
            told = [(await reader).json()["candidates"] for reader in stay]
            assert (len(asked), [len(candidates) for candidates in told]) == (1, [4, 4, 4])
            await eventually(lambda: not viewers_of(app)._read, every_s=0.001)
            await http.get(path)
            assert len(asked) == 2
            await answering


async def test_the_text_of_an_ended_candidate_is_made_once(
    engine: FakeEngine, app: FastAPI, monkeypatch: pytest.MonkeyPatch
):
    made: list[bool] = []
    """Texts of candidates. True for one that has ended."""
    prompts: list[PreparedPrompt] = []
    text_of, prompt_text = FakeEngine.text_of, FakeEngine.prompt_text

    def counted(its: FakeEngine, prompt: PreparedPrompt, token_ids: Any, *, stopped: bool) -> str:
        made.append(stopped)
        return text_of(its, prompt, token_ids, stopped=stopped)

    def counted_prompt(its: FakeEngine, prompt: PreparedPrompt) -> str:
        prompts.append(prompt)
        return prompt_text(its, prompt)

    monkeypatch.setattr(FakeEngine, "text_of", counted)
    monkeypatch.setattr(FakeEngine, "prompt_text", counted_prompt)
    monkeypatch.setattr(viewers, "TICK_S", 0.001)
    engine.step_s, engine.lengths = 0.005, {0: 2, 1: 400, 2: 400, 3: 400}
    with serving(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http, watching(url) as viewer:
            await viewer.until(lambda name, _: name == "server")
            answering = asyncio.create_task(
                http.post("/v1/rollouts", json=body("a", sampling_params={"max_tokens": 400}))
            )
            row = await viewer.until(lambda name, data: name == "group" and data["prompt"]["ends"][0] == "stop")
            path = f"/v1/rollouts/watch/{row['rollout_id']}/0"
            looks = []
            for _ in range(3):
                looks.append((await http.get(path)).json())
                await asyncio.sleep(0.01)
            assert len({look["candidates"][0]["text"] for look in looks}) == 1
            assert made.count(True) == 1
            await answering
            before = len(made)
            last = [(await http.get(path)).json() for _ in range(2)]
    assert last[0] == last[1]
    assert len(made) == before + 3
    assert len(prompts) == 1


async def test_a_candidate_that_ends_again_has_its_new_text(
    engine: FakeEngine, app: FastAPI, monkeypatch: pytest.MonkeyPatch
):
    async with http_of(app) as http:
        feed = viewers_of(app).feed()
        await anext(feed)
        id = (await http.post("/v1/rollouts", json=body("a"))).json()["id"]
        path = f"/v1/rollouts/watch/{id}/0"
        before = (await http.get(path)).json()["candidates"][1]["text"]
        group = viewers_of(app)._with_text[id].groups[0]
        end = group.record.ends[1]
        group.record.ends[1] = replace(end, token_ids=end.token_ids[:1], text=None)
        assert (await http.get(path)).json()["candidates"][1]["text"] != before
        assert group.texts
        group.begin_again()
        assert not group.texts
        await feed.aclose()


async def test_texts_of_long_rollouts_are_not_kept(app: FastAPI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    engine.lengths = dict.fromkeys(range(4), 25)
    monkeypatch.setattr(viewers, "MAX_TOKENS_WITH_TEXT", 250)
    with serving(app) as url:
        async with httpx.AsyncClient(base_url=url) as http, watching(url) as viewer:
            await viewer.until(lambda name, _: name == "server")
            ids = [(await http.post("/v1/rollouts", json=body("a"))).json()["id"] for _ in range(3)]
            ids.append((await http.post("/v1/rollouts", json=body("a", "b", "c"))).json()["id"])
            told = [(await http.get(f"/v1/rollouts/watch/{id}/0")).status_code for id in ids[:3]]
            assert told == [404, 404, 404]
            assert (await http.get(f"/v1/rollouts/watch/{ids[3]}/0")).status_code == 404
            small = [(await http.post("/v1/rollouts", json=body("a"))).json()["id"] for _ in range(3)]
            told = [(await http.get(f"/v1/rollouts/watch/{id}/0")).status_code for id in small]
            assert told == [404, 200, 200]


async def test_what_is_over_is_bounded(app: FastAPI, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(viewers, "MAX_OVER", 2)
    async with http_of(app) as http:
        ids = [(await http.post("/v1/rollouts", json=body("a"))).json()["id"] for _ in range(3)]
        feed = viewers_of(app).feed()
        everything = await anext(feed)
        assert [id.encode() in everything for id in ids] == [False, True, True]
        await http.post("/v1/rollouts", json=body("a"))
        tick = b""
        while b"event: gone" not in tick:
            tick = await anext(feed)
        assert ids[1].encode() in tick
        await feed.aclose()


async def test_files_of_the_page_are_guarded_and_nothing_else_is_served(app: FastAPI):
    paths = [
        "/rollouts", "/rollouts/assets/main.js", "/rollouts/assets/../page.py", "/rollouts/assets/%2e%2e/page.py",
        "/rollouts/assets/", "/rollouts/assets/vendor", "/rollouts/assets//etc/passwd",
        f"/rollouts/assets/{'a' * 5000}", "/rollouts/assets/a%00b",
    ]  # fmt: skip
    async with http_of(app) as http:
        page, script, *others = [await http.get(path) for path in paths]
        app.state.rollout_page = False
        off = [await http.get(path) for path in (*paths[:2], "/v1/rollouts/watch", "/v1/rollouts/watch/a/0")]
    kinds = [answer.headers["content-type"] for answer in (page, script)]
    assert kinds == ["text/html; charset=utf-8", "text/javascript; charset=utf-8"]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert [answer.status_code for answer in (*others, *off)] == [404] * 11
    assert "--enable-rollout-page" in off[2].text


async def test_too_many_viewers_are_refused(app: FastAPI, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(viewers, "MAX_VIEWERS", 0)
    async with http_of(app) as http:
        answer = await http.get("/v1/rollouts/watch")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")


async def test_a_slow_viewer_is_told_everything_anew_instead_of_what_it_missed():
    viewer = Viewer()
    viewer.tell(b"missed")
    viewer.begin_again()
    viewer.tell(b"0")
    assert (await viewer.next(), viewer.is_behind) == (b"0", False)
    for number in range(MAX_BEHIND + 1):
        viewer.tell(b"%d" % number)
    assert viewer.is_behind
    viewer.begin_again()
    viewer.tell(b"new")
    assert await viewer.next() == b"new"


def test_a_group_that_runs_grows_moves_and_begins_again():
    rollout = WatchedRollout(None)
    prompt = PreparedPrompt("q", range(5), None)
    group = SeenGroup(rollout, GroupRecord(3, "r-3", prompt, GroupPlan(3), rollout.now(), None, None), "")
    rollout.groups[3] = group
    running = RunningGroup("r-3", 5, [7, 8, 9], 100)
    group.runs(0, running.num_tokens)
    assert (group.row().lengths, group.row().moves, rollout.changed) == ([7, 8, 9], None, {3})
    group.candidates[1].end = "stop"
    group.runs(2, [17, 19])
    assert (group.row().lengths, group.rank) == ([17, 8, 19], 2)
    assert [rank for _, rank in group.moves] == [0, 2]
    assert group.moves[0][0] == group.record.started_s <= group.moves[1][0]
    for rank in range(3, 40):
        group.runs(rank, [])
    assert (len(group.moves), group.rank) == (16, 39)
    assert rollout.rows() == [group.row()]
    assert rollout.rows(running=False) == []
    group.over("complete", None, (1,))
    assert rollout.rows(running=False) == [group.row()]
    group.begin_again()
    assert (group.row().lengths, group.row().ends) == ([0, 0, 0], ["running"] * 3)


async def test_a_viewer_that_leaves_in_the_moment_in_which_a_tick_comes_is_gone():
    """`asyncio.wait_for` of Python 3.11 forgot that, and the place of the viewer was never given back."""
    viewer = Viewer()
    viewer.begin_again()
    reading = asyncio.create_task(viewer.next())
    await asyncio.sleep(0.01)
    viewer.tell(b"tick")
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
