"""SkyRL's fully asynchronous training at our server, whose weights change while rollouts run.

SkyRL's own loop runs (`FullyAsyncRayPPOTrainer.train` in `FullyAsyncTrainerSim`, which trains nothing), with its
staleness manager, generator, client and update of weights (`WorkerDispatch.save_weights_for_sampler`). Weights come out
of a folder by the three calls of SkyRL's sender (`conformance.skyrl.extension`), because its own ways need a GPU.
"""

from __future__ import annotations

import asyncio
import pickle
import typing
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import typing_extensions

from conformance.agents import TURNS, Sessions
from conformance.asynchronous import EXPECTED_GAP, FLAGS, Span, assert_exact, make_versions, num_straddling
from conformance.checks import Kit, assert_raced, check
from conformance.recording import Recorder
from conformance.skyrl.agents import ENVIRONMENT, STOPS

typing.TypedDict = typing_extensions.TypedDict  # skyrl's own models need it on Python 3.11, or pydantic refuses them
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient  # noqa: E402
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402

from vllm_rollout.integrations.skyrl import RacingGymGenerator  # noqa: E402

EXTENSION = "conformance.skyrl.extension.Extension"
SERVER = (*FLAGS, "--enable-scale-out", "--rollout-compat", "skyrl", "--worker-extension-cls", EXTENSION)
WITH_EXTENSION = {"PYTHONPATH": str(Path(__file__).parents[2])}
NUM_STEPS, BATCH, STALENESS = 8, 2, 2
"""Steps, groups per step, and steps by which a group may be older."""
NUM_VERSIONS = NUM_STEPS + 1
"""SkyRL also gives its weights before the first step."""
LEAST_VERSIONS = 4
"""Versions that have to sample tokens: three updates come while trajectories run."""
GROUP_SIZE, REDUNDANCY = 2, 2
LIMIT_S = 300
PROBE = [*range(20, 220)]
QUESTION = "How much is the sum of these numbers? " + " ".join(str(number) for number in range(40))


class Prompts(list):  # type: ignore[type-arg]
    """SkyRL's data set: as many prompts as are trained."""

    collate_fn = staticmethod(list)


class Tracker:
    def log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def finish(self) -> None:
        pass


class Dispatch(WorkerDispatch):
    """SkyRL's update of weights, whose sender reads them from a folder. After each update, the server is probed."""

    def __init__(self, config: SkyRLTrainConfig, client: RemoteInferenceClient, folders: list[Path]) -> None:
        self.cfg, self.colocate_all, self._actor_groups = config, False, {}
        self._inference_engine_client = client
        self._folders = iter(folders)
        self.probes: list[dict[str, Any]] = []

    def get_lcm_dp_size(self) -> int:
        return 1

    def _broadcast_to_inference_engines(self, client: RemoteInferenceClient, model_id: str | None = None) -> None:
        # SkyRL sends a copy of its client to the process of its weights, and blocks its loop until that is done.
        with ThreadPoolExecutor(1) as aside:
            aside.submit(asyncio.run, send(pickle.dumps(client), str(next(self._folders)))).result()

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        client = self._inference_engine_client
        before = str(client.weight_version)
        await super().save_weights_for_sampler(model_id)
        salts = {"without": None, "of_before": before, "of_skyrl": str(client.weight_version), "new": f"new {before}"}
        answers = {name: await probe(client, salt) for name, salt in salts.items()}
        self.probes.append(answers)


async def send(client: bytes, folder: str) -> None:
    """The calls of SkyRL's `BroadcastWeightTransferSender`."""
    copy: RemoteInferenceClient = pickle.loads(client)
    async with copy:
        await copy.start_weight_update(is_checkpoint_format=True)
        await copy.update_weights_nccl({"folder": folder})
        await copy.finish_weight_update()


async def probe(client: RemoteInferenceClient, salt: str | None) -> tuple[list[int], list[float]]:
    sampling = {"temperature": 0, "max_tokens": 4, "logprobs": 0}
    batch: Any = {"prompt_token_ids": [PROBE], "sampling_params": sampling, "cache_salt": salt}
    answer = await client.generate(batch)
    return answer["response_ids"][0], answer["response_logprobs"][0]


class Trainer(FullyAsyncTrainerSim):
    """SkyRL's fully asynchronous trainer, with `Dispatch`."""

    folders: list[Path]

    def init_weight_sync_state(self) -> None:
        self.dispatch = Dispatch(self.cfg, self.inference_engine_client, self.folders)


def config_of(kit: Kit, *, num_turns: int, num_samples: int, min_tokens: int, **extra_args: Any) -> SkyRLTrainConfig:
    config = SkyRLTrainConfig()
    config.trainer.policy.model.path = kit.model_path()
    config.trainer.placement.colocate_all = False
    config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = BATCH
    config.trainer.eval_interval = config.trainer.ckpt_interval = -1
    config.trainer.resume_mode, config.trainer.update_ref_every_epoch = "none", False
    config.trainer.algorithm.policy_loss_type = "rollout_is"
    asynchronous = config.trainer.fully_async
    asynchronous.enabled = asynchronous.simulate_training = True
    asynchronous.simulate_training_step_seconds = 0.2
    asynchronous.max_staleness_steps = STALENESS
    asynchronous.num_parallel_generation_workers = BATCH * (STALENESS + 1)
    config.data.dataloader.num_workers = 0
    config.environment.env_class = ENVIRONMENT
    generator = config.generator
    generator.inference_engine.enable_ray_prometheus_stats = False
    generator.batched, generator.max_turns, generator.max_input_length = False, num_turns, 2000
    generator.n_samples_per_prompt = num_samples
    generator.apply_overlong_filtering = True
    generator.sampling_params.max_generate_length = 600
    generator.sampling_params.logprobs = 0
    generator.sampling_params.additional_kwargs = {"stop_token_ids": STOPS, "min_tokens": min_tokens, **extra_args}
    return config


async def train(config: SkyRLTrainConfig, url: str, folders: list[Path], **racing: Any) -> Dispatch:
    """Train by SkyRL's generator, or by ours if `racing` has settings."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.trainer.policy.model.path)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}. {QUESTION}"}],
            "env_class": None,
            "env_extras": {"max_turns": config.generator.max_turns},
            "uid": f"row-{number}",
        }
        for number in range(NUM_STEPS * BATCH)
    ]
    client = RemoteInferenceClient(url, [url], 1, model_name=config.trainer.policy.model.path, tokenizer=tokenizer)
    kind = RacingGymGenerator if racing else SkyRLGymGenerator
    async with client:
        generator = kind(config.generator, config.environment.skyrl_gym, client, tokenizer, **racing)
        trainer = Trainer(config, Tracker(), tokenizer, Prompts(rows), client, generator)
        trainer.folders = folders
        await trainer.train()
        return trainer.dispatch


def answers_of(recorder: Recorder) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests of trajectories, each with its answer. Probes have no session."""
    return [
        (request, answer["choices"][0])
        for request, answer in recorder.answers
        if request["path"] == "/inference/v1/generate" and "x-session-id" in request["headers"]
    ]


def spans_of(choice: dict[str, Any]) -> tuple[list[int], list[Span]]:
    return choice["token_ids"], [Span(**span) for span in choice["weight_versions"] or ()]


def alike(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> bool:
    return one[0] == other[0] and max(abs(a - b) for a, b in zip(one[1], other[1], strict=True)) < EXPECTED_GAP


def run(kit: Kit, config: SkyRLTrainConfig, **racing: Any) -> tuple[Recorder, Dispatch]:
    """Train over all updates, and assert what holds for every way to race. Nothing may hang."""
    folders = make_versions(Path(kit.model_path()), kit.folder / uuid.uuid4().hex, NUM_VERSIONS)
    with kit.recording(kit.server(flags=SERVER, environment=WITH_EXTENSION)) as recorder:
        dispatch = asyncio.run(asyncio.wait_for(train(config, recorder.url, folders, **racing), LIMIT_S))
    assert len(dispatch.probes) == NUM_VERSIONS
    for each in dispatch.probes:
        assert alike(each["without"], each["new"]), each
        assert alike(each["of_skyrl"], each["new"]), each
    return recorder, dispatch


@check("unmodified")
def fully_async_answers_name_their_versions(kit: Kit) -> dict[str, Any]:
    """SkyRL's fully asynchronous mode without fields of ours."""
    recorder, _ = run(kit, config_of(kit, num_turns=1, num_samples=GROUP_SIZE, min_tokens=200))
    answers = [choice for _, choice in answers_of(recorder)]
    assert len(answers) == NUM_STEPS * BATCH * GROUP_SIZE
    assert {choice["finish_reason"] for choice in answers} <= {"stop", "length"}
    versions = assert_exact([spans_of(choice) for choice in answers], NUM_VERSIONS)
    assert len(versions) >= LEAST_VERSIONS, versions
    straddling = num_straddling([choice["token_ids"] for choice in answers], NUM_VERSIONS)
    assert straddling > 0
    return {
        "detail": f"{len(answers)} of {len(answers)} answers came back over {NUM_VERSIONS} updates, {straddling} of "
        f"them of several versions, which weight_versions name exactly, {len(versions)} in all",
        "num_straddling": straddling,
    }


@check("on")
def fully_async_training_goes_on_over_updates(kit: Kit) -> dict[str, Any]:
    """SkyRL's fully asynchronous mode with trajectories of one turn that race."""
    num = GROUP_SIZE + REDUNDANCY
    race = {"rollout_group_size": GROUP_SIZE, "rollout_num_candidates": num}
    config = config_of(kit, num_turns=1, num_samples=num, min_tokens=200, extra_args=race)
    recorder, dispatch = run(kit, config)
    answers = answers_of(recorder)
    assert len(answers) == NUM_STEPS * BATCH * num
    versions = assert_exact([spans_of(choice) for _, choice in answers], NUM_VERSIONS)
    assert len(versions) >= LEAST_VERSIONS, versions
    groups = defaultdict(list)
    for request, choice in answers:
        groups[request["headers"]["x-session-id"].rsplit("_", 1)[0]].append(choice["finish_reason"])
    for reasons in groups.values():
        assert_raced(reasons, GROUP_SIZE)
    straddling = num_straddling([choice["token_ids"] for _, choice in answers], NUM_VERSIONS)
    num_stale = sum(not alike(each["of_before"], each["new"]) for each in dispatch.probes)
    return {
        "detail": f"FullyAsyncRayPPOTrainer.train, {NUM_STEPS} steps, {NUM_VERSIONS} updates by pause, three calls of "
        f"its sender and resume: {len(answers)} of {len(answers)} answers came back, {GROUP_SIZE} of {num} of each "
        f"group finished. {straddling} answers are of several versions: weight_versions name exactly those that "
        f"sampled each token, {len(versions)} in all. SkyRL's client drops them, and SkyRL gives its weights no name. "
        "A request with SkyRL's new salt, or without one, has the log probabilities of the new weights after each "
        f"update. One with the salt of before, as later turns of a trajectory have, differed after {num_stale} of "
        f"{NUM_VERSIONS}",
        "num_straddling": straddling,
        "num_stale_with_old_salt": num_stale,
    }


@check("on")
def racing_generator_trains_fully_async(kit: Kit) -> dict[str, Any]:
    """RacingGymGenerator in the same loop, with trajectories of several turns and `generator.use_cache_salt` false."""
    config = config_of(kit, num_turns=TURNS, num_samples=GROUP_SIZE, min_tokens=60)
    config.generator.use_cache_salt = False
    recorder, _ = run(kit, config, redundancy=REDUNDANCY)
    server = Sessions(kit.server(flags=SERVER, environment=WITH_EXTENSION).url, api_key=None)
    groups = list(server.declared_by(request for request, _ in recorder.answers))
    assert [group["status"] for group in groups] == ["complete"] * (NUM_STEPS * BATCH), groups
    turns = defaultdict(list)
    for request, choice in answers_of(recorder):
        turns[request["headers"]["x-session-id"]].append(choice)
    versions = assert_exact([spans_of(each) for its in turns.values() for each in its], NUM_VERSIONS)
    assert len(versions) >= LEAST_VERSIONS, versions
    finished = [id for group in groups for id in group["selected"]]
    num_of_several = 0
    for id in finished:
        trajectory = server.trajectory(id)
        assert [turn["weight_versions"] for turn in trajectory["turns"]] == [
            each["weight_versions"] for each in turns[id]
        ]
        num_of_several += trajectory["off_policy"]
    assert num_of_several > 0
    return {
        "detail": f"RacingGymGenerator in FullyAsyncRayPPOTrainer.train over {NUM_VERSIONS} updates: {len(groups)} "
        f"groups, {GROUP_SIZE} of {GROUP_SIZE + REDUNDANCY} trajectories of {TURNS} turns each. {num_of_several} of "
        f"{len(finished)} are of several versions, which GET /v1/sessions names exactly for each turn, {len(versions)} "
        "in all. With use_cache_salt false no turn reads KV of older weights",
        "num_of_several_versions": num_of_several,
    }
