"""Rounds of sessions over a real server of an emulated device: agents race, prompts come back, a kill loses none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.engine.conftest import Server, emulating, serve_command
from tests.support.waiting import WAIT_S
from vllm_rollout import AgentSession, AsyncRolloutClient, RolloutError
from vllm_rollout.parts.rounds.with_sessions.client.agent_rounds import AgentRound

DEVICE = {"step": {"ms": 4.0}, "lengths": {"log_normal": {"mean": 20, "sigma": 0.3}}}
TERMS = {"prompt_speculation": 1.5, "response_speculation": 1.5, "sessions": {"max_turns": 4}}
LONG = 1500
"""Tokens of a turn that no round waits for: 6 s."""


async def two_turns(session: AgentSession, num_tokens: int) -> float:
    prompt = list(range(60, 160))
    for _ in range(2):
        xargs = {"emulate_lengths": num_tokens}
        answer = await session.complete(prompt, return_token_ids=True, max_tokens=1800, vllm_xargs=xargs)
        prompt += [*answer["choices"][0]["token_ids"], 71, 72, 73]
    return float(session.number)


def test_a_killed_server_runs_the_same_round_anew_and_every_prompt_comes_back_once(tiny_model: str, tmp_path: Path):
    command = serve_command(
        tiny_model, *emulating(tmp_path, DEVICE), "--max-model-len", "2048", "--rollout-state", str(tmp_path / "state")
    )
    prompts = [{"id": f"q{i}", "prompt": f"question {i}", "data": {"long": i in (1, 3)}} for i in range(5)]
    seen: Counter[str] = Counter()

    async def run(session: AgentSession) -> float:
        seen[session.prompt["id"]] += 1
        is_long = session.prompt["data"]["long"] and seen[session.prompt["id"]] <= 3
        return await two_turns(session, LONG if is_long else 5)

    async def stuck(session: AgentSession) -> float:
        await session.complete([60, 61, 62], max_tokens=1800, vllm_xargs={"emulate_lengths": 5})
        await asyncio.Event().wait()
        return 0.0

    async def rounds(url: str) -> list[AgentRound]:
        async with AsyncRolloutClient(url, num_retries=0) as client:
            its = await client.run(2, 2, id="a", **TERMS)
            return [each async for each in its.agent_rounds(prompts[3:], run=run, epoch=0)]

    async def begin_and_be_killed(server: Server) -> None:
        async with AsyncRolloutClient(server.url, num_retries=0) as client:
            its = await client.run(2, 2, id="a", **TERMS)
            async with aclosing(its.agent_rounds(prompts[:3], run=stuck, epoch=0, patience_s=0)) as rounds:
                first = asyncio.ensure_future(anext(rounds))
                async with asyncio.timeout(WAIT_S):
                    while not (opened := (await its.refresh()).open_round) or len(opened.groups) < 3:
                        await asyncio.sleep(0.1)
                os.killpg(server._process.pid, signal.SIGKILL)
                with pytest.raises(RolloutError):
                    await first

    with Server(command, tmp_path / "first.log") as server:
        asyncio.run(begin_and_be_killed(server))
    with Server(command, tmp_path / "second.log") as server:
        found = asyncio.run(rounds(server.url))
    first = found[0]
    assert (first.summary.round, first.summary.kind, first.summary.deferred) == (0, "short", ["q1"])
    back = Counter(group.prompt["id"] for each in found for group in each.groups)
    assert back == {f"q{i}": 1 for i in range(5)}
    for each in found:
        for group in each.groups:
            assert (group.status, [len(of.turns) for of in group.trajectories]) == ("complete", [2, 2])
            assert all(sum(segment.mask) == of.num_tokens for of in group.trajectories for segment in of.segments)
