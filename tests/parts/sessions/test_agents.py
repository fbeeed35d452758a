"""A user's function races per session: it is cancelled, called again for void ones, and never forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import runpy
from collections import Counter
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.kernel.http.conftest import DEADLINE_S, serving
from tests.support.waiting import eventually, wait_until
from vllm_rollout import AgentGroup, AgentSession, AsyncRolloutClient, RolloutError, SessionLost, Void

T = TypeVar("T")
USER = {"role": "user", "content": "hi"}
LONG = {"role": "user", "content": "long"}
FAST = {"num_retries": 1, "backoff_s": 0.01}


def within(work: Coroutine[Any, Any, T]) -> T:
    """Run the work, and fail instead of hanging."""

    async def bounded() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await work

    return asyncio.run(bounded())


def groups_of(url: str, prompts: list[Any], group_size: int, redundancy: int = 0, **options: Any) -> list[AgentGroup]:
    async def collect() -> list[AgentGroup]:
        async with AsyncRolloutClient(url, **FAST) as client:
            found = [each async for each in client.agents(prompts, group_size, redundancy, **options)]
        assert len(asyncio.all_tasks()) == 1, "nothing goes on"
        return sorted(found, key=lambda group: group.position)

    return within(collect())


async def two_turns(session: AgentSession) -> float:
    answer = await session.chat([USER])
    await session.chat([USER, answer["choices"][0]["message"], {"role": "tool", "content": "42"}])
    return float(session.number)


def test_each_prompt_gets_a_group_with_what_trainers_need(url):
    groups = groups_of(url, ["a", {"b": 1}, 3], 2, run=two_turns, max_concurrent=3)
    assert [(group.prompt, group.status, group.others) for group in groups] == [
        (prompt, "complete", []) for prompt in ("a", {"b": 1}, 3)
    ]
    for group in groups:
        assert [(each.number, each.reward, each.state) for each in group.trajectories] == [
            (0, 0.0, "finished"), (1, 1.0, "finished"),
        ]  # fmt: skip
        for each in group.trajectories:
            (segment,) = each.segments
            text = "<user>hi<assistant>so hi<tool>42<assistant>so 42"
            said = "".join(
                chr(token) if of_policy else "."
                for token, of_policy in zip(segment.token_ids, segment.mask, strict=True)
            )
            assert ("".join(map(chr, segment.token_ids)), said.strip(".").count("so")) == (text, 2)
            assert [logprob == -1.0 for logprob in segment.logprobs] == [bool(mask) for mask in segment.mask]
            assert [message["role"] for message in each.messages] == ["user", "assistant", "tool", "assistant"]
            assert ([turn.history for turn in each.turns], each.num_tokens) == (["first", "extended"], 10)


def test_losers_are_cancelled_wherever_they_are_and_close_their_sandboxes(url, turns):
    closed = []

    async def run(session: AgentSession) -> float:
        try:
            if session.number == 3:
                await asyncio.Event().wait()  # before its first turn
            await session.chat([USER])
            if session.number == 1:
                await session.chat([LONG])
            if session.number == 2:
                await asyncio.Event().wait()  # its tool
            await asyncio.to_thread(wait_until, lambda: turns._stops)
            return 1.0
        finally:
            for _ in range(1000):
                await asyncio.sleep(0)
            closed.append(session.number)

    turns.lets_stop = lambda: 1 in closed  # nobody waits for the engine
    (group,) = groups_of(url, ["p"], 1, 3, run=run, history="rewritable")
    assert ([each.number for each in group.trajectories], sorted(closed)) == ([0], [0, 1, 2, 3])
    assert [(each.number, each.state, each.error) for each in group.others] == [
        (number, "surplus", None) for number in (1, 2, 3)
    ]
    assert turns.num_stopped == 1
    assert group.others[0].num_tokens == len("so hi" + "so"), "also of the turn that was stopped"


def test_void_sessions_are_replaced_and_what_was_raised_is_told(url, caplog):
    calls = Counter()

    async def run(session: AgentSession) -> float | None:
        calls[session.number] += 1
        if session.number == 0:
            raise Void("no sandbox")  # before its first turn
        await session.chat([USER])
        if session.number == 1:
            raise Void("the tool died")
        if session.number == 2:
            return float("nan")
        if session.number == 3:
            return {}["nothing"]
        return 1.0

    (group,) = groups_of(url, ["p"], 2, run=run, max_sessions=8)
    assert (group.status, len(group.trajectories)) == ("complete", 2)
    assert max(calls.values()) == 1
    errors = {each.number: (each.state, type(each.error)) for each in group.others}
    assert errors == {0: ("void", Void), 1: ("void", Void), 2: ("void", ValueError), 3: ("void", KeyError)}
    assert [record.message.partition("raised ")[2] for record in caplog.records] == [
        "ValueError('a reward must be a finite number, got nan. Return None for none, or raise Void.')",
        "KeyError('nothing')",
    ]


def test_a_function_that_always_fails_ends_its_group(url):
    async def run(session: AgentSession) -> float:
        raise RuntimeError("never")

    (group,) = groups_of(url, ["p"], 2, 1, run=run)
    assert (group.status, group.trajectories, len(group.others)) == ("incomplete", [], 6)
    assert {str(each.error) for each in group.others} == {"never"}


def test_a_function_without_a_turn_is_void(url):
    async def run(session: AgentSession) -> float:
        return 1.0

    (group,) = groups_of(url, ["p"], 1, run=run, max_sessions=1)
    assert [each.state for each in group.others] == ["void"]
    assert "it begins with a turn" in str(group.others[0].error)


def test_a_session_that_a_limit_ends_still_brings_its_reward(url):
    async def run(session: AgentSession) -> float:
        await session.chat([USER], logprobs=False)
        with pytest.raises(SessionLost):
            await session.chat([USER])
        return 0.25

    (group,) = groups_of(url, ["p"], 1, run=run, max_turns=1)
    (trajectory,) = group.trajectories
    assert (trajectory.state, trajectory.reward, trajectory.segments[0].logprobs) == ("truncated", 0.25, None)


def test_a_turn_that_was_left_does_not_forbid_the_finish(url):
    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(session.chat([USER, LONG]), 0.2)
        assert not session.turns, "nothing is kept of turns that are over"
        while (await session.read()).state == "turn":
            pass  # the server has not seen yet that nobody waits
        await session.chat([USER, USER])
        return 1.0

    (group,) = groups_of(url, ["p"], 1, run=run, history="rewritable")
    assert group.trajectories[0].num_turns == 2


def test_a_finish_that_a_turn_refused_is_sent_again_though_the_turn_has_ended_meanwhile(url, turns):
    """Between the refusal and the question why."""

    class Slow(AsyncRolloutClient):
        async def send(self, call: Any) -> Any:
            if call.method == "GET" and call.path.startswith("/v1/sessions/") and holds:
                holds.pop().cancel()
                while (await super().send(call)).state == "turn":
                    pass
            return await super().send(call)

    holds: list[asyncio.Task[Any]] = []

    async def collect() -> list[AgentGroup]:
        async def run(session: AgentSession) -> float:
            await session.chat([USER])
            body = {"messages": [USER, LONG], "logprobs": False}
            held = http.post(f"{session.base_url}/chat/completions", json=body, headers=session.headers)
            holds.append(asyncio.create_task(held))
            await eventually(lambda: turns._stops)
            return 1.0

        async with Slow(url, **FAST) as client, httpx.AsyncClient() as http:
            return [each async for each in client.agents(["p"], 1, run=run, history="rewritable")]

    (group,) = within(collect())
    assert [(each.state, each.num_turns, each.reward) for each in group.trajectories] == [("finished", 1, 1.0)]


def test_other_clients_take_turns_with_headers_and_finish_for_themselves(url, turns):
    async def run(session: AgentSession) -> None:
        async with httpx.AsyncClient(base_url=session.base_url, headers=session.headers) as http:
            body = {"prompt": "hi", "logprobs": 0}
            assert (await http.post("/completions", json=body)).json()["choices"][0]["text"] == "so hi"
            if session.number:
                await http.post(f"/sessions/{session.id}/finish", json={"reward": 3.0})
            else:
                await session.complete("hiso hi!", logprobs=0)
                await session.finish(2.0)

    async def collect() -> list[AgentGroup]:
        async with AsyncRolloutClient(url, api_key="secret") as client:
            return [each async for each in client.agents(["p"], 2, run=run)]

    (group,) = within(collect())
    assert [(each.reward, each.num_turns) for each in group.trajectories] == [(2.0, 2), (3.0, 1)]
    assert [each.error for each in group.trajectories] == [None, None]


def test_options_are_the_groups_and_data_may_follow_from_the_prompt(url, turns):
    async def run(session: AgentSession) -> None:
        await session.chat([USER])

    groups_of(url, [1, 2], 1, run=run, data=lambda prompt: {"solution": prompt}, max_turns=5)
    groups = turns.service._groups.values()
    assert [(group.data, group.terms.limits.max_turns) for group in groups] == [
        ({"solution": 1}, 5), ({"solution": 2}, 5),
    ]  # fmt: skip


def test_at_most_so_many_run_at_once_and_no_group_waits_declared(url, turns):
    running, most = set(), Counter()

    async def run(session: AgentSession) -> float:
        running.add(session.id)
        most["sessions"] = max(most["sessions"], len(running))
        open_groups = [group for group in turns.service._groups.values() if not group.race.is_over]
        most["groups"] = max(most["groups"], len(open_groups))
        await session.chat([USER])
        await asyncio.sleep(0.01)
        running.discard(session.id)
        return 1.0

    groups = groups_of(url, list(range(6)), 2, run=run, max_concurrent=3)
    assert [group.status for group in groups] == ["complete"] * 6
    assert most["sessions"] == 3
    assert most["groups"] <= 4


def test_leaving_cancels_everything_and_deletes_what_is_not_over(url, turns):
    ended = []

    async def run(session: AgentSession) -> float:
        try:
            await session.chat([LONG if session.prompt else USER])
            return 1.0
        finally:
            ended.append(session.prompt)

    async def leave() -> None:
        async with AsyncRolloutClient(url) as client:
            async with aclosing(client.agents([0, 1, 1], 2, 2, run=run)) as groups:
                async for group in groups:
                    assert group.prompt == 0
                    await asyncio.to_thread(wait_until, lambda: len(turns._stops) == 8)
                    break
            assert ended.count(1) == 8
            assert turns.num_groups == 1, "the one that is over may still be read"
            assert len(turns.service._of_session) == 4
            assert len(asyncio.all_tasks()) == 1

    within(leave())


def test_leaving_leaves_no_turn_of_a_loser_either(url, turns):
    """Its group is over, and the engine has not stopped the turn yet."""
    sessions: dict[int, AgentSession] = {}

    async def run(session: AgentSession) -> float:
        sessions[session.number] = session
        await session.chat([LONG if session.number else USER])
        await asyncio.to_thread(wait_until, lambda: turns._stops)
        return 1.0

    async def leave() -> None:
        async with AsyncRolloutClient(url) as client:
            async with aclosing(client.agents(["p"], 1, 1, run=run)) as groups:
                first = asyncio.ensure_future(anext(groups))
                await asyncio.to_thread(wait_until, lambda: 1 in sessions and sessions[1].has_lost)
                first.cancel()
                await asyncio.wait([first])
            assert len(asyncio.all_tasks()) == 1

    turns.lets_stop = lambda: False
    within(leave())


def test_a_server_that_dies_is_an_error(turns):
    ended = []

    async def run(session: AgentSession) -> float:
        try:
            if session.number:
                await session.chat([USER])
                await asyncio.Event().wait()
            await session.chat([LONG])
            return 1.0
        finally:
            ended.append(session.number)

    async def collect(url: str, stop: Any) -> None:
        async with AsyncRolloutClient(url, **FAST) as client, aclosing(client.agents([1, 2], 2, run=run)) as groups:
            first = asyncio.ensure_future(anext(groups))
            await asyncio.to_thread(wait_until, lambda: len(turns._stops) == 2)
            await asyncio.to_thread(stop)
            with pytest.raises(RolloutError, match="no connection"):
                await first
        assert sorted(ended) == [0, 0, 1, 1]

    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(turns.app))
        within(collect(url, stack.close))


def test_a_stream_that_breaks_is_opened_again_and_nothing_is_missed(url, turns, monkeypatch):
    """Its first stream ends at once, before a session is wanted."""
    streams = []

    class Cut(AsyncRolloutClient):
        async def _open(self, method: str, path: str, *rest: Any) -> httpx.Response:
            response = await super()._open(method, path, *rest)
            if "/events?" in path:
                streams.append(path)
                if len(streams) == 1:
                    await response.aclose()
                    return httpx.Response(200, content=b": \n\n")
            return response

    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        if session.number == 1:
            async with httpx.AsyncClient() as http:
                await http.post(f"{session.base_url}/sessions/{session.id}/finish", json={"void": True})
        return 1.0

    async def collect() -> list[AgentGroup]:
        async with Cut(url) as client:
            return [each async for each in client.agents(["p"], 2, run=run)]

    (group,) = within(collect())
    assert ([each.number for each in group.trajectories], len(streams)) == ([0, 2], 2)


def test_a_group_that_is_declared_again_since_its_answer_was_lost_is_the_same(url, turns):
    class Lossy(AsyncRolloutClient):
        async def _open(self, method: str, path: str, *rest: Any) -> httpx.Response:
            if path == "/v1/groups":
                await (await super()._open(method, path, *rest)).aclose()
            return await super()._open(method, path, *rest)

    async def collect() -> list[AgentGroup]:
        async with Lossy(url) as client:
            return [each async for each in client.agents(["p"], 2, run=two_turns)]

    (group,) = within(collect())
    assert (group.status, len(group.trajectories), turns.num_groups) == ("complete", 2, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": "one"}, r"Write \[prompt\]"),
        ({"max_concurrent": 0}, "must be 1 or more, got 0"),
        ({"stop_early": True}, "stop_early is no option"),
    ],
)
def test_bad_arguments_are_told_at_once(arguments, words):
    client = AsyncRolloutClient("http://127.0.0.1:1")
    with pytest.raises((TypeError, ValueError), match=words):
        client.agents(**{"prompts": ["p"], "group_size": 1, "run": two_turns, **arguments})


def test_a_refused_group_is_the_servers_words(url):
    with pytest.raises(RolloutError, match="max_sessions: must be at least"):
        groups_of(url, ["p", "q"], 4, run=two_turns, max_sessions=2)


def test_streamed_turns_are_for_other_clients(url):
    async def run(session: AgentSession) -> None:
        with pytest.raises(TypeError, match="with `headers`"):
            await session.chat([USER], stream=True)
        await session.chat([USER])

    assert groups_of(url, ["p"], 1, run=run)[0].status == "complete"


def test_the_example_runs(url, capsys):
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "agents.py"))
    asyncio.run(example["main"](url))
    assert "Rome, in millions? complete, rewards [0.0, 0.0, 0.0], 3 stopped" in capsys.readouterr().out
    assert [example["use_tool"](*call) for call in (("CALC", "17 + 25"), ("CALC", "24 * 7"), ("SEARCH", "oslo"))] == [
        "42.0", "168.0", "Oslo has 0.7 million people.",
    ]  # fmt: skip


def test_what_a_function_cancels_itself_is_its_failure(url):
    """Nothing but the session's own function can report that this session is over."""

    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        if session.number == 0:
            raise asyncio.CancelledError
        return 1.0

    (group,) = groups_of(url, ["p"], 1, run=run)
    assert [(each.number, each.state, str(each.error)) for each in group.others] == [
        (0, "void", "its function was cancelled by itself"),
    ]  # fmt: skip
    assert [each.number for each in group.trajectories] == [1]


def test_turns_that_a_function_left_behind_end_with_it(url, turns):
    left = []

    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        left.append(asyncio.create_task(session.chat([USER, LONG])))
        await asyncio.to_thread(wait_until, lambda: turns._stops)
        with pytest.raises(RolloutError, match="one may run at a time"):
            await session.chat([USER, USER])
        return 1.0

    (group,) = groups_of(url, ["p"], 1, run=run, history="rewritable")
    assert (group.trajectories[0].num_turns, turns.num_stopped) == (1, 0)
    assert [task.cancelled() for task in left] == [True]


def test_functions_that_do_not_end_hold_their_group_for_a_bounded_time_and_are_cancelled(url, monkeypatch):
    """Prompt "a" has a session that is returned and one that never ends. The sessions of prompt "b" wait for both."""
    monkeypatch.setattr("vllm_rollout.parts.sessions.http.service.TICK_S", 60.0)  # the client's own bound is meant
    ended, both = [], asyncio.Event()

    async def run(session: AgentSession) -> float:
        if session.prompt == "b":
            await both.wait()
        try:
            await session.chat([USER], vllm_xargs={"rollout_last": True})
            if session.prompt == "a":
                await asyncio.Event().wait()
            return 1.0
        finally:
            ended.append(session.prompt)
            if len(ended) == 2:
                both.set()

    a, b = groups_of(url, ["a", "b"], 1, 1, run=run, idle_timeout_s=2, early_stop=False)
    assert [(each.state, each.reward, type(each.error)) for each in a.trajectories] == [
        ("finished", None, TimeoutError)
    ]
    assert [(each.reward, each.error) for each in b.trajectories] == [(1.0, None)]


def test_one_that_is_finished_may_go_on_when_its_group_is_over(url):
    async def collect() -> None:
        over, went_on = asyncio.Event(), asyncio.Event()

        async def run(session: AgentSession) -> float:
            await session.chat([USER])
            if session.number == 1:
                await session.finish(0.5)
                await over.wait()
                went_on.set()
            return 1.0

        options = {"run": run, "early_stop": False, "selection": "shortest"}
        async with AsyncRolloutClient(url) as client, aclosing(client.agents(["p"], 1, 1, **options)) as groups:
            group = await anext(groups)
            assert [each.number for each in group.trajectories] == [0]
            over.set()
            await went_on.wait()

    within(collect())


def test_what_ends_a_program_ends_all_groups(url):
    class Halt(BaseException):
        pass

    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        raise Halt("now")

    with pytest.raises(Halt, match="now"):
        groups_of(url, ["p", "q"], 2, run=run)


@pytest.mark.parametrize("fails", ["/finish", "/events"])
def test_a_client_that_fails_ends_the_group(url, fails):
    """Whatever it raises: nobody else would say what has become of the session."""

    class Broken(AsyncRolloutClient):
        async def send(self, call: Any) -> Any:
            if call.path.endswith(fails):
                raise OSError("no more files")
            return await super().send(call)

        async def _open(self, method: str, path: str, *rest: Any) -> httpx.Response:
            if fails in path:
                raise OSError("no more files")
            return await super()._open(method, path, *rest)

    async def collect() -> list[AgentGroup]:
        async with Broken(url, **FAST) as client:
            return [each async for each in client.agents(["p"], 1, run=two_turns)]

    with pytest.raises(OSError, match="no more files"):
        within(collect())


def test_sessions_that_their_score_stopped_are_lost(url, turns):
    """Its function hears of it by its turn's answer or by the event, whichever is faster."""
    turns.prunes.add(0)

    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        return 1.0

    (group,) = groups_of(url, ["p"], 1, 1, run=run)
    assert [(each.state, each.reward, each.error) for each in group.others] == [("pruned", None, None)]
    assert group.trajectories[0].reward == 1.0


def test_a_session_is_finished_once_and_one_that_has_lost_not_at_all(url):
    finished = []

    class Counting(AsyncRolloutClient):
        async def send(self, call: Any) -> Any:
            if call.path.endswith("/finish"):
                finished.append((call.path.rpartition(".")[2], call.body["reward"]))
            return await super().send(call)

    async def run(session: AgentSession) -> float:
        with contextlib.suppress(asyncio.CancelledError):  # as careless functions do
            if session.number == 0:
                with pytest.raises(RolloutError, match="it begins with a turn"):
                    await session.finish(1.0)
                await session.chat([USER])
                return 1.0
            await session.chat([USER])
            if session.number == 1:
                await session.finish(0.5)
            else:
                await asyncio.Event().wait()
        return 0.0

    async def collect() -> list[AgentGroup]:
        async with Counting(url, **FAST) as client:
            return [each async for each in client.agents(["p"], 2, 1, run=run)]

    (group,) = within(collect())
    assert [each.reward for each in group.trajectories] == [1.0, 0.5]
    assert sorted(finished) == [("0/finish", 1.0), ("0/finish", 1.0), ("1/finish", 0.5)]
