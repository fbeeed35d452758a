"""vime's requests to a vLLM engine that it did not start, by vime's source.

vime is not in the registry. These are the requests of its rollout (`vllm_rollout.py`), its abort (`server_control.py`)
and its engine's administration, with the fields that it reads. Source: vllm-project/vime at 2b83ea2 and 052693a.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from conformance.checks import CAP, REAL_MODEL, Kit, Stopped, assert_raced, check, main, metric
from conformance.prime_rl import make_weights

FLAGS = ("--enable-scale-out", "--enable-server-load-tracking")
PROMPTS = [[1, *range(20 + n, 44 + n)] for n in range(6)]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 1, "skip_special_tokens": False}


@check("replayed")
def a_rollout_is_stock_s(kit: Kit) -> dict[str, Any]:
    found = {}
    for kind in ("rollout", "stock"):
        server = kit.server(kind, flags=FLAGS)
        with kit.recording(server) as recorder:
            found[kind] = asyncio.run(rollout(recorder.url, kit.model_path(), max_tokens=48, seed=3))
    ours, stock = ([read(answer) for answer in found[kind]] for kind in ("rollout", "stock"))
    assert [(ids, reason, usage) for ids, _, reason, usage in ours] == [
        (ids, reason, usage) for ids, _, reason, usage in stock
    ]
    gap = max(abs(a - b) for one, two in zip(ours, stock, strict=True) for a, b in zip(one[1], two[1], strict=True))
    assert gap < 1e-4
    num_tokens = sum(len(ids) for ids, *_ in ours)
    return {"detail": f"{len(PROMPTS)} seeded samples, {num_tokens} tokens: the same, with the same usage"}


@check("replayed")
def an_abort_of_all_returns_what_there_is_and_the_load_falls_to_0(kit: Kit) -> dict[str, Any]:
    """The end of a rollout: abort, read the load, and repeat until the server is idle."""
    looked = {}
    for kind in ("rollout", "stock"):
        server = kit.server(kind, model=REAL_MODEL, flags=FLAGS)
        with kit.recording(server) as recorder:
            looked[kind] = asyncio.run(rollout_and_abort(recorder.url, kit.model_path(REAL_MODEL)))
    for reasons, lengths, loads in looked.values():
        assert set(reasons) == {"abort"}, (reasons, lengths)
        assert min(lengths) > 0, lengths
        assert (loads[0], loads[-1]) == ({"server_load": len(PROMPTS)}, {"server_load": 0}), loads
    return {
        "detail": "all samples end with abort and their tokens, on both; /load counts with "
        "--enable-server-load-tracking and is 0 without it, so that vime then takes a server for idle at once; its own "
        "query (include_inflight) is a patch of vLLM, which both ignore"
    }


@check("replayed")
def siblings_that_are_stopped_are_aborted_samples(kit: Kit) -> str:
    """A group with our fields, set by a custom generate function, as vime would read it."""
    server = kit.server(flags=FLAGS)
    group = {"rollout_group_size": 2, "rollout_num_candidates": 6}
    answers = asyncio.run(
        rollout(server.url, kit.model_path(), prompts=[PROMPTS[0]] * 6, max_tokens=CAP, extra_args=group)
    )
    reasons = [answer["choices"][0]["finish_reason"] for answer in answers]
    assert_raced(reasons, 2)
    return f"{reasons.count('abort')} of 6 end with abort: to vime Sample.Status.ABORTED, which gets no reward"


@check("replayed")
def administration_is_stock_s(kit: Kit) -> str:
    """health, server_info, pause with keep, weights from a folder by collective_rpc, resume."""
    folder = make_weights(Path(kit.model_path()), kit.folder / "vime_step_1")
    found = {}
    for kind in ("rollout", "stock"):
        server = kit.server(kind, flags=FLAGS)
        with kit.recording(server) as recorder:
            found[kind] = administer(recorder.url, kit.model_path(), folder)
    assert found["rollout"] == found["stock"]
    _, before, after = found["rollout"]
    assert before != after
    return f"sizes {found['rollout'][0]}, and the same tokens before and after reload_weights"


@check("stopped")
def groups_have_no_way_in_without_a_function_of_yours(kit: Kit) -> None:
    raise Stopped(
        "vime's own generate function sends a fixed list of sampling fields: rollout_* fields need a custom one "
        "(--custom-generate-function-path); no GPU would change that. Weights by NCCL need one"
    )


async def rollout(
    url: str, model: str, prompts: Sequence[Sequence[int]] = PROMPTS, **sampling: Any
) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:

        async def generate(number: int, prompt: Sequence[int]) -> dict[str, Any]:
            body = {"model": model, "token_ids": list(prompt), "sampling_params": {**SAMPLING, **sampling}}
            answer = await http.post("/inference/v1/generate", json=body, headers={"x-session-id": f"sample-{number}"})
            answer.raise_for_status()
            return answer.json()

        return await asyncio.gather(*(generate(number, prompt) for number, prompt in enumerate(prompts)))


async def rollout_and_abort(url: str, model: str) -> tuple[list[str], list[int], list[Any]]:
    running = asyncio.create_task(rollout(url, model, max_tokens=1900, ignore_eos=True))
    loads = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def load() -> Any:
            query = {"include_inflight": "true", "inflight_limit": "100"}
            loads.append((await http.get("/load", params=query)).json())
            return loads[-1]

        for _ in range(600):
            if await asyncio.to_thread(metric, url, "vllm:num_requests_running") >= len(PROMPTS):
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        await load()
        for _ in range(60):
            (await http.post("/abort_requests", json={})).raise_for_status()
            if await load() == {"server_load": 0}:
                break
            await asyncio.sleep(0.5)
    choices = [answer["choices"][0] for answer in await running]
    return [choice["finish_reason"] for choice in choices], [len(choice["token_ids"]) for choice in choices], loads


def administer(url: str, model: str, folder: Path) -> tuple[dict[str, int], list[int], list[int]]:
    with httpx.Client(base_url=url, timeout=300) as http:

        def greedy() -> list[int]:
            sampling = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
            body = {"model": model, "token_ids": PROMPTS[0], "sampling_params": sampling}
            return http.post("/inference/v1/generate", json=body).json()["choices"][0]["token_ids"]

        def post(path: str, **kwargs: Any) -> None:
            http.post(path, **kwargs).raise_for_status()

        http.get("/health").raise_for_status()
        info = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]["parallel_config"]
        sizes = {name: info[name] for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")}
        before = greedy()
        post("/pause", params={"mode": "keep", "clear_cache": "false"})
        post("/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        post("/reset_prefix_cache")
        post("/resume")
        after = greedy()
        post("/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": model}})
        post("/reset_prefix_cache")
        assert greedy() == before
    return sizes, before, after


def read(answer: dict[str, Any]) -> tuple[list[int], list[float], str, dict[str, Any]]:
    choice = answer["choices"][0]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert len(logprobs) == len(choice["token_ids"])
    return choice["token_ids"], logprobs, choice["finish_reason"], answer["usage"]


if __name__ == "__main__":
    main()
