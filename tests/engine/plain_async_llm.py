"""Groups in an AsyncLLM over two ranks that vLLM builds, as JSON: `plain_async_llm.py MODEL`.

As a trainer's actor has it: `AsyncLLM.from_engine_args` with our scheduler and worker as arguments, no client of ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any
from uuid import uuid4

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1", VLLM_PLUGINS="",
)  # fmt: skip

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import vllm_rollout

SIZES = {"rollout_group_size": 2, "rollout_num_candidates": 4}
SCORED = {"rollout_detection_length": 4, "rollout_pruning_mode": "shadow", "rollout_early_stop": False}


class Actor:
    def __init__(self, model: str) -> None:
        args = AsyncEngineArgs(
            model=model, max_model_len=512, enforce_eager=True, dtype="float32", block_size=32, max_num_seqs=16,
            scheduler_cls="vllm_rollout.Scheduler", worker_cls="vllm_rollout.Worker", data_parallel_size=2,
        )  # fmt: skip
        self.llm = AsyncLLM.from_engine_args(args)
        self.ending = [token for token in range(self.llm.model_config.get_vocab_size()) if token != 7]

    async def ask(self, prompt: list[int], length: int, fields: dict[str, Any], rank: int | None = None) -> list[Any]:
        """Tokens, finish reason and stop reason of a request that stops by itself after `length` tokens."""
        params = SamplingParams(
            temperature=1, max_tokens=400, min_tokens=length - 1, stop_token_ids=self.ending, extra_args=fields
        )
        prompt = {"prompt_token_ids": prompt}
        async for output in self.llm.generate(prompt, params, uuid4().hex, data_parallel_rank=rank):
            (choice,) = output.outputs
        return [len(choice.token_ids), choice.finish_reason, choice.stop_reason]

    async def asks(self, prompt: list[int], lengths: list[int], fields: dict[str, Any], rank: int | None = None) -> Any:
        return await asyncio.gather(*[self.ask(prompt, length, fields, rank) for length in lengths])

    async def until_inside(self, num_requests: int) -> None:
        async with asyncio.timeout(60):
            while self.llm.output_processor.get_num_unfinished_requests() < num_requests:
                await asyncio.sleep(0.005)

    async def teach(self) -> dict[str, Any]:
        """Requests and choices of one request, rewarded by their names."""

        async def ends(name: str, num: int) -> list[str | None]:
            join = {"rollout_group_id": name[0], "rollout_group_size": 3}
            params = SamplingParams(n=num, max_tokens=8, min_tokens=6, extra_args={**join, **SCORED})
            params.output_kind = RequestOutputKind.FINAL_ONLY  # all choices in one output, whichever step each ends in
            prompt = {"prompt_token_ids": [3, 4]}
            outputs = [output async for output in self.llm.generate(prompt, params, name, data_parallel_rank=1)]
            return [choice.finish_reason for choice in outputs[-1].outputs]

        ended = await asyncio.gather(*(ends(f"s{number}", 1) for number in range(3)), ends("m", 3))
        rewards = [*((f"s{number}", 0, 1.0) for number in range(3)), *(("m", choice, 1.0) for choice in range(4))]
        answer = await vllm_rollout.teach(self.llm, [*rewards, ("nobody", 0, 1.0)])
        reasons = [reason for each in ended for reason in each]
        return {"ended": reasons, "statuses": [result.status for result in answer.results]}


async def main(model: str) -> None:
    actor = Actor(model)
    named = {**SIZES, "rollout_group_id": "q"}
    lengths = [20, 25, 300, 301]
    try:
        result: dict[str, Any] = {"taught": await actor.teach()}
        first = asyncio.create_task(actor.asks([1, 2], [300, 301, 390], named, 0))
        await actor.until_inside(3)
        result["disagrees"] = await actor.ask([1, 2], 5, {**named, "rollout_group_size": 3}, 0)
        result["others"] = await first
        cancelled = [asyncio.create_task(actor.ask([9, 9], length, SIZES, 0)) for length in (390, 300, 391, 301)]
        await actor.until_inside(4)
        cancelled[0].cancel()
        await asyncio.wait(cancelled[:1])
        result["cancelled"] = await asyncio.gather(*cancelled[1:])
        result["spread"] = await actor.asks([1, 2], lengths, SIZES)
        result["pinned"] = [await actor.asks([3, rank], lengths, SIZES, rank) for rank in range(2)]
        result["unfinished"] = actor.llm.output_processor.get_num_unfinished_requests()
    finally:
        actor.llm.shutdown()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
