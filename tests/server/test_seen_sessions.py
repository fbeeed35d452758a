"""What viewers are told of groups of sessions: when their turns were, how each ended, and never more than a bound."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from vllm_rollout.server.sessions import seen
from vllm_rollout.server.sessions.service import SessionService
from vllm_rollout.server.watch import viewers
from vllm_rollout.trace.session_rows import TurnRow

from .conftest import make_app, serving
from .fake_engine import FakeEngine
from .test_sessions import PROMPT, begin, declared, play
from .test_watch import watching

pytestmark = pytest.mark.anyio


def only(service: SessionService) -> dict[str, Any]:
    """The group that has changed."""
    (row,), gone = service.seen.news()
    assert gone == []
    return row


async def test_a_group_is_told_with_the_times_of_its_turns(service, http, clock):
    group = await declared(http, group_size=1, redundancy=1)
    row = only(service)
    assert (row["id"], row["status"], row["sessions"], row["num_to_begin"]) == (group["id"], "running", [], 2)
    winner, loser = group["to_begin"]
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
    losing = begin(service, loser)
    clock.now = 105.0
    await http.post(f"/v1/sessions/{winner}/finish", json={"reward": 0.5})
    row = only(service)
    told = [(each["state"], each["ended_s"], each["reward"], len(each["turns"])) for each in row["sessions"]]
    assert told == [("finished", 5.0, 0.5, 1), ("surplus", 5.0, None, 1)]
    assert (row["status"], row["seconds"], row["selected"], row["num_to_begin"]) == ("complete", 5.0, [0], 0)
    clock.now = 105.25
    service.end(losing, PROMPT, [110], finish_reason="abort")
    lost = only(service)["sessions"][1]
    assert (lost["turns"], lost["ended_s"]) == ([(3.5, 5.25, 1, 2, None, "first")], 5.0), (
        "its last turn stops a little later"
    )
    assert service.seen.news() == ([], [])
    assert [row["id"] for row in service.seen.rows()] == [group["id"]]


async def test_a_turn_that_came_to_no_end_is_not_told(service, http):
    group = await declared(http)
    turn = begin(service, group["to_begin"][0])
    only(service)
    service.leave(turn)
    (session,) = only(service)["sessions"]
    assert (session["state"], session["turns"]) == ("between_turns", [])


async def test_the_last_turns_of_a_session_are_told_and_all_are_counted(service, http, monkeypatch):
    monkeypatch.setattr(seen, "MAX_SEEN_TURNS", 3)
    group = await declared(http)
    for turn in range(5):
        play(service, group["to_begin"][0], [*PROMPT, *[110, 111] * turn], 2)
    (session,) = only(service)["sessions"]
    assert (session["num_turns"], session["num_tokens"], len(session["turns"])) == (5, 10, 3)


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
    names = {row["id"]: row["name"] for row in service.seen.news()[0]}
    await declared(http, id="g3")
    rows, gone = service.seen.news()
    assert ([row["id"] for row in rows], gone) == (["g3"], [names["g1"]])
    await declared(http, id="g4")
    rows, gone = service.seen.news()
    assert ([row["id"] for row in rows], gone) == (["g4"], [names["g0"]]), "all run: the oldest"
    play(service, groups[0]["to_begin"][0])
    assert service.seen.news() == ([], []), "nobody is told of what was forgotten"
    assert [row["id"] for row in service.seen.rows()] == ["g2", "g3", "g4"]


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
