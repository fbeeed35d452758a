"""The service of sessions and its endpoints, where tests end the turns; how prompts go on from the turns before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.sessions.session_engine import compare_now, followed
from tests.support.waiting import eventually
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.parts.sessions.http import service as module
from vllm_rollout.parts.sessions.http.asked import turn_from_xargs
from vllm_rollout.parts.sessions.http.groups import OpenTurn
from vllm_rollout.parts.sessions.http.service import SessionService
from vllm_rollout.parts.sessions.http.trajectory import Conversation, Turn

PROMPT = [100, 101]


def begin(service: SessionService, session: str, prompt: Sequence[int] = PROMPT, **xargs: Any) -> OpenTurn | None:
    turn = service.turn(turn_from_xargs(xargs, session, n=1), None, prompt)
    if turn is not None:
        compare_now(turn)
        assert service.begin(turn)
    return turn


def play(
    service: SessionService, session: str, prompt: Sequence[int] = PROMPT, num_tokens: int = 3, **xargs: Any
) -> None:
    turn = begin(service, session, prompt, **xargs)
    assert turn is not None
    service.end(turn, prompt, [110] * num_tokens, finish_reason="stop")


async def declared(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/groups", json={"group_size": 1, **body})
    assert response.status_code == 201, response.text
    return response.json()


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "group_size: Field required"),
        ({"group_size": 2, "redundancy": 1, "max_sessions": 2}, "must be at least group_size + redundancy (3), got 2"),
        ({"group_size": 1, "id": "grüppe"}, "id: String should match pattern"),
        ({"group_size": 1, "id": " g"}, "id: String should match pattern"),
        ({"group_size": 1, "id": "x" * 251}, "id: String should have at most 250 characters"),
        ({"group_size": 1, "data": {"a": 2**70}}, "data.a: must be an integer"),
        ({"group_size": 1, "reward": "nobody"}, "nobody"),
        ({"group_size": 1, "turns": 3}, "turns: is not a field of this version"),
    ],
)
async def test_what_no_group_can_be_is_refused(http, body, said):
    response = await http.post("/v1/groups", json=body)
    assert (response.status_code, said in message(response)) == (400, True), message(response)


async def test_a_group_has_a_name_once(http):
    group = await declared(http, id="mine")
    assert (group["id"], group["to_begin"]) == ("mine", ["mine.0"])
    response = await http.post("/v1/groups", json={"id": "mine", "group_size": 1})
    assert (response.status_code, "there is a group 'mine'" in message(response)) == (409, True)


@pytest.mark.parametrize(
    ("xargs", "said"),
    [
        ({"rollout_group_id": "g"}, "rollout_group_size: is required with the first turn of a session"),
        ({"rollout_group_size": 1}, "rollout_group_id: is required with the first turn of a session"),
        ({"rollout_group_id": "g", "rollout_group_size": 3, "rollout_num_candidates": 2}, "must be at least"),
        ({"rollout_group_id": "g", "rollout_group_size": 1, "rollout_redundancy": 2}, "is not a field of this version"),
    ],
)
async def test_what_no_turn_can_say_is_refused(service, xargs, said):
    with pytest.raises(PlanError, match=said):
        begin(service, "s", **xargs)


async def test_later_turns_say_nothing_else_of_their_group(service):
    fields = {"rollout_group_id": "g", "rollout_group_size": 2, "rollout_max_turns": 5}
    play(service, "s", **fields)
    play(service, "s", [*PROMPT, 110, 110, 110, 111], **fields)
    for other in ({"rollout_group_id": "other"}, {"rollout_max_turns": 6}, {"rollout_history": "rewritable"}):
        with pytest.raises(PlanError, match="as its first turn said"):
            begin(service, "s", **{**fields, **other})


async def test_a_session_keeps_its_model(service, http):
    (session,) = (await declared(http))["to_begin"]
    said = turn_from_xargs({}, session, n=1)
    assert service.turn(said, "adapter", PROMPT) is not None
    with pytest.raises(RequestError, match="began with 'adapter', got None"):
        service.turn(said, None, PROMPT)


async def test_a_group_that_began_with_the_base_model_keeps_it(service, http):
    (session,) = (await declared(http))["to_begin"]
    play(service, session)
    with pytest.raises(RequestError, match="began with None, got 'adapter'"):
        service.turn(turn_from_xargs({}, session, n=1), "adapter", [*PROMPT, 110, 110, 110])


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_turn_that_the_engine_gave_up_has_not_happened(service, http, reason):
    group = await declared(http, redundancy=1, max_turns=1)
    session, _ = group["to_begin"]
    turn = begin(service, session, rollout_last=True)
    assert turn is not None
    service.end(turn, PROMPT, [110], finish_reason=reason)
    assert (await http.get(f"/v1/groups/{group['id']}")).json()["status"] == "running"
    play(service, session, rollout_last=True)
    assert (await http.get(f"/v1/groups/{group['id']}")).json()["selected"] == [session]


async def test_a_harness_that_reads_the_answers_of_finish_alone_hears_of_all_that_is_wanted(service, http):
    """Another session may be wanted when a turn ends, and not when one is finished."""
    group = await declared(http, group_size=2, max_sessions=3)
    to_run, finishes = list(group["to_begin"]), iter([{"void": True}, {"reward": 0.0}, {"reward": 1.0}])
    while to_run:
        play(service, session := to_run.pop(0))
        answer = await http.post(f"/v1/sessions/{session}/finish", json=next(finishes))
        to_run += answer.json()["wanted"]
        assert answer.json()["num_wanted"] == len(answer.json()["wanted"])
    assert (await http.get(f"/v1/groups/{group['id']}")).json()["status"] == "complete"


async def test_who_goes_on_with_a_session_of_a_group_that_is_gone_is_told_that_it_has_ended(service, http):
    group = await declared(http, id="g")
    play(service, "g.0")
    await http.delete(f"/v1/groups/{group['id']}")
    assert service.turn(turn_from_xargs({}, "g.0", n=1), None, PROMPT) is None
    await declared(http, id="g")
    play(service, "g.0")


async def test_a_group_takes_no_session_of_another_one(service, http):
    play(service, "g.0", rollout_group_id="h", rollout_group_size=1)
    response = await http.post("/v1/groups", json={"id": "g", "group_size": 1})
    assert (response.status_code, "'g.0'" in message(response)) == (409, True)
    await http.delete("/v1/groups/h")
    await declared(http, id="g")


async def test_what_grades_a_group_is_held_as_its_tokens_are(service, http, monkeypatch):
    monkeypatch.setattr(module, "MAX_SESSION_HISTORY", 100)
    first = await declared(http, data="x" * 398)
    assert service._num_held_tokens == 100
    play(service, first["to_begin"][0])
    response = await http.post("/v1/groups", json={"group_size": 1})
    assert (response.status_code, "at most 100 are held" in message(response)) == (503, True)
    await http.post(f"/v1/sessions/{first['to_begin'][0]}/finish", json={})
    await declared(http, data="x")
    assert service._num_held_tokens == 0
    assert service._group(first["id"]).data is None


async def test_nobody_enters_a_declared_group_by_another_name(service, http):
    await declared(http, id="mine")
    with pytest.raises(RequestError, match="was declared"):
        begin(service, "stranger", rollout_group_id="mine", rollout_group_size=1)


async def test_names_with_slashes_and_other_signs_are_names(service, http):
    name = "step/7 q?1%\n"
    play(service, name, rollout_group_id=f"of/{name}", rollout_group_size=1)
    path = quote(name, safe="/")
    found = await http.post(f"/v1/sessions/{path}/finish", json={"reward": 1})
    assert (found.status_code, found.json()["id"]) == (200, name)
    assert (await http.get(f"/v1/sessions/{path}")).json()["num_tokens"] == 3
    assert (await http.get(f"/v1/groups/of/{path}")).json()["selected"] == [name]


async def test_a_turn_does_not_begin_that_was_asked_for_before_another_one(service, http):
    """The early turn was compared with the session's turns at that time."""
    (session,) = (await declared(http))["to_begin"]
    early = service.turn(turn_from_xargs({}, session, n=1), None, PROMPT)
    play(service, session)
    with pytest.raises(RequestError, match="has had another turn since"):
        service.begin(early)
    play(service, session, [*PROMPT, 110, 110, 110])
    assert len(service.read(session).segments) == 1


async def test_a_finish_that_is_refused_begins_no_session(service, http):
    group = await declared(http)
    (session,) = group["to_begin"]
    response = await http.post(f"/v1/sessions/{session}/finish", json={"void": True, "reward": 1.0})
    assert (response.status_code, "a void session has none" in message(response)) == (400, True)
    assert (await http.get(f"/v1/groups/{group['id']}")).json()["to_begin"] == [session]


async def test_groups_that_are_over_are_forgotten_the_oldest_first(service, http, monkeypatch):
    monkeypatch.setattr(module, "MAX_ENDED_SESSIONS", 4)
    ids = []
    for _ in range(4):
        group = await declared(http)  # of two sessions at most
        ids.append(group["id"])
        play(service, group["to_begin"][0])
        await http.post(f"/v1/sessions/{group['to_begin'][0]}/finish", json={})
    assert [(await http.get(f"/v1/groups/{id}")).status_code for id in ids] == [404, 404, 200, 200]
    assert (service._num_ended_sessions, service._num_held_tokens) == (4, 10)
    for id in ids[2:]:
        await http.delete(f"/v1/groups/{id}")
    assert (service._num_ended_sessions, service._num_held_tokens, service._num_open_sessions) == (0, 0, 0)
    assert not service._of_session


async def test_trajectories_that_are_over_give_way_and_then_turns_wait(service, http, monkeypatch):
    monkeypatch.setattr(module, "MAX_SESSION_HISTORY", 12)
    over, still = [(await declared(http))["to_begin"][0] for _ in range(2)]
    play(service, over)
    await http.post(f"/v1/sessions/{over}/finish", json={})
    play(service, still, num_tokens=6)
    found = (await http.get(f"/v1/sessions/{over}")).json()
    assert (found["state"], found["segments"]) == ("finished", None)
    play(service, still, [*PROMPT, *[110] * 6], num_tokens=6)
    with pytest.raises(RequestError, match="open sessions have 14 tokens, at most 12 are held"):
        begin(service, still, [*PROMPT, *[110] * 12])


async def test_stops_of_many_groups_go_in_one_call_while_another_is_on_its_way(service, http):
    """A call takes a step of the engine, however many turns it names."""
    groups = [(await declared(http, redundancy=1))["to_begin"] for _ in range(4)]
    turns = [begin(service, loser) for _, loser in groups]
    sent, answered = [], asyncio.Event()

    async def stop(indices: dict[str, list[int]]) -> None:
        sent.append([turn for turn in turns if turn.index in indices.get(turn.engine_id, ())])
        await answered.wait()

    service._stop_turns = stop
    for winner, _ in groups:
        play(service, winner)
        await http.post(f"/v1/sessions/{winner}/finish", json={})
        await eventually(lambda: sent)
    assert sent == [turns[:1]]
    answered.set()
    await eventually(lambda: len(sent) != 1)
    assert sent[1] == turns


@pytest.mark.parametrize("error", [ZeroDivisionError(), RequestError("the engine is dead")])
async def test_turns_are_stopped_on_after_a_stop_that_failed(service, http, monkeypatch, error):
    monkeypatch.setattr(module, "STOP_AGAIN_S", 0.01)
    sent = []

    async def stop(indices: dict[str, list[int]]) -> None:
        sent.append(indices)
        if len(sent) == 1:
            raise error

    service._stop_turns = stop
    winner, loser = (await declared(http, redundancy=1))["to_begin"]
    turn = begin(service, loser)
    play(service, winner)
    await http.post(f"/v1/sessions/{winner}/finish", json={})
    await eventually(lambda: len(sent) > 1)
    assert sent[1] == {turn.engine_id: [turn.index]}
    service.end(turn, PROMPT, [110], finish_reason="abort")
    await eventually(lambda: service._stopper is None)


async def test_silent_sessions_end_though_another_group_fails(service, http, clock):
    class Failing:
        def heard_s(self, now_s: float) -> float:
            raise ZeroDivisionError

    first, second = [await declared(http, idle_timeout_s=1) for _ in range(2)]
    for group in (first, second):
        play(service, group["to_begin"][0])
    failing = service._groups["", first["id"]]
    failing.watcher = Failing()
    clock.now += 10
    await eventually(lambda: service.read_group(second["id"]).sessions[0].ended_by == "idle")
    assert service.read_group(first["id"]).sessions[0].ended_by is None
    failing.watcher = None
    await eventually(lambda: service._ticker is None)


async def test_a_slow_reader_of_events_is_left(service, http, monkeypatch):
    from vllm_rollout.parts.sessions.http import groups

    monkeypatch.setattr(groups, "MAX_EVENTS", 2)
    group = await declared(http, group_size=4)
    events = service.events(group["id"])
    play(service, group["to_begin"][0])
    await http.post(f"/v1/sessions/{group['to_begin'][0]}/finish", json={})
    assert (await anext(events)).state == "finished"  # it reads the first one, and then no more
    for session in group["to_begin"][1:]:
        play(service, session)
        await http.post(f"/v1/sessions/{session}/finish", json={})
    rest = [event.state async for event in events]
    assert rest == ["wanted"] * 3, "what it was to be told first; then its stream ends, and it may ask again"
    assert service._group(group["id"])._readers == []


async def test_events_have_few_readers(service, http, monkeypatch):
    from vllm_rollout.parts.sessions.http import groups

    monkeypatch.setattr(groups, "MAX_READERS", 0)
    group = await declared(http)
    response = await http.get("/v1/sessions/events", params={"group": group["id"]})
    assert (response.status_code, "0 others read the events" in message(response)) == (429, True)


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.01)


WORDS = ["", "a", "b", "ab", " ", "\n", "<end>", "ba", "é", "�"]
"""The vocabulary: "ab" is one token or two."""
A, B, AB, SPACE, LINE, END, BA, ACUTE, BROKEN = range(1, 10)


def decode(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def turn(history: str = "first", **fields: object) -> Turn:
    return Turn(history, 0, 0, 0, "stop", 0.0, 0.0, 0.0)


def conversation(
    prompt: Sequence[int], answer: Sequence[int], text: str | None = None, logprobs: Sequence[float] | None = None
) -> Conversation:
    begun = Conversation()
    begun.add(turn(), prompt, answer, logprobs, decode(answer) if text is None else text)
    return begun


@pytest.mark.parametrize(
    ("prompt", "history", "tokens"),
    [
        ([A, B, A, B, END, LINE, A], "extended", [A, B, A, B, END, LINE, A]),
        ([A, B, A, B, END], "extended", [A, B, A, B, END]),
        ([AB, A, B, END, LINE, A], "mended", [A, B, A, B, END, LINE, A]),
        ([A, BA, B, END, LINE, A], "mended", [A, B, A, B, END, LINE, A]),
        ([A, B, AB, END], "mended", [A, B, A, B, END]),
        ([A, B, A, B, SPACE, END, LINE], "reformatted", None),
        ([A, B, A, B, LINE, A], "reformatted", None),  # without the stop token
        ([A, B, A, END, LINE, A], "rewritten", None),
        ([A, B], "rewritten", None),  # cut
        ([], "rewritten", None),
    ],
)
def test_how_a_prompt_goes_on(prompt, history, tokens):
    begun = conversation([A, B], [A, B, END], text="ab")
    found = followed(begun, prompt, decode)
    assert (found.history, list(found.token_ids)) == (history, prompt if tokens is None else tokens)


def test_another_history_is_shown_where_it_begins():
    begun = conversation([A, B], [A, A, END], text="aa")
    found = followed(begun, [A, B, A, B, END], decode)
    assert found.where == "token 3 of its prompt or later: it was 'a', the request has 'b<end>'"


def test_what_no_text_stands_for_is_not_mended():
    """A token that is a part of a character has no text of its own."""
    begun = conversation([A], [BROKEN, END], text="")
    assert followed(begun, [A, ACUTE, END], decode).history == "reformatted"


def test_segments_hold_what_was_seen_and_who_generated_it():
    begun = conversation([A, B], [A, END], logprobs=[-1.0, -2.0])
    begun.add(turn("extended"), [A, B, A, END, LINE, B], [B, END], [-3.0, -4.0], "b")
    begun.add(turn("rewritten"), [B], [A], None, "a")
    first, second = begun.segments
    assert list(first.token_ids) == [A, B, A, END, LINE, B, B, END]
    assert list(first.mask) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert list(first.logprobs or ()) == [0, 0, -1, -2, 0, 0, -3, -4]
    assert (list(second.token_ids), list(second.mask), second.logprobs) == ([B, A], [0, 1], None)
    assert begun.num_held_tokens == 10


@pytest.mark.parametrize(
    ("turns", "prompt", "rest"),
    [
        ([("first", [A, B], [A]), ("extended", [A, B, A, LINE], [B])], [A, B], [A, LINE, B]),
        ([("first", [A, B], [A, SPACE]), ("reformatted", [A, B, A, LINE], [B])], [A, B], [A, LINE, B]),
        ([("first", [A, B], [A]), ("rewritten", [A, B, LINE], [B])], [A, B], [LINE, B]),
        ([("first", [A, B], [A]), ("rewritten", [BA, LINE], [B])], [BA, LINE], [B]),
        ([("first", [A, B], [])], [A, B], []),
    ],
)
def test_what_is_graded_begins_where_the_policy_first_spoke(turns, prompt, rest):
    begun = Conversation()
    for history, asked, answer in turns:
        begun.add(turn(history), asked, answer, None, decode(answer))
    assert tuple(map(list, begun.halves)) == (prompt, rest)


def test_log_probabilities_are_kept_where_every_turn_had_them():
    begun = conversation([A], [B], logprobs=None)
    begun.add(turn("extended"), [A, B, A], [B], [-1.0], "b")
    assert begun.segments[0].logprobs is None
    begun = conversation([A], [B], logprobs=[-1.0])
    begun.add(turn("extended"), [A, B, A], [B], None, "b")
    assert begun.segments[0].logprobs is None


TOKENS = st.lists(st.sampled_from([A, B, AB, SPACE, END, BA]), min_size=1, max_size=12)


@given(first=TOKENS, answer=TOKENS, more=TOKENS, data=st.data())
def test_the_same_text_is_never_another_history_and_is_mended_to_the_tokens_that_were_there(first, answer, more, data):
    begun = conversation(first, answer)
    known = [*first, *answer]
    text = decode(known)
    written: list[int] = []
    while text:  # in any tokens that say it
        token = data.draw(st.sampled_from([t for t in (A, B, AB, SPACE, END, BA) if text.startswith(WORDS[t])]))
        written.append(token)
        text = text.removeprefix(WORDS[token])
    found = followed(begun, [*written, *more], decode)
    assert found.history in ("extended", "mended")
    assert list(found.token_ids)[: len(known)] == known
    assert decode(found.token_ids) == decode([*written, *more])


async def test_an_old_turn_that_stops_late_lets_go_of_its_own_group_only(app, http) -> None:
    """A group is deleted while a turn of it runs, and made anew under the same id."""
    service = app.state.session_service
    await declared(http, id="g")
    old = begin(service, "g.0")
    await http.delete("/v1/groups/g")
    await declared(http, id="g")
    play(service, "g.0", num_tokens=50)
    await http.post("/v1/sessions/g.0/finish", json={"reward": 1})
    service.end(old, [1, 2], [3], finish_reason="abort")
    assert [id for _, id in service._holding] == ["g"]
