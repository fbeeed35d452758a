"""SkyRL 0.3 with the vLLM server that it starts itself, from its configuration to its generator's view of answers.

Covered are the server (`build_vllm_cli_args`, `_build_and_serve_vllm_server`) and the client
(`RemoteInferenceClient.generate`). SkyRL pins vLLM 0.23. With the vLLM that runs here, its server needs three changes,
all in `prepare`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
import time
import typing
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import typing_extensions

from conformance import gain
from conformance.checks import CAP, REAL_MODEL, Kit, assert_raced, check, main
from conformance.in_process import ENVIRONMENT, by_environment

NUM_SAMPLES = 4
PROMPTS = [[11, 12, 13, 14], [21, 22, 23, 24]]
FIELDS = {"extra_args": {"rollout_group_size": NUM_SAMPLES, "rollout_num_candidates": 2 * NUM_SAMPLES}}
"""Value of `generator.sampling_params.additional_kwargs`."""


def prepare(kit: Kit) -> None:
    """Make SkyRL 0.3 run on Python 3.11 and vLLM 0.32. Requests and answers are not changed."""
    os.environ.update(ENVIRONMENT)
    # pydantic refuses the other one before Python 3.12: here, and in vLLM's processes, which import SkyRL's worker
    typing.TypedDict = typing_extensions.TypedDict
    (kit.folder / "sitecustomize.py").write_text(
        "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(kit.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    theirs = "vllm.entrypoints.openai.cli_args"  # where it was in 0.23
    for place in ("launchers", "common"):  # 0.29 to 0.32, 0.33
        with suppress(ModuleNotFoundError):
            sys.modules[theirs] = importlib.import_module(f"vllm.entrypoints.{place}.cli_args")
    from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor

    vllm_server_actor.create_server_socket = partial(vllm_server_actor.create_server_socket, reuse_port=False)


def config_of(
    kit: Kit, *, ours: bool, fields: dict[str, Any] | None = None, length: int = CAP, model: str | None = None
) -> Any:
    """SkyRL's configuration. Two of its entries turn us on."""
    from skyrl.train.config import SkyRLTrainConfig

    config = SkyRLTrainConfig()
    config.trainer.policy.model.path = kit.model_path(model)
    config.trainer.placement.colocate_all = False  # it asks for vLLM's sleep mode, which a CPU does not have
    engine = config.generator.inference_engine
    engine.model_dtype, engine.enforce_eager, engine.max_num_seqs = "float32", True, 32
    engine.engine_init_kwargs = {"max_model_len": 2048}
    if ours:
        engine.engine_init_kwargs["scheduler_cls"] = "vllm_rollout.Scheduler"
    config.generator.sampling_params.max_generate_length = length
    config.generator.sampling_params.additional_kwargs = fields
    return config


@asynccontextmanager
async def client_of(config: Any) -> AsyncGenerator[Any, None]:
    """SkyRL's client of a server that SkyRL's code has started."""
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import _build_and_serve_vllm_server
    from transformers import AutoTokenizer

    args = build_vllm_cli_args(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        args.host, args.port = "127.0.0.1", free.getsockname()[1]
    args.distributed_executor_backend, args.enable_scale_out = "uni", True
    serving = asyncio.create_task(_build_and_serve_vllm_server(args))
    url = f"http://127.0.0.1:{args.port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            while not serving.done():
                with suppress(httpx.TransportError):
                    if (await http.get(f"{url}/health")).status_code == 200:
                        break
                await asyncio.sleep(0.5)
        if serving.done():
            serving.result()
        tokenizer = AutoTokenizer.from_pretrained(config.trainer.policy.model.path)
        client = RemoteInferenceClient(url, [url], 1, model_name=args.model, tokenizer=tokenizer)
        try:
            yield client
        finally:
            await client.teardown()
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


async def samples(
    client: Any, config: Any, num_samples: int, prompts: Sequence[list[int]] = PROMPTS, **sampling: Any
) -> dict[str, Any]:
    """One prompt per sample in one batch, as `prepare_generator_input` and `SkyRLGymGenerator.generate_batched` ask."""
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend

    params = {**get_sampling_params_for_backend("vllm", config.generator.sampling_params), **sampling}
    each = [prompt for prompt in prompts for _ in range(num_samples)]
    return await client.generate({"prompt_token_ids": each, "sampling_params": params})


@check("unmodified")
def tokens_are_those_of_the_stock_scheduler(kit: Kit) -> dict[str, Any]:
    """With `engine_init_kwargs.scheduler_cls` and nothing else, greedy tokens are the same."""
    prepare(kit)

    async def greedy(ours: bool) -> dict[str, Any]:
        config = config_of(kit, ours=ours, length=48)
        async with client_of(config) as client:
            return await samples(client, config, NUM_SAMPLES, temperature=0.0)

    stock, ours = (asyncio.run(greedy(which)) for which in (False, True))
    assert ours["response_ids"] == stock["response_ids"]
    assert ours["stop_reasons"] == stock["stop_reasons"]
    return {"detail": f"{len(ours['response_ids'])} answers, the same tokens and reasons"}


@check("on")
def losers_stop_and_are_masked(kit: Kit) -> dict[str, Any]:
    """Two entries of the configuration and no group id make groups race. SkyRL's own settings then mask the losers."""
    prepare(kit)
    from skyrl.train.generators.utils import apply_overlong_filtering

    async def measure(ours: bool) -> tuple[dict[str, Any], float]:
        config = config_of(kit, ours=ours, fields=FIELDS if ours else None)
        async with client_of(config) as client:
            await samples(client, config, 1, max_tokens=8)  # warm
            started = time.monotonic()
            output = await samples(client, config, 2 * NUM_SAMPLES)
            return output, time.monotonic() - started

    (stock, stock_s), (on, on_s) = (asyncio.run(measure(which)) for which in (False, True))
    reasons = on["stop_reasons"]
    assert len(reasons) == 2 * NUM_SAMPLES * len(PROMPTS)
    for start in range(0, len(reasons), 2 * NUM_SAMPLES):
        assert_raced(reasons[start : start + 2 * NUM_SAMPLES], NUM_SAMPLES)
    masks = apply_overlong_filtering([[1] * len(ids) for ids in on["response_ids"]], reasons)
    assert [bool(sum(mask)) for mask in masks] == [reason == "stop" for reason in reasons]
    lengths = {name: [len(ids) for ids in output["response_ids"]] for name, output in (("stock", stock), ("on", on))}
    return {
        "detail": f"{NUM_SAMPLES} of {2 * NUM_SAMPLES} per prompt finish, the others end with stop_reason abort and "
        f"are masked by generator.apply_overlong_filtering; {sum(lengths['on'])} tokens in {on_s:.1f} s, stock "
        f"{sum(lengths['stock'])} in {stock_s:.1f} s",
        "lengths": lengths,
    }


@check("on")
def gain_of_spare_candidates(kit: Kit) -> dict[str, Any]:
    """One server, with as many samples as finish, and with twice as many, of which the first half counts."""
    prepare(kit)
    from transformers import AutoTokenizer

    num_candidates = gain.GROUP_SIZE + gain.REDUNDANCY
    fields = {"rollout_group_size": gain.GROUP_SIZE, "rollout_num_candidates": num_candidates}

    async def measure() -> dict[bool, list[float]]:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        config = config_of(kit, ours=True, length=gain.MAX_TOKENS, model=REAL_MODEL)
        tokenizer = AutoTokenizer.from_pretrained(config.trainer.policy.model.path)
        async with client_of(config) as client:
            for pair, is_on in gain.turns():
                prompt = tokenizer.encode(gain.chat(gain.QUESTIONS[pair]))
                num, on = (num_candidates, {"extra_args": fields}) if is_on else (gain.GROUP_SIZE, {})
                started = time.monotonic()
                output = await samples(client, config, num, [prompt], **on)
                seconds[is_on].append(time.monotonic() - started)
                if is_on:
                    assert_raced(output["stop_reasons"], gain.GROUP_SIZE)
        return seconds

    seconds = asyncio.run(measure())
    numbers = gain.gain("generation", seconds[True], seconds[False])
    return {"detail": gain.words(numbers), **numbers}


@check("on")
def gain_of_many_prompts(kit: Kit) -> dict[str, Any]:
    """As many prompts at once as a step has, on an emulated device: `gain.AtOnce`."""
    prepare(kit)
    candidates = gain.GROUP_SIZE + gain.REDUNDANCY
    fields = {"rollout_group_size": gain.GROUP_SIZE, "rollout_num_candidates": candidates}
    config = config_of(kit, ours=True, length=gain.AT_ONCE_TOKENS)
    engine = config.generator.inference_engine
    engine.max_num_seqs, engine.engine_init_kwargs["max_model_len"] = gain.AT_ONCE_PLACES, gain.AT_ONCE_LENGTH

    async def measure() -> gain.AtOnce:
        times = gain.AtOnce()
        async with client_of(config) as client:
            for arm in times.turns(("plain", "spares")):
                num, on = (candidates, {"extra_args": fields}) if arm == "spares" else (gain.GROUP_SIZE, {})
                with times.timed("generation", arm):
                    output = await samples(client, config, num, gain.AT_ONCE_PROMPTS, **on)
                ended = [reason for reason in output["stop_reasons"] if reason != "abort"]
                assert len(ended) >= gain.GROUP_SIZE * len(gain.AT_ONCE_PROMPTS)
        return times

    with by_environment(device=gain.DEVICE):
        return asyncio.run(measure()).result()


if __name__ == "__main__":
    main()
