"""Trajectories of SkyRL that race, without SkyRL: its generator is a small one that calls what ours overrides."""

from __future__ import annotations

import asyncio
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest

from tests.tools.integrations.conftest import Beside
from vllm_rollout import SessionLost

THEIRS = "skyrl.train.generators.skyrl_gym_generator"


class Environment:
    """Ends after two turns. Those beyond `quick` wait in their first step until they are closed."""

    made: ClassVar[list[Environment]] = []
    quick = 100

    def __init__(self) -> None:
        self.made.append(self)
        self.number, self.turns, self.closed = len(self.made), 0, threading.Event()

    def step(self, action: str) -> tuple[str, bool]:
        self.turns += 1
        if self.number > self.quick:
            assert self.closed.wait(60)
        return f"\n{action} again", self.turns == 2

    def close(self) -> None:
        assert not self.closed.is_set(), "once"
        self.closed.set()


class Client:
    """A client like SkyRL's, at an endpoint for text."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.sessions: list[str] = []
        self.finished: list[str] = []

    def get_endpoint_url(self) -> str:
        return self.url

    async def generate(self, input_batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        (session,) = input_batch["session_ids"]
        self.sessions.append(session)
        async with httpx.AsyncClient(base_url=self.url, headers={"X-Session-ID": session}) as http:
            body = {"prompt": input_batch["prompt"], "logprobs": 0, "vllm_xargs": input_batch["xargs"]}
            (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
        return {"responses": [choice["text"]], "stop_reasons": [choice["finish_reason"]]}

    async def finish_session(self, session_id: str) -> None:
        self.finished.append(session_id)


class SkyRLGymGenerator:
    """A stand-in for SkyRL's generator."""

    reward: Any = (0.0, 2.0)

    def __init__(self, config: Any, client: Client) -> None:
        self.batched, self.inference_engine_client = config.batched, client

    async def _run_in_executor_if_available(self, func: Any, *args: Any) -> Any:
        return await asyncio.to_thread(func, *args)

    async def agent_loop(self, prompt: str, extras: dict[str, Any], trajectory_id: Any = None) -> Any:
        session_id, text, done = f"{trajectory_id.instance_id}_{trajectory_id.repetition_id}", prompt, False
        assert "used" not in extras, "each trajectory has its own"
        extras["used"] = True
        environment, xargs = Environment(), {"rollout_group_id": session_id, "rollout_group_size": 1}
        try:
            while not done:
                batch = {"prompt": text, "session_ids": [session_id], "xargs": {} if "-" in prompt else xargs}
                output = await self.inference_engine_client.generate(batch, model="m")
                said, done = await self._run_in_executor_if_available(environment.step, output["responses"][0])
                text += output["responses"][0] + said
            await self._run_in_executor_if_available(environment.close)
            return SimpleNamespace(reward=list(self.reward), prompt=prompt, number=environment.number)
        finally:
            await self.inference_engine_client.finish_session(session_id)

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> list[Any]:
        calls = zip(*(input_batch[name] for name in ("prompts", "env_extras", "trajectory_ids")), strict=True)
        return list(await asyncio.gather(*(self.agent_loop(p, e, trajectory_id=t) for p, e, t in calls)))


@pytest.fixture
def skyrl(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(Environment, "made", [])
    return beside("vllm_rollout.integrations.skyrl", {THEIRS: {"SkyRLGymGenerator": SkyRLGymGenerator}})


def batch(phase: str, prompts: list[str], n: int = 2) -> dict[str, Any]:
    ids = [SimpleNamespace(instance_id=prompt, repetition_id=number) for prompt in prompts for number in range(n)]
    return {
        "prompts": [each.instance_id for each in ids],
        "env_extras": [{} for _ in ids],
        "trajectory_ids": ids,
        "batch_metadata": SimpleNamespace(training_phase=phase),
    }


def test_a_training_batch_races_and_an_evaluation_after_it_does_not(skyrl, url, turns):
    client = Client(url)

    async def both() -> tuple[list[Any], list[Any]]:
        generator = skyrl.RacingGymGenerator(SimpleNamespace(batched=False), client, redundancy=1)
        return (
            await generator.generate(batch("train", ["p-", "q-"])),
            await generator.generate(batch("eval", ["p", "q"], 1)),
        )

    trained, evaluated = asyncio.run(both())
    assert [output.prompt for output in trained] == ["p-", "p-", "q-", "q-"]
    assert len({output.number for output in trained}) == 4
    groups = [group for group in turns.service._groups.values() if group.declared is not None]
    assert [(group.terms.group_size, group.terms.num_candidates) for group in groups] == [(2, 3)] * 2
    rewards = [each.reward for group in groups for each in group.race.sessions.values()]
    assert {reward for reward in rewards if reward is not None} == {2.0}
    assert [output.prompt for output in evaluated] == ["p", "q"]
    assert sorted(name for name in client.sessions if "_" in name) == ["p_0", "p_0", "q_0", "q_0"]
    assert sorted(client.finished) == ["p_0", "q_0"], "of races the server knows already"


def test_losers_reach_nobody_and_their_environments_are_closed(skyrl, url, monkeypatch):
    monkeypatch.setattr(Environment, "quick", 2)
    generator = skyrl.RacingGymGenerator(SimpleNamespace(batched=False), Client(url), redundancy=2)
    outputs = asyncio.run(generator.generate(batch("train", ["p-"])))
    assert sorted(output.number for output in outputs) == [1, 2]
    assert [environment.closed.is_set() for environment in Environment.made] == [True] * 4
    assert generator._environments == {}


def test_an_answer_of_a_session_that_has_lost_ends_its_trajectory(skyrl):
    async def generate(batch: Any, model: Any) -> dict[str, Any]:
        assert batch == {"session_ids": ["s"]}
        return {"stop_reasons": ["abort"], "responses": [""]}

    async def turn() -> None:
        skyrl._session.set(SimpleNamespace(id="s"))
        await skyrl.SessionClient(SimpleNamespace(generate=generate)).generate({"session_ids": ["p_0"]})

    with pytest.raises(SessionLost):
        asyncio.run(turn())


def test_a_group_that_stays_incomplete_and_batches_without_loops_are_refused(skyrl, url, monkeypatch):
    with pytest.raises(ValueError, match=r"generator\.batched must be false"):
        skyrl.RacingGymGenerator(SimpleNamespace(batched=True), Client(url), redundancy=2)

    def broken(self: Environment, action: str) -> None:
        raise RuntimeError("no sandbox")

    monkeypatch.setattr(Environment, "step", broken)
    generator = skyrl.RacingGymGenerator(SimpleNamespace(batched=False), Client(url), redundancy=0)
    with pytest.raises(RuntimeError, match="has 0 conversations, 2 are needed"):
        asyncio.run(generator.generate(batch("train", ["p-"])))


@pytest.mark.parametrize("reward", [2.0, [0.5, 1.5]])
def test_rewards_are_summed_over_tokens_and_steps(skyrl, reward):
    step = SimpleNamespace(reward=reward)
    assert skyrl.reward_of(step) == 2.0
    assert skyrl.reward_of(SimpleNamespace(step_outputs=[step, step])) == 4.0
