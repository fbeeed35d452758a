"""AReaL's checks: its RemotevLLMEngine, which asks a vLLM server for one answer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.vllm_remote import RemotevLLMEngine

from conformance.areal.asynchronous import BATCH, GROUP_SIZE, train
from conformance.asynchronous import FLAGS, make_versions, num_straddling
from conformance.checks import REAL_MODEL, Kit, Server, Stopped, check, main
from conformance.prime_rl import make_weights
from conformance.recording import Recorder

COMPAT = ("--rollout-compat", "areal")
EXPERIMENT = ("e", "t")
"""Names of the experiment and of the trial."""
PROMPTS = [[1, *range(20 + n, 44 + n)] for n in range(4)]


@check("unmodified")
def tokens_are_read_out_of_strings_as_stock_s(kit: Kit) -> dict[str, Any]:
    """Tokens from /v1/completions with return_tokens_as_token_ids, as AReaL parses them."""
    answers = []
    for kind in ("rollout", "stock"):
        with engine(kit, kit.server(kind)) as (areal, _):
            answers.append(asyncio.run(generate(areal, max_new_tokens=32)))
    for ours, stock in zip(*answers, strict=True):
        assert ours.output_tokens == stock.output_tokens != []
        assert ours.stop_reason == stock.stop_reason
        gap = max(abs(a - b) for a, b in zip(ours.output_logprobs, stock.output_logprobs, strict=True))
        assert gap < 1e-4
    num_tokens = sum(len(answer.output_tokens) for answer in answers[0])
    return {"detail": f"{len(PROMPTS)} greedy answers, {num_tokens} tokens, all the same"}


@check("unmodified")
def an_aborted_request_goes_on_where_it_was(kit: Kit) -> dict[str, Any]:
    """AReaL sends an aborted request again with the tokens that it has. No token may be lost or come twice."""
    server = kit.server(model=REAL_MODEL, flags=("--dtype", "float32"))
    with engine(kit, server) as (areal, recorder):
        whole = asyncio.run(generate(areal, max_new_tokens=1500))
        num_before = len(recorder.requests)

        async def interrupted() -> list[Any]:
            running = asyncio.create_task(generate(areal, max_new_tokens=1500))
            for _ in range(3):
                await asyncio.sleep(0.7)
                await asyncio.to_thread(httpx.post, f"{server.url}/pause", params={"mode": "abort"}, timeout=60)
                await asyncio.to_thread(httpx.post, f"{server.url}/resume", timeout=60)
            return await running

        parts = asyncio.run(interrupted())
        again = [request["body"]["prompt"] for request in recorder.requests[num_before:]][len(PROMPTS) :]
    assert again, "nothing was aborted on its way"
    kept = []
    for prompt, one, other in zip(PROMPTS, whole, parts, strict=True):
        assert len(one.output_tokens) == len(other.output_tokens) == len(other.output_logprobs) == 1500
        mine = [sent[len(prompt) :] for sent in again if sent[: len(prompt)] == prompt]
        assert all(other.output_tokens[: len(tokens)] == tokens for tokens in mine)
        if mine:
            assert mine[0] == one.output_tokens[: len(mine[0])]
            kept.append(len(mine[0]))
    assert sum(kept) > 0
    return {
        "detail": f"{len(PROMPTS)} answers of 1,500 tokens in {len(PROMPTS) + len(again)} requests; what an "
        "abort brought is how the answer without a break begins",
        "tokens_at_the_first_abort": kept,
    }


@check("on")
def weights_come_out_of_a_folder_by_its_own_calls(kit: Kit) -> str:
    """--rollout-compat areal: areal_pause_generation, areal_update_weights, areal_continue_generation."""
    server = kit.server(flags=COMPAT)
    folder = make_weights(Path(kit.model_path()), kit.folder / "areal_step_1")
    with engine(kit, server) as (areal, _):
        before = asyncio.run(generate(areal, max_new_tokens=16))
        areal._engine.pause_generation()
        (update,) = areal._engine.backend.build_disk_weight_update_requests(meta_of(folder)).requests
        areal._engine._run_request_on_all_servers(update)
        assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
        areal._engine.continue_generation()
        after = asyncio.run(generate(areal, max_new_tokens=16))
    assert [answer.output_tokens for answer in before] != [answer.output_tokens for answer in after]
    return "other tokens after it; the pause lasted until areal_continue_generation"


@check("on")
def asynchronous_training_goes_on_over_updates(kit: Kit) -> dict[str, Any]:
    """AReaL's batches with a bound on staleness. Each update interrupts requests, which AReaL sends again."""
    from transformers import AutoTokenizer

    num_versions = 6
    folders = make_versions(Path(kit.model_path()), kit.folder / "areal_versions", num_versions)
    tokenizer = AutoTokenizer.from_pretrained(kit.model_path())
    with engine(kit, kit.server(flags=(*COMPAT, *FLAGS))) as (areal, recorder):
        groups = train(areal, EXPERIMENT, tokenizer, recorder.url, folders, kit.folder / "names")
    assert len(groups) == num_versions * BATCH
    answers = []
    for group in groups:
        assert len(group["input_ids"]) == GROUP_SIZE
        for token_ids, mask, versions in zip(group["input_ids"], group["loss_mask"], group["versions"], strict=True):
            is_sampled = mask.bool()
            tokens = token_ids[is_sampled].tolist()
            assert [token % num_versions + 1 for token in tokens] == versions[is_sampled].tolist()
            answers.append(tokens)
    reasons = [answer["choices"][0]["finish_reason"] for _, answer in recorder.answers if "choices" in answer]
    straddling = num_straddling(answers, num_versions)
    assert straddling > 0
    return {
        "detail": f"{len(answers)} answers of {len(groups)} groups came back from prepare_batch over {num_versions} "
        f"updates, in {len(reasons)} requests, of which updates aborted {reasons.count('abort')}. {straddling} are of "
        "several versions, and AReaL's own versions of their tokens are exact, because each request is sampled by one "
        "version. /v1/completions has no weight_versions. No request has read KV of older weights",
        "num_straddling": straddling,
    }


@check("stopped")
def groups_have_no_way_in(kit: Kit) -> None:
    """AReaL sends a fixed set of fields, and sends an aborted request again."""
    from areal.engine.vllm_remote import VLLMBackend

    request = ModelRequest(input_ids=[1], metadata={"vllm_xargs": {"rollout_group_id": "g"}})
    payload = VLLMBackend().build_generation_request(request, with_lora=False, version=0).payload
    if "vllm_xargs" not in payload:
        raise Stopped(
            "AReaL 1.0.4 has no place for vllm_xargs in its requests, and sends a candidate that was stopped again; no "
            "GPU would change that. Its weights by NCCL need its own worker extension, and a GPU"
        )


def meta_of(folder: Path) -> Any:
    from areal.api import WeightUpdateMeta

    return WeightUpdateMeta(type="disk", path=str(folder))


@contextmanager
def engine(kit: Kit, server: Server) -> Iterator[tuple[RemotevLLMEngine, Recorder]]:
    with kit.recording(server) as recorder:
        config = InferenceEngineConfig(
            experiment_name=EXPERIMENT[0], trial_name=EXPERIMENT[1], backend="vllm:d1", max_concurrent_rollouts=8,
            pause_grace_period=0.1, consumer_batch_size=BATCH, max_head_offpolicyness=2,
        )  # fmt: skip
        areal = RemotevLLMEngine(config)
        areal.initialize(addr=recorder.url.removeprefix("http://"), train_data_parallel_size=1)
        try:
            yield areal, recorder
        finally:
            areal.destroy()


async def generate(areal: RemotevLLMEngine, max_new_tokens: int) -> list[Any]:
    settings = GenerationHyperparameters(greedy=True, max_new_tokens=max_new_tokens, max_tokens=2000, ignore_eos=True)
    requests = [ModelRequest(input_ids=prompt, gconfig=settings) for prompt in PROMPTS]
    return await asyncio.gather(*map(areal.agenerate, requests))


if __name__ == "__main__":
    main()
