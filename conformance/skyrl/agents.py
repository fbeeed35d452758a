"""Agents of SkyRL: its SkyRLGymGenerator and its client, with an environment of SkyRL-Gym that has a tool, at our
server.

SkyRL sends the id of a trajectory, `UID_REPETITION`, as X-Session-ID with every turn.
"""

from __future__ import annotations

import asyncio
import typing
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import typing_extensions

from conformance import calculator
from conformance.agents import GROUP_SIZE, LONG, QUESTION, ROLES, SHORT, TURNS, Role, Sessions, Tool, race
from conformance.checks import Kit, check, refusal

typing.TypedDict = typing_extensions.TypedDict  # skyrl's own models need it on Python 3.11, or pydantic refuses them
import skyrl_gym  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient  # noqa: E402
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
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
STOPS = [*range(3, 512, 32)]
"""The tiny model samples one of these tokens about every 32 tokens."""
NUM_PROMPTS, SIZE, REDUNDANCY = 2, 2, 2


class CalculatorTools(ToolGroup):
    def __init__(self) -> None:
        super().__init__("calculator")

    @tool
    def calculate(self, terms: str) -> str:
        return calculator.calculate(terms)


class CalculatorEnvironment(BaseTextEnv):
    """Each turn but the last is a call of its tool. The last turn earns a reward of 1."""

    made: ClassVar[list[CalculatorEnvironment]] = []

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        self.max_turns = extras["max_turns"]
        self.wait: Callable[[], None] = extras.get("wait", lambda: None)
        self.is_closed = False
        self.made.append(self)
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
        self.is_closed = True


skyrl_gym.register(ENVIRONMENT, CalculatorEnvironment)


def config_of(max_tokens: int, **fields: Any) -> GeneratorConfig:
    config = GeneratorConfig(max_turns=TURNS, max_input_length=2000, use_cache_salt=False, **fields)
    config.sampling_params = replace(config.sampling_params, max_generate_length=max_tokens, logprobs=0)
    return config


async def with_generator(
    kit: Kit, url: str, use: Callable[[SkyRLGymGenerator], Any], config: GeneratorConfig, **racing: Any
) -> Any:
    """Call `use` with SkyRL's generator, or with ours if `racing` has settings, over SkyRL's client."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(kit.model_path())
    client = RemoteInferenceClient(url, [url], 1, model_name=kit.model_path(), tokenizer=tokenizer)
    kind = RacingGymGenerator if racing else SkyRLGymGenerator
    async with client:
        return await use(kind(config, SkyRLGymConfig(), client, tokenizer, **racing))


def batch_of(sampling: dict[str, Any], phase: Any = "train", n: int = SIZE) -> Any:
    """A batch as SkyRL's trainer makes it from rows of its data set."""
    rows = [
        {"prompt": CHAT, "env_class": None, "env_extras": {}, "uid": f"row-{number}"} for number in range(NUM_PROMPTS)
    ]
    return prepare_generator_input(rows, n, {**SAMPLING, **sampling}, ENVIRONMENT, phase, 1)[0]


@check("unmodified")
def trajectories_are_those_of_stock_vllm(kit: Kit) -> str:
    """Tokens, masks, rewards and log probabilities of SkyRLGymGenerator.generate with a batch of SkyRL's."""
    found = []
    for kind in ("rollout", "stock"):
        with kit.recording(kit.server(kind, flags=FLAGS)) as recorder:
            batch = batch_of({"max_tokens": SHORT, "min_tokens": SHORT, "seed": 5})
            output = asyncio.run(
                with_generator(kit, recorder.url, lambda it, batch=batch: it.generate(batch, True), config_of(SHORT))
            )
        validate_generator_output(NUM_PROMPTS * SIZE, output)
        found.append({name: output[name] for name in ("response_ids", "loss_masks", "rewards", "stop_reasons")})
        turns = [request for request in recorder.requests if request["path"] == "/inference/v1/generate"]
        names = [request["headers"].get("x-session-id") for request in turns]
        asked = [each.to_string() for each in batch["trajectory_ids"]]
        assert sorted(names) == sorted(asked * TURNS), names
        assert recorder.statuses.count(404) == len(recorder.requests) - len(turns) == len(asked), recorder.statuses
    assert found[0] == found[1]
    num_policy, num_all = (sum(map(sum, found[0]["loss_masks"])), sum(map(len, found[0]["response_ids"])))
    return (
        f"{len(asked)} trajectories of {TURNS} turns with a tool between them, the same {num_all} tokens, of which "
        f"{num_policy} are the policy's. Each turn has X-Session-ID, {asked[0]!r} and so on: the same ones in every "
        "epoch. /finish_session, which is of SkyRL's router, is a 404 that it shrugs off"
    )


@check("on")
def trajectories_of_a_group_race(kit: Kit) -> dict[str, Any]:
    """SkyRL's agent loop as it is, with a group id among its sampling parameters: how losers end."""
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

            num = {"max_tokens": LONG, "min_tokens": LONG} if role == "in a turn" else {"stop_token_ids": STOPS}
            sampling = {**SAMPLING, "max_tokens": 400, **num, "extra_args": {**fields, "rollout_cut_turn": "goes_on"}}
            return await generator.agent_loop(
                CHAT, ENVIRONMENT, {"wait": blocking}, LONG, 2000, sampling, trajectories[id]
            )

        return await race(group, ids, play)

    outputs = asyncio.run(with_generator(kit, server.url, use, config_of(LONG)))
    numbers = group.assert_raced(ids)
    for (id, role), output in zip(ids.items(), outputs, strict=True):
        token_ids, mask = generated(group, id, output.prompt_ids)
        if role == "finishes":
            assert (output.response_ids, output.loss_mask) == (token_ids, mask), (id, output)
            assert len(output.rollout_logprobs) == len(mask)
        else:  # the stopped tokens, then tokens of the tool, without a further turn
            assert output.response_ids[: len(token_ids)] == token_ids, (id, output)
            assert sum(output.loss_mask) == sum(mask), (id, output)
        assert (output.stop_reason == "abort") == (role != "finishes"), (id, output)
        assert sum(output.reward) == 1.0, "the environment has rewarded losers too, for empty answers"
    said = refusal(lambda: validate_generator_output(len(outputs), as_batch(outputs)))
    assert "Response ids and rollout logprobs must have the same length" in said, said
    advantages = advantages_of(outputs)
    assert advantages[0] > 1, advantages
    return {
        "detail": f"`rollout_group_id`, … in `extra_args`: {GROUP_SIZE} of {len(ROLES)} finish, with the tokens and "
        f"masks that GET /v1/sessions has. Two were stopped after {numbers['stopped_after_tokens']} of {LONG} tokens "
        "of their first turn, two asked again after the race, and no later turn of a loser reached the engine; their "
        "environments went on to the end, and gave them 1. Back come all of them, losers with stop reason abort and "
        f"fewer log probabilities than tokens, which SkyRL's trainer refuses: {said[:110]!r}. Without log "
        "probabilities, with zero_reward_on_non_stop, their zeros are in the group's mean: finishers, all rewarded 1, "
        f"have an advantage of {advantages[0]:.2f} instead of 0",
        **numbers,
    }


def generated(group: Sessions, id: str, prompt_ids: list[int]) -> tuple[list[int], list[int]]:
    """Tokens and masks of a session after its prompt."""
    (segment,) = group.trajectory(id)["segments"]
    assert segment["token_ids"][: len(prompt_ids)] == prompt_ids
    return segment["token_ids"][len(prompt_ids) :], segment["mask"][len(prompt_ids) :]


def as_batch(outputs: list[Any]) -> dict[str, Any]:
    """The batch that `SkyRLGymGenerator.generate` makes of these outputs."""
    names = {"prompt_token_ids": "prompt_ids", "response_ids": "response_ids", "loss_masks": "loss_mask"}
    names |= {"rewards": "reward", "stop_reasons": "stop_reason", "rollout_logprobs": "rollout_logprobs"}
    return {name: [getattr(output, field) for output in outputs] for name, field in names.items()}


def advantages_of(outputs: list[Any]) -> list[float]:
    """SkyRL's advantages of one group, with `generator.zero_reward_on_non_stop`."""
    import numpy
    import torch
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage

    rewards = [[float(sum(output.reward)) if output.stop_reason == "stop" else 0.0] for output in outputs]
    index = numpy.array(["q"] * len(outputs))
    return compute_grpo_outcome_advantage(torch.tensor(rewards), torch.ones(len(outputs), 1), index)[0][:, 0].tolist()


@check("on")
def fields_of_joined_groups_race_first_turns_only(kit: Kit) -> dict[str, Any]:
    """`additional_kwargs={extra_args: {rollout_group_size, rollout_num_candidates}}` with several turns."""
    num = SIZE + REDUNDANCY
    sampling = {"max_tokens": 400, "min_tokens": 8, "stop_token_ids": STOPS}
    sampling["extra_args"] = {"rollout_group_size": SIZE, "rollout_num_candidates": num}
    batch = batch_of(sampling, n=num)
    with kit.recording(kit.server(flags=FLAGS)) as recorder:
        output = asyncio.run(with_generator(kit, recorder.url, lambda it: it.generate(batch, True), config_of(400)))
    turns = [request for request in recorder.requests if request["path"] == "/inference/v1/generate"]
    assert len(turns) == NUM_PROMPTS * num * TURNS
    assert "abort" not in output["stop_reasons"], output["stop_reasons"]
    first = [ids[: mask.index(0)] for ids, mask in zip(output["response_ids"], output["loss_masks"], strict=True)]
    num_cut = sum(ids[-1] not in STOPS for ids in first)
    assert num_cut > 0, first
    return {
        "detail": f"{num_cut} of {len(first)} trajectories have a first turn that lost and was cut, go on with "
        "their next ones, which race nobody, and end as any other: nothing marks them"
    }


@check("on")
def racing_generator_returns_those_that_finish(kit: Kit) -> dict[str, Any]:
    """With RacingGymGenerator, SkyRL gets as many trajectories as it asked for, and none that lost."""
    server, made = kit.server(flags=FLAGS), CalculatorEnvironment.made
    made.clear()
    max_tokens = 400

    async def use(generator: SkyRLGymGenerator) -> tuple[Any, Any]:
        sampling = {"max_tokens": max_tokens, "stop_token_ids": STOPS}
        train, evaluate = batch_of(sampling), batch_of({**sampling, "temperature": 0.0}, "eval")
        return await generator.generate(train, True), await generator.generate(evaluate, True)

    with kit.recording(server) as recorder:
        output, evaluated = asyncio.run(
            with_generator(kit, recorder.url, use, config_of(max_tokens), redundancy=REDUNDANCY)
        )
    for each in (output, evaluated):
        validate_generator_output(NUM_PROMPTS * SIZE, each)
        assert set(each["stop_reasons"]) <= {"stop", "length"}, each["stop_reasons"]
    at_server = Sessions(server.url, api_key=None)
    groups = list(at_server.declared_by(recorder.requests))
    assert [group["status"] for group in groups] == ["complete"] * NUM_PROMPTS, groups
    states = [session["state"] for group in groups for session in group["sessions"]]
    assert Counter(states) == {"finished": NUM_PROMPTS * SIZE, "surplus": NUM_PROMPTS * REDUNDANCY}, groups
    prompt_ids = output["prompt_token_ids"][0]
    expected = [generated(at_server, id, prompt_ids) for group in groups for id in group["selected"]]
    assert sorted(zip(output["response_ids"], output["loss_masks"], strict=True)) == sorted(expected)
    rewards = [session["reward"] for group in groups for session in group["sessions"] if session["state"] == "finished"]
    assert rewards == [1.0] * len(expected) == [sum(reward) for reward in output["rewards"]]
    assert [environment.is_closed for environment in made] == [True] * (NUM_PROMPTS * (2 * SIZE + REDUNDANCY))
    lengths = [sum(mask) for mask in output["loss_masks"]]
    return {
        "detail": f"`RacingGymGenerator(…, redundancy={REDUNDANCY})`: of {NUM_PROMPTS} prompts {SIZE} of "
        f"{SIZE + REDUNDANCY} trajectories each, of {lengths} tokens, which with their masks are those that GET "
        "/v1/sessions has; rewards reach the server, losers are cancelled and their environments closed. An "
        "evaluation after it runs as SkyRL's",
        "policy_tokens": lengths,
    }
