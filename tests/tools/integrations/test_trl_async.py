"""AsyncGRPO's conversations that race, without TRL: its loop is a small one that calls what ours overrides."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.support.waiting import wait_until
from tests.tools.integrations.conftest import Beside

THEIRS = "trl.experimental.async_grpo.async_rollout_worker"


@dataclass
class RolloutGroup:
    completions_ids: list[list[int]]
    reward_kwargs: dict[str, list[Any]] = field(default_factory=dict)
    env_rewards: list[float] = field(default_factory=list)
    group_id: int = 0


class Loop:
    """As TRL's: conversations of two turns, with a tool between them that lasts as long as `tool` says."""

    request_timeout = 60

    def __init__(self, num_generations: int, url: str, tool: Any = lambda prompt: asyncio.sleep(0)) -> None:
        self.num_generations, self.url, self.tool = num_generations, url, tool
        self.paths: list[str] = []

    async def _generate_one(self, prompt: str, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        first = await self._post("/v1/completions", {"prompt": prompt, "logprobs": 0}, 60)
        await self.tool(prompt)
        text = f"{prompt}{first['choices'][0]['text']}\nmore"
        second = await self._post("/v1/completions", {"prompt": text, "logprobs": 0}, 60)
        return [], second["choices"][0]["token_ids"], [], 1, 0, None

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        self.paths.append(path)
        async with httpx.AsyncClient(base_url=self.url, timeout=timeout) as http:
            return (await http.post(path, json=payload)).raise_for_status().json()

    async def _score_group(self, group: RolloutGroup) -> RolloutGroup:
        return group


@pytest.fixture
def trl(beside: Beside) -> ModuleType:
    worker = type("AsyncRolloutWorker", (), {"_loop_cls": Loop})
    theirs = {"_AsyncRolloutLoop": Loop, "RolloutGroup": RolloutGroup, "AsyncRolloutWorker": worker}
    return beside("vllm_rollout.integrations.trl_async", {THEIRS: theirs})


def test_the_first_to_finish_are_returned_and_what_lost_is_empty(trl, url, turns):
    """Two finish; one is at its tool until then and asks again, one is amid a turn."""

    async def play() -> tuple[list[Any], Any]:
        is_over = asyncio.Event()

        async def tool(prompt: str) -> None:
            await (is_over.wait() if "slow" in prompt else asyncio.to_thread(wait_until, lambda: turns._stops))

        loop = trl.RacingRolloutWorker._loop_cls(group_size=2, num_generations=4, url=url, tool=tool)
        tasks = [asyncio.create_task(loop._generate_one(prompt, {}, [], 7)) for prompt in ("a", "b", "slow", "\nlong")]
        found = await asyncio.gather(*tasks[:2], tasks[3])
        is_over.set()
        return [*found, await tasks[2]], loop

    results, loop = asyncio.run(play())
    assert [bytes(result[1]).decode() for result in results] == ["so more", "so more", "", ""]
    assert results[2:] == [trl.LOST] * 2
    (group,) = turns.service._groups.values()
    assert (group.id, group.terms.group_size, group.terms.num_candidates) == (f"{loop._name}-7", 2, 4)
    assert sum("finish" in path for path in loop.paths) == 2
    assert turns.num_stopped == 1


@pytest.mark.parametrize(("given", "kept"), [([1.0, 2.0, 3.0], [1.0, 3.0]), ([], [])])
def test_only_winners_are_scored(trl, given, kept):
    loop = trl.RacingRolloutLoop(group_size=2, num_generations=3, url="")
    group = RolloutGroup([[1], [], [2]], {"x": ["a", "b", "c"]}, given, 5)
    assert asyncio.run(loop._score_group(group)) == RolloutGroup([[1], [2]], {"x": ["a", "c"]}, kept, 5)


def test_a_conversation_that_finished_too_late_has_lost(trl, url):
    loop = trl.RacingRolloutLoop(group_size=1, num_generations=2, url=url)

    async def play() -> list[Any]:
        both_are_there = asyncio.Barrier(2)
        loop.tool = lambda prompt: both_are_there.wait()
        return await asyncio.gather(*(loop._generate_one("a", {}, [], 0) for _ in range(2)))

    assert sorted(len(result[1]) for result in asyncio.run(play())) == [0, len("so more")]


def test_an_answer_that_was_aborted_for_another_reason_is_trl_s(trl, monkeypatch):
    answer = {"choices": [{"finish_reason": "abort", "stop_reason": None}]}
    monkeypatch.setattr(Loop, "_post", lambda *_: asyncio.sleep(0, answer))
    loop = trl.RacingRolloutLoop(group_size=1, num_generations=1, url="")
    assert asyncio.run(loop._post("/v1/completions", {}, 1)) == answer


@pytest.mark.parametrize("group_size", [0, 4])
def test_a_group_is_no_larger_than_the_conversations_that_begin(trl, group_size):
    with pytest.raises(ValueError, match=r"group_size must be in \[1, num_generations \(3\)\]"):
        trl.RacingRolloutLoop(group_size=group_size, num_generations=3, url="")
