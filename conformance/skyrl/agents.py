"""Agents of SkyRL: its SkyRLGymGenerator over an environment of SkyRL-Gym with a tool, by its client, at our server.

SkyRL sends the id of a trajectory, `UID_REPETITION`, as X-Session-ID with every turn.
"""

from __future__ import annotations

import asyncio
import typing
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import typing_extensions

from conformance import calculator
from conformance.agents import GROUP_SIZE, LONG, QUESTION, ROLES, SHORT, TURNS, Role, Sessions, Tool, race
from conformance.checks import Kit, check
from conformance.recording import Recorder

typing.TypedDict = typing_extensions.TypedDict  # skyrl's own models need it on Python 3.11, or pydantic refuses them
import skyrl_gym  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient  # noqa: E402
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.generators.base import BatchMetadata, TrajectoryID  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl.train.generators.utils import prepare_generator_input  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from skyrl_gym.tools.core import ToolGroup, tool  # noqa: E402

from vllm_rollout.integrations.skyrl import RacingGymGenerator  # noqa: E402

FLAGS = ("--enable-scale-out",)
ENVIRONMENT = "conformance_calculator"
CHAT = [{"role": "user", "content": QUESTION}]
SAMPLING = {"temperature": 1.0, "logprobs": 0, "skip_special_tokens": True}
NUM_PROMPTS, SIZE, REDUNDANCY = 2, 2, 2


class CalculatorTools(ToolGroup):
    def __init__(self) -> None:
        super().__init__("calculator")

    @tool
    def calculate(self, terms: str) -> str:
        return calculator.calculate(terms)


class CalculatorEnvironment(BaseTextEnv):
    """Each turn but the last is a call of its tool. Its reward is 1 for the last one."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        self.max_turns = extras["max_turns"]
        self.wait: Callable[[], None] = extras.get("wait", lambda: None)
        self.closed: list[Any] = extras.get("closed", [])
        self.init_tool_groups([CalculatorTools()])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns == self.max_turns
        observations = []
        if not done:
            self.wait()
            observations = [{"role": "user", "content": self._execute_tool("calculator", "calculate", ["17 + 25"])}]
        return BaseTextEnvStepOutput(observations=observations, reward=float(done), done=done, metadata={})

    def close(self) -> None:
        self.closed.append(self)


skyrl_gym.register(ENVIRONMENT, CalculatorEnvironment)


def config_of(max_tokens: int, **fields: Any) -> GeneratorConfig:
    config = GeneratorConfig(max_turns=TURNS, max_input_length=2000, use_cache_salt=False, **fields)
    config.sampling_params = replace(config.sampling_params, max_generate_length=max_tokens, logprobs=0)
    return config


async def with_generator(
    kit: Kit, url: str, use: Callable[[SkyRLGymGenerator], Any], config: GeneratorConfig, **racing: Any
) -> Any:
    """`use` gets SkyRL's generator, or ours, with SkyRL's client."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(kit.model_path())
    client = RemoteInferenceClient(url, [url], 1, model_name=kit.model_path(), tokenizer=tokenizer)
    kind = RacingGymGenerator if racing else SkyRLGymGenerator
    async with client:
        return await use(kind(config, SkyRLGymConfig(), client, tokenizer, **racing))


def batch_of(sampling: dict[str, Any], phase: Any = "train", **extras: Any) -> Any:
    """As SkyRL's trainer makes it of rows of its data set."""
    rows = [
        {"prompt": CHAT, "env_class": None, "env_extras": extras, "uid": f"row-{number}"}
        for number in range(NUM_PROMPTS)
    ]
    return prepare_generator_input(rows, SIZE, {**SAMPLING, **sampling}, ENVIRONMENT, phase, 1)[0]


@check("unmodified")
def trajectories_are_those_of_stock_vllm(kit: Kit) -> str:
    """SkyRLGymGenerator.generate with a batch of SkyRL's: tokens, masks, rewards, log probabilities."""
    found = []
    for kind in ("rollout", "stock"):
        with kit.recording(kit.server(kind, flags=FLAGS)) as recorder:
            batch = batch_of({"max_tokens": SHORT, "min_tokens": SHORT, "seed": 5})
            output = asyncio.run(
                with_generator(kit, recorder.url, lambda it, batch=batch: it.generate(batch, True), config_of(SHORT))
            )
        validate_generator_output(NUM_PROMPTS * SIZE, output)
        found.append({name: output[name] for name in ("response_ids", "loss_masks", "rewards", "stop_reasons")})
        names = [request["headers"].get("x-session-id") for request in turns_of(recorder)]
        asked = [each.to_string() for each in batch["trajectory_ids"]]
        assert sorted(names) == sorted(asked * TURNS), names
        finished = [status for request, status in answered(recorder) if request["path"].startswith("/finish_session")]
        assert finished == [404] * len(asked), finished
    assert found[0] == found[1]
    num_policy, num_all = (sum(map(sum, found[0]["loss_masks"])), sum(map(len, found[0]["response_ids"])))
    return (
        f"{len(asked)} trajectories of {TURNS} turns with a tool between them, the same {num_all} tokens, of which "
        f"{num_policy} are the policy's. Each turn has X-Session-ID, {asked[0]!r} and so on: the same ones in every "
        "epoch. /finish_session, which is of SkyRL's router, is a 404 that it shrugs off"
    )


def turns_of(recorder: Recorder) -> list[dict[str, Any]]:
    return [request for request in recorder.requests if request["path"] == "/inference/v1/generate"]


def answered(recorder: Recorder) -> list[tuple[dict[str, Any], int]]:
    return list(zip(recorder.requests, recorder.statuses, strict=True))


@check("on")
def trajectories_of_a_group_race(kit: Kit) -> dict[str, Any]:
    """SkyRL's agent loop as it is, with a group's name among its sampling parameters: what becomes of losers."""
    server = kit.server(flags=FLAGS)
    group = Sessions(server.url, api_key=None)
    group.id = uuid.uuid4().hex
    fields = {"rollout_group_id": group.id, "rollout_group_size": GROUP_SIZE, "rollout_num_candidates": len(ROLES)}
    trajectories = {f"{group.id}_{number}": TrajectoryID(group.id, number) for number in range(len(ROLES))}
    ids: dict[str, Role] = dict(zip(trajectories, ROLES, strict=True))

    async def use(generator: SkyRLGymGenerator) -> list[Any]:
        loop = asyncio.get_running_loop()

        async def play(id: str, role: Role, wait: Tool) -> Any:
            def blocking() -> None:
                asyncio.run_coroutine_threadsafe(wait(), loop).result()

            num = LONG if role == "in a turn" else SHORT
            sampling = {**SAMPLING, "max_tokens": num, "min_tokens": num}
            sampling["extra_args"] = {**fields, "rollout_cut_turn": "goes_on"}
            return await generator.agent_loop(
                CHAT, ENVIRONMENT, {"wait": blocking}, num, 2000, sampling, trajectories[id]
            )

        return await race(group, ids, play)

    outputs = asyncio.run(with_generator(kit, server.url, use, config_of(LONG)))
    numbers = group.assert_raced(ids)
    print([(o.stop_reason, len(o.response_ids), len(o.loss_mask), len(o.rollout_logprobs or [])) for o in outputs])
    for id, output in zip(ids, outputs, strict=True):
        (segment,) = group.trajectory(id)["segments"]
        start = len(output.prompt_ids)
        print(id, ids[id], len(segment["token_ids"]) - start, sum(segment["mask"]), sum(output.loss_mask))
    return {"detail": "", **numbers}


@check("on")
def racing_generator_returns_those_that_finish(kit: Kit) -> dict[str, Any]:
    """RacingGymGenerator: SkyRL gets as many trajectories as it asked for, and none that has lost."""
    server, closed = kit.server(flags=FLAGS), []
    max_tokens = 400

    async def use(generator: SkyRLGymGenerator) -> tuple[Any, Any]:
        sampling = {"max_tokens": max_tokens}
        batches = batch_of(sampling, closed=closed), batch_of({**sampling, "temperature": 0.0}, "eval")
        return await generator.generate(batches[0], True), await generator.generate(batches[1], True)

    with kit.recording(server) as recorder:
        output, evaluated = asyncio.run(
            with_generator(kit, recorder.url, use, config_of(max_tokens), redundancy=REDUNDANCY)
        )
    for each in (output, evaluated):
        validate_generator_output(NUM_PROMPTS * SIZE, each)
    print(output["stop_reasons"], recorder.requests[:3])
    return {"detail": ""}
