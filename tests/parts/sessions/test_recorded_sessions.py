"""Viewers' events about groups of sessions, and the rows that `--rollout-record` writes about them."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.page.browser import HOSTILE
from tests.parts.page.test_watch import watching
from tests.parts.sessions.test_sessions import PROMPT, begin, declared, play
from vllm_rollout.parts.page.http import viewers
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.page.recording import file as trace_file
from vllm_rollout.parts.page.recording.file import parse_row
from vllm_rollout.parts.page.recording.session_rows import (
    SessionGroupRow,
    SessionRewardRow,
    TurnRow,
    add_session_rewards,
)
from vllm_rollout.parts.sessions.http.service import SessionService
from vllm_rollout.parts.sessions.with_page.http import seen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def app(path: Path) -> FastAPI:
    return make_app(FakeEngine(), recorder=TraceRecorder(path))


def rows_of(path: Path) -> list[Any]:
    return [parse_row(line) for line in path.read_text().splitlines()]


async def finish(http: httpx.AsyncClient, session: str, **body: Any) -> None:
    assert (await http.post(f"/v1/sessions/{session}/finish", json=body)).status_code == 200


async def test_a_group_that_is_over_is_one_row_with_all_that_became_of_it(service, http, clock, path):
    options = {"max_turns": 9, "max_tokens": 500, "selection": "shortest", "early_stop": True}
    group = await declared(http, id="mine", redundancy=2, **options)
    winner, amid, void = group["to_begin"]
    clock.now = 101.0
    turn = begin(service, winner)
    clock.now = 103.5
    service.end(turn, PROMPT, [110] * 7, finish_reason="stop", num_cached_tokens=1)
    clock.now = 104.0
    play(service, winner, [*PROMPT, *[110] * 7, 111, 112], 2)
    await finish(http, void, void=True)
    losing = begin(service, amid)
    losing.group.rank = 1
    clock.now = 106.0
    await finish(http, winner, reward=0.5)
    assert path.read_text() == "", "a turn of it still stops"
    clock.now = 106.25
    service.end(losing, PROMPT, [110] * 4, finish_reason="abort")
    (row,) = rows_of(path)
    assert isinstance(row, SessionGroupRow)
    assert (row.id, row.status, row.seconds, row.rank, row.selected) == ("mine", "complete", 6.0, 1, [0])
    assert (row.group_size, row.num_candidates, row.max_sessions, row.max_turns, row.max_tokens) == (1, 3, 6, 9, 500)
    assert (row.selection, row.early_stop, row.num_to_begin) == ("shortest", True, 0)
    told = [(each.id, each.state, each.ended_by, each.num_tokens, each.ended_s, each.reward) for each in row.sessions]
    assert told == [
        (winner, "finished", "finish", 9, 6.0, 0.5),
        (void, "void", "finish", 0, 4.0, None),
        (amid, "surplus", "race", 4, 6.0, None),
    ]
    first, nothing, lost = (each.turns for each in row.sessions)
    assert first == [TurnRow(1.0, 3.5, 7, 2, 1, "first"), TurnRow(4.0, 4.0, 2, 11, None, "extended")]
    assert (nothing, lost) == ([], [TurnRow(4.0, 6.25, 4, 2, None, "first")])
    assert row.sessions[0].gaps_s == [0.5]
    assert (row.name, row.began) == (losing.group.engine_id, losing.group.began)
    (live,) = seen_of(service).rows()
    assert SessionGroupRow.model_validate(live) == row, "viewers are told the same"
    assert SessionGroupRow.model_validate({**live, "until": "complete"}) == row, "as earlier versions wrote it"
    assert "token_ids" not in path.read_text()


async def test_what_no_viewer_is_told_any_more_is_recorded_with_all_its_turns(service, http, path, monkeypatch):
    monkeypatch.setattr(seen, "MAX_SEEN_GROUPS", 1)
    monkeypatch.setattr(seen, "MAX_SEEN_TURNS", 2)
    group = await declared(http)
    (id,) = group["to_begin"]
    for turn in range(5):
        play(service, id, [*PROMPT, *[110, 111] * turn], 2)
    (seen_session,) = only(service)["sessions"]
    assert (seen_session["num_turns"], seen_session["num_tokens"], len(seen_session["turns"])) == (5, 10, 2)
    await declared(http)
    await finish(http, id)
    ((session,),) = (row.sessions for row in rows_of(path))
    assert (session.num_turns, session.num_tokens, len(session.turns)) == (5, 10, 5)


async def test_a_reward_that_comes_after_the_end_is_a_row_of_its_own(service, http, path):
    group = await declared(http, redundancy=1)
    first, second = group["to_begin"]
    play(service, second)
    play(service, first, rollout_last=True)
    await finish(http, first, reward=0.25)
    await finish(http, second)  # it has lost, and says nothing
    row, reward = rows_of(path)
    assert [session.reward for session in row.sessions] == [None, None]
    assert isinstance(reward, SessionRewardRow)
    assert [session.reward for session in add_session_rewards(row, [reward]).sessions] == [None, 0.25]


async def test_a_group_that_is_deleted_is_recorded_when_the_last_of_its_turns_has_stopped(service, http, path):
    group = await declared(http, redundancy=2)
    one, two, _ = group["to_begin"]
    play(service, one)
    turns = [begin(service, two)]
    turns.append(begin(service, one, [*PROMPT, *[110] * 3, 111]))
    await http.delete(f"/v1/groups/{group['id']}")
    again = await declared(http, id=group["id"])  # another one may have its name at once
    service.end(turns[0], PROMPT, [110], finish_reason="abort")
    assert path.read_text() == ""
    service.leave(turns[1])  # its client went away
    (row,) = rows_of(path)
    assert (row.status, row.reason, row.num_to_begin) == ("deferred", "it was cancelled", 0)
    assert [(each.state, each.num_tokens, len(each.turns)) for each in row.sessions] == [
        ("deferred", 3, 1),
        ("deferred", 1, 1),
    ]
    assert service._num_held_tokens == 0
    await http.delete(f"/v1/groups/{again['id']}")
    assert len(rows_of(path)) == 1, "of a group in which nothing ran there is nothing to tell"


async def test_a_full_disk_stops_no_session_and_rewards_of_what_is_missing_are_left_out(
    service, http, path, caplog, monkeypatch
):
    room = 0

    def write(file: FileIO, data: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return os.write(file.fileno(), data[:room])

    monkeypatch.setattr(trace_file, "write_some", write)
    for room in (0, 50):
        group = await declared(http)
        play(service, group["to_begin"][0], rollout_last=True)
        await finish(http, group["to_begin"][0], reward=float(room))
    assert [type(row) for row in rows_of(path)] == [SessionGroupRow, SessionRewardRow]
    assert rows_of(path)[1].rewards[0].reward == 50
    assert [part in caplog.text for part in ("No space left", "goes on; 1 rows are missing")] == [True, True]


@pytest.mark.parametrize("word", [word[:200] for word in HOSTILE])
async def test_names_may_be_anything(service, http, path, word):
    xargs = {"rollout_group_id": word, "rollout_group_size": 1}
    play(service, f"{word} ", **xargs)
    play(service, f"{word} ", [*PROMPT, 110, 110, 110, 111], rollout_last=True)
    (row,) = rows_of(path)
    assert (row.id, row.sessions[0].id, len(row.sessions[0].turns)) == (word, f"{word} ", 2)


def seen_of(service: SessionService) -> seen.SeenSessions:
    observer = service._observers[0]
    assert isinstance(observer, seen.SeenSessions)
    return observer


def only(service: SessionService) -> dict[str, Any]:
    """The only group that has changed."""
    (row,), gone = seen_of(service).news()
    assert gone == []
    return row


async def test_a_group_is_told_with_the_times_of_its_turns(service, http, clock):
    group = await declared(http, group_size=1, redundancy=1)
    row = only(service)
    assert (row["id"], row["status"], row["sessions"], row["num_to_begin"]) == (group["id"], "running", [], 2)
    winner, _ = group["to_begin"]
    clock.now = 101.0
    turn = begin(service, winner)
    (session,) = only(service)["sessions"]
    assert (session["id"], session["state"], session["turns"]) == (winner, "turn", [TurnRow(1.0)])
    clock.now = 103.5
    service.end(turn, PROMPT, [110] * 7, finish_reason="stop")
    (session,) = only(service)["sessions"]
    assert (session["state"], session["turns"], session["num_tokens"]) == (
        "between_turns",
        [(1.0, 3.5, 7, 2, None, "first")],
        7,
    )
    assert seen_of(service).news() == ([], [])
    assert [row["id"] for row in seen_of(service).rows()] == [group["id"]]


async def test_a_turn_that_came_to_no_end_is_not_told(service, http):
    group = await declared(http)
    turn = begin(service, group["to_begin"][0])
    only(service)
    service.leave(turn)
    (session,) = only(service)["sessions"]
    assert (session["state"], session["turns"]) == ("between_turns", [])


async def test_a_group_that_was_cancelled_and_forgotten_is_told_as_over(service, http):
    group = await declared(http)
    play(service, group["to_begin"][0])
    await http.delete(f"/v1/groups/{group['id']}")
    row = only(service)
    assert (row["status"], row["reason"], row["sessions"][0]["state"]) == ("deferred", "it was cancelled", "deferred")


@pytest.mark.parametrize(("bound", "most"), [("MAX_SEEN_GROUPS", 3), ("MAX_SEEN_SESSIONS", 6)])
async def test_groups_that_are_over_give_way_first(service, http, monkeypatch, bound, most):
    monkeypatch.setattr(seen, bound, most)
    groups = [await declared(http, group_size=1, id=f"g{i}") for i in range(3)]  # each may have two sessions
    play(service, groups[1]["to_begin"][0])
    await http.post(f"/v1/sessions/{groups[1]['to_begin'][0]}/finish", json={})
    names = {row["id"]: row["name"] for row in seen_of(service).news()[0]}
    await declared(http, id="g3")
    rows, gone = seen_of(service).news()
    assert ([row["id"] for row in rows], gone) == (["g3"], [names["g1"]])
    await declared(http, id="g4")
    rows, gone = seen_of(service).news()
    assert ([row["id"] for row in rows], gone) == (["g4"], [names["g0"]]), "all run: the oldest"
    play(service, groups[0]["to_begin"][0])
    assert seen_of(service).news() == ([], []), "nobody is told of what was forgotten"
    assert [row["id"] for row in seen_of(service).rows()] == ["g2", "g3", "g4"]


async def test_viewers_see_sessions_as_they_go_and_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "TICK_S", 0.01)
    monkeypatch.setattr(seen, "MAX_SEEN_GROUPS", 1)
    with serving(make_app(FakeEngine())) as url:
        async with httpx.AsyncClient(base_url=url) as client, watching(url) as viewer:
            await viewer.until(lambda name, _: name == "ranks")
            await client.post("/v1/groups", json={"group_size": 2, "id": "mine"})
            row = await viewer.until(lambda name, _: name == "sessions")
            assert (row["id"], row["num_to_begin"]) == ("mine", 2)
            async with watching(url) as late:
                assert (await late.until(lambda name, _: name == "sessions"))["name"] == row["name"]
            await client.post("/v1/groups", json={"group_size": 2, "id": "other"})
            gone = await viewer.until(lambda name, _: name == "gone")
            assert gone == {"rollout_ids": [], "sessions": [row["name"]]}
