"""Rounds of agents: every prompt comes back once, and what a round does not want any more is cancelled."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from typing import Any

import pytest

from tests.parts.sessions.test_agents import FAST, LONG, USER, within
from tests.support.waiting import WAIT_S
from vllm_rollout import AgentRound, AgentSession, AsyncRolloutClient, AsyncRun, RolloutError
from vllm_rollout.parts.rounds.with_sessions.http import session_round
from vllm_rollout.parts.sessions.http import service as sessions_module

TERMS: dict[str, Any] = {"prompt_speculation": 1.5, "response_speculation": 1.5, "sessions": {}}


def data(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "prompt": f"question {i}", "data": i} for i in range(count)]


def rounds_of(url: str, count: int, run: Any, options: dict[str, Any], **terms: Any) -> list[AgentRound]:
    async def collect() -> list[AgentRound]:
        async with AsyncRolloutClient(url, **FAST) as client:
            its: AsyncRun = await client.run(2, 2, id="a", **{**TERMS, **terms})
            found = [each async for each in its.agent_rounds(data(count), run=run, **options)]
        assert len(asyncio.all_tasks()) == 1, "nothing goes on"
        return found

    return within(collect())


async def one_turn(session: AgentSession) -> float:
    await session.chat([USER])
    return float(session.number % 2)


@pytest.mark.parametrize("max_concurrent", [1, 4, 512])
def test_every_prompt_comes_back_once_with_what_trainers_need(url, turns, max_concurrent):
    slow = Counter()

    async def run(session: AgentSession) -> float:
        slow[session.prompt["id"]] += 1
        if session.prompt["data"] in (0, 3) and slow[session.prompt["id"]] <= 3:  # its first round
            await session.chat([LONG])
        return await one_turn(session)

    if max_concurrent == 1:  # who runs alone would run for ever
        run = one_turn
    rounds = rounds_of(url, 7, run, {"max_concurrent": max_concurrent})
    back = Counter(group.prompt["id"] for round in rounds for group in round.groups)
    assert back == {f"q{i}": 1 for i in range(7)}
    for round in rounds:
        assert round.summary.generated_tokens >= round.summary.returned_tokens
        for group in round.groups:
            assert (group.status, len(group.trajectories), group.prompt["prompt"][:8]) == ("complete", 2, "question")
            assert all(each.segments and each.messages and each.reward is not None for each in group.trajectories)
    assert {round.summary.kind for round in rounds} == {"short", "long"}
    assert turns.service._num_open_sessions == 0
    if max_concurrent > 1:
        assert any(round.summary.deferred for round in rounds)


def test_groups_that_teach_nothing_are_left_out(url):
    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        return float(session.number if session.prompt["data"] else 1)

    rounds = rounds_of(url, 2, run, {}, prompt_speculation=1.0, response_speculation=1.0, filter="zero_variance")
    assert [[group.prompt["id"] for group in round.groups] for round in rounds] == [["q1"]]
    assert rounds[0].summary.filtered == ["q0"]


def leave_when(url: str, run: Any, is_time: Callable[[AsyncRun], Awaitable[bool]]) -> None:
    """A round of three prompts, which is interrupted then."""

    async def leave() -> None:
        async with AsyncRolloutClient(url, **FAST) as client:
            its = await client.run(2, 2, id="a", **TERMS)
            async with aclosing(its.agent_rounds(data(3), run=run)) as rounds:
                first = asyncio.ensure_future(anext(rounds))
                async with asyncio.timeout(WAIT_S):
                    while not await is_time(its):
                        await asyncio.sleep(0.01)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            async with asyncio.timeout(WAIT_S):
                while (await its.refresh()).open_round.state != "interrupted":
                    await asyncio.sleep(0.01)

    within(leave())


def test_who_leaves_finds_the_round_again_with_its_prompts(url, turns):
    closed = []

    async def hangs(session: AgentSession) -> float:
        try:
            await session.chat([USER])
            await asyncio.Event().wait()
        finally:
            closed.append(session.id)

    async def all_have_begun(its: AsyncRun) -> bool:
        return len(turns.bodies) == 9

    leave_when(url, hangs, all_have_begun)
    assert len(closed) == 9
    rounds = rounds_of(url, 0, one_turn, {})
    assert sorted(group.prompt["id"] for round in rounds for group in round.groups) == ["q0", "q1", "q2"]


def test_who_goes_on_has_the_groups_that_were_complete_and_runs_the_others(url, turns):
    async def ends_first(session: AgentSession) -> float:
        if session.prompt["data"]:
            await asyncio.Event().wait()
        return await one_turn(session)

    async def one_is_kept(its: AsyncRun) -> bool:
        with closing(sqlite3.connect(turns.app.state.run_service._store.path)) as db:
            return db.execute("SELECT COUNT(*) FROM ended").fetchone() == (1,)

    leave_when(url, ends_first, one_is_kept)
    before = len(turns.bodies)
    rounds = rounds_of(url, 0, one_turn, {})
    groups = [group for round in rounds for group in round.groups]
    assert sorted(group.prompt["data"] for group in groups) == [0, 1, 2]
    assert all(group.position == group.prompt["data"] for group in rounds[0].groups)
    assert len(turns.bodies) > before
    assert all(each.segments for group in groups for each in group.trajectories)


def test_functions_that_fail_give_their_prompts_up_after_a_long_round(url):
    async def run(session: AgentSession) -> float:
        await session.chat([USER])
        raise KeyError("x")

    rounds = rounds_of(url, 3, run, {})
    assert [(round.summary.kind, len(round.groups)) for round in rounds] == [("short", 0), ("long", 2), ("long", 1)]
    for group in (group for round in rounds for group in round.groups):
        assert (group.status, group.trajectories) == ("incomplete", [])
        assert {type(each.error) for each in group.others} == {KeyError}


def test_a_harness_that_is_stuck_hears_of_it(url, monkeypatch):
    for module in (session_round, sessions_module):
        monkeypatch.setattr(module, "TICK_S", 0.01)

    async def run(session: AgentSession) -> float:
        await asyncio.Event().wait()

    with pytest.raises(RolloutError, match=r"nobody has run a session of it for 0\.1 s"):
        rounds_of(url, 3, run, {}, sessions={"idle_timeout_s": 0.1})


@pytest.mark.parametrize(
    ("prompts", "options", "error"), [("q", {}, TypeError), ([], {"max_concurrent": 0}, ValueError)]
)
def test_what_no_round_could_run_is_refused_before_one_begins(url, turns, prompts, options, error):
    async def ask() -> None:
        async with AsyncRolloutClient(url, **FAST) as client:
            its = await client.run(2, 2, id="a", **TERMS)
            with pytest.raises(error, match=r"prompts must be|max_concurrent must be"):
                _ = [each async for each in its.agent_rounds(prompts or data(3), run=None, **options)]
            assert (await its.refresh()).open_round is None

    within(ask())
