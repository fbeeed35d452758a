"""SkyRL's checks of its RemoteInferenceClient, which makes all of SkyRL's requests to servers over HTTP."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import typing_extensions

from conformance.checks import CAP, Kit, Server, Stopped, assert_raced, check, main, metric
from conformance.prime_rl import make_adapter, make_weights
from conformance.recording import Recorder
from conformance.skyrl.agents import (  # noqa: F401 (checks, by their names here)
    fields_of_joined_groups_race_first_turns_only,
    racing_generator_returns_those_that_finish,
    trajectories_are_those_of_stock_vllm,
    trajectories_of_a_group_race,
)
from conformance.skyrl.asynchronous import (  # noqa: F401
    fully_async_answers_name_their_versions,
    fully_async_training_goes_on_over_updates,
    racing_generator_trains_fully_async,
)

typing.TypedDict = typing_extensions.TypedDict  # skyrl's own models need it on Python 3.11, or pydantic refuses them
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)

FLAGS = ("--enable-scale-out",)
EXTENSION = "conformance.skyrl.extension.Extension"
COMPAT = (*FLAGS, "--rollout-compat", "skyrl", "--worker-extension-cls", EXTENSION)
WITH_EXTENSION = {"PYTHONPATH": str(Path(__file__).parents[2])}
PROMPTS = [[1, *range(20 + n, 44 + n)] for n in range(6)]
SAMPLING = {"min_tokens": 1, "max_tokens": 24, "temperature": 1.0, "logprobs": 0, "skip_special_tokens": True}
"""Sampling parameters as SkyRL makes them from its configuration. SkyRL passes unknown fields on."""
ON = "generator.sampling_params.additional_kwargs={extra_args: {rollout_group_size: 2, rollout_num_candidates: 6}}"
Use = Callable[[RemoteInferenceClient], Awaitable[Any]]


@check("unmodified")
def everything_it_generates_is_stock_s(kit: Kit) -> dict[str, Any]:
    """generate (with its /detokenize per sample), sample, chat, completion and tokenize answer as stock vLLM does."""

    async def use(client: RemoteInferenceClient) -> dict[str, Any]:
        model = client.model_name
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": {**SAMPLING, "seed": 7}, "cache_salt": "v1"}
        batch["session_ids"] = [f"session-{n}" for n in range(len(PROMPTS))]
        tinker = {"prompt": {"chunks": [{"tokens": PROMPTS[0]}]}, "num_samples": 4, "include_prompt_logprobs": True}
        tinker |= {"sampling_params": {"temperature": 1.0, "max_tokens": 16, "seed": 3}, "session_id": "s"}
        chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "seed": 1, "max_tokens": 16}
        text = {"model": model, "prompt": PROMPTS[1], "seed": 1, "max_tokens": 16}
        found = {
            "generate": await client.generate(batch),
            "sample": await client.sample({"json": tinker}),
            "chat": (await client.chat_completion({"json": {**chat, "session_id": "s"}}))["choices"],
            "rendered": (await client.render_chat_completion({"json": chat}))["token_ids"],
            "completion": (await client.completion({"json": text}))["choices"],
            "tokens": await client.tokenize(["Hello there", "17 + 25"]),
            "world_size": await client.get_world_size(),
        }
        await client.finish_session("session-0")  # of its router: a 404 here, which it shrugs off
        return found

    answers = {}
    for kind in ("rollout", "stock"):
        answers[kind], recorder = with_client(kit, kit.server(kind, flags=FLAGS), use)
    ours, stock = answers["rollout"], answers["stock"]
    different = [name for name in stock if not alike(ours[name], stock[name])]
    assert different == [], {name: (ours[name], stock[name]) for name in different}
    sessions = {request["headers"].get("x-session-id") for request in recorder.requests}
    assert {f"session-{n}" for n in range(len(PROMPTS))} <= sessions
    num_tokens = sum(map(len, answers["rollout"]["generate"]["response_ids"]))
    return {"detail": f"{', '.join(stock)}: all the same; generate: {len(PROMPTS)} prompts, {num_tokens} tokens"}


@check("unmodified")
def requests_are_kept_over_a_pause(kit: Kit) -> str:
    """SkyRL's weight synchronisation (pause, reset the cache, resume) while requests run."""
    server = kit.server(flags=FLAGS)

    async def use(client: RemoteInferenceClient) -> tuple[list[str], int, int]:
        batch = {"prompt_token_ids": PROMPTS[:2]}
        batch["sampling_params"] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "seed": 5}
        running = asyncio.create_task(client.generate(batch))
        await until_running(server, 2)
        await client.pause_generation()
        before = generated(server)
        await asyncio.sleep(1)
        during = generated(server) - before
        await client.reset_prefix_cache(reset_running_requests=False)
        await client.resume_generation()
        answer = await running
        return answer["stop_reasons"], min(map(len, answer["response_ids"])), during

    (reasons, shortest, during), _ = with_client(kit, server, use)
    assert (reasons, shortest) == (["length", "length"], 1500)
    assert during <= 2 * 64, during
    return f"two requests of 1,500 tokens ended by length; {during} tokens were counted during a second of pause"


@check("on")
def siblings_race(kit: Kit) -> dict[str, Any]:
    async def use(client: RemoteInferenceClient) -> dict[str, Any]:
        group = {"rollout_group_size": 2, "rollout_num_candidates": 6}
        # Siblings without a group's name are those that run at the same time: none ends before the last one has come.
        sampling = {**SAMPLING, "min_tokens": CAP // 2, "max_tokens": CAP, "extra_args": group}
        return await client.generate({"prompt_token_ids": [PROMPTS[0]] * 6, "sampling_params": sampling})

    answer, _ = with_client(kit, kit.server(flags=FLAGS), use)
    reasons = answer["stop_reasons"]
    assert_raced(reasons, 2)
    return {
        "detail": f"`{ON}`: {reasons.count('abort')} of 6 have stop reason abort, which "
        "generator.apply_overlong_filtering takes out of the loss, and generator.zero_reward_on_non_stop gives none "
        "a reward",
        "tokens": [len(ids) for ids in answer["response_ids"]],
    }


@check("on")
def its_worker_extension_works_beside_our_worker(kit: Kit) -> str:
    """Weights by three collective calls to an extension with the names of SkyRL's. Groups still race afterwards."""
    model = Path(kit.model_path())
    server = kit.server(flags=COMPAT, environment=WITH_EXTENSION)
    folder = make_weights(model, kit.folder / "skyrl_step_1")

    async def use(client: RemoteInferenceClient) -> list[Any]:
        greedy = {"prompt_token_ids": PROMPTS[:2], "sampling_params": {"temperature": 0, "max_tokens": 16}}
        found = [(await client.generate({**greedy, "cache_salt": "0"}))["response_ids"]]
        await client.pause_generation()
        await client.start_weight_update()
        await client.update_weights_nccl({"folder": str(folder)})
        await client.finish_weight_update()
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.resume_generation()
        found.append((await client.generate({**greedy, "cache_salt": "1"}))["response_ids"])
        group = {"rollout_group_size": 1, "rollout_num_candidates": 4}
        sampling = {**SAMPLING, "max_tokens": CAP, "extra_args": group}
        race = await client.generate({"prompt_token_ids": [PROMPTS[0]] * 4, "sampling_params": sampling})
        return [*found, sorted(race["stop_reasons"])]

    (before, after, reasons), _ = with_client(kit, server, use)
    assert before != after
    assert_raced(reasons, 1)
    num_stopped = reasons.count("abort")
    return f"--worker-extension-cls {EXTENSION}: other tokens after its update, and {num_stopped} of 4 siblings stopped"


@check("on")
def adapters_are_loaded_by_its_own_path(kit: Kit) -> str:
    model = Path(kit.model_path())
    server = kit.server(flags=[*COMPAT, "--enable-lora", "--max-lora-rank", "8"], environment=WITH_EXTENSION)

    async def use(client: RemoteInferenceClient) -> list[Any]:
        found = []
        for step in range(2):
            await client.load_lora_adapter("adapter", str(make_adapter(model, kit.folder / f"skyrl_{step}", step)))
            batch = {"prompt_token_ids": PROMPTS[:1], "sampling_params": {"temperature": 0, "max_tokens": 16}}
            found.append((await client.generate({**batch, "cache_salt": str(step)}, model="adapter"))["response_ids"])
        return found

    (first, second), _ = with_client(kit, server, use)
    assert first != second
    return "`--rollout-compat skyrl`: /skyrl/v1/load_lora_adapter, twice under one name, other tokens each time"


@check("stopped")
def weights_go_by_cuda(kit: Kit) -> None:
    """SkyRL's own worker extension takes weights on a CUDA device only."""
    import torch

    if not torch.cuda.is_available():
        raise Stopped("SkyRL's extension takes weights by CUDA IPC or NCCL only (`update_weights_ipc`, `_nccl`)")


def with_client(kit: Kit, server: Server, use: Use) -> tuple[Any, Recorder]:
    async def run(url: str) -> Any:
        client = RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=kit.model_path()
        )
        async with client:
            return await use(client)

    with kit.recording(server) as recorder:
        return asyncio.run(run(recorder.url)), recorder


def alike(one: Any, other: Any) -> bool:
    """True if both are the same, up to differences of log probabilities by the order of a batch."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def generated(server: Server) -> int:
    return int(metric(server.url, "vllm:generation_tokens_total"))


async def until_running(server: Server, num_requests: int) -> None:
    for _ in range(600):
        if metric(server.url, "vllm:num_requests_running") >= num_requests:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{num_requests} requests never ran at once")


if __name__ == "__main__":
    main()
