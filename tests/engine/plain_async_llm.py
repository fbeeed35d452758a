"""What goes wrong with groups in an AsyncLLM that vLLM builds, as JSON: `plain_async_llm.py MODEL NUM_RANKS`.

As a trainer's actor has it: `AsyncLLM.from_engine_args` with our scheduler as an argument, no client of ours.
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
from vllm.v1.engine.async_llm import AsyncLLM

SIZES = {"rollout_group_size": 2, "rollout_num_candidates": 4}


class Actor:
    def __init__(self, model: str, num_ranks: int) -> None:
        args = AsyncEngineArgs(
            model=model, max_model_len=512, enforce_eager=True, dtype="float32", block_size=32, max_num_seqs=16,
            scheduler_cls="vllm_rollout.Scheduler", data_parallel_size=num_ranks,
        )  # fmt: skip
        self.llm = AsyncLLM.from_engine_args(args)
        self.ending = [token for token in range(self.llm.model_config.get_vocab_size()) if token != 7]

    async def ask(self, prompt: list[int], length: int, fields: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Tokens, finish reason and stop reason of a request that stops by itself after `length` tokens."""
        params = SamplingParams(
            temperature=1, max_tokens=400, min_tokens=length - 1, stop_token_ids=self.ending, extra_args=fields
        )
        request_id = kwargs.pop("request_id", None) or uuid4().hex
        choice = None
        async for output in self.llm.generate({"prompt_token_ids": prompt}, params, request_id, **kwargs):
            (choice,) = output.outputs
        return [len(choice.token_ids), choice.finish_reason, choice.stop_reason]

    async def asks(self, prompt: list[int], lengths: list[int], fields: dict[str, Any], **kwargs: Any) -> list[Any]:
        return await asyncio.gather(*[self.ask(prompt, length, fields, **kwargs) for length in lengths])

    async def until_inside(self, num_requests: int) -> None:
        while self.llm.output_processor.get_num_unfinished_requests() < num_requests:
            await asyncio.sleep(0.005)


async def one_rank(actor: Actor) -> dict[str, Any]:
    named = {**SIZES, "rollout_group_id": "q"}
    result: dict[str, Any] = {}
    first = asyncio.create_task(actor.asks([1, 2], [300, 301, 390], named))
    await actor.until_inside(3)
    result["disagrees"] = await actor.ask([1, 2], 5, {**named, "rollout_group_size": 3})
    result["others"] = await first
    result["late"] = await actor.ask([1, 2], 60, named)
    result["more_than_announced"] = await actor.asks([3, 4], [20, 25, 300, 301, 30, 35, 302, 303, 50], SIZES)
    result["later_batches"] = [await actor.asks([5, 6], [20, 25, 300], SIZES) for _ in range(3)]
    never = [actor.ask([7, i], 5, {**SIZES, "rollout_group_id": f"q{i}"}) for i in range(64)]
    result["never_whole"] = await asyncio.gather(*never)
    siblings = [
        asyncio.create_task(actor.ask([8, 9], length, SIZES, request_id=f"r{length}"))
        for length in (390, 300, 391, 301)
    ]
    await actor.until_inside(4)
    await actor.llm.abort("r390")
    result["aborted"] = await asyncio.gather(*siblings)
    cancelled = [asyncio.create_task(actor.ask([9, 9], length, SIZES)) for length in (390, 300, 391, 301)]
    await actor.until_inside(4)
    cancelled[0].cancel()
    await asyncio.wait(cancelled[:1])
    result["cancelled"] = await asyncio.gather(*cancelled[1:])
    return result


async def two_ranks(actor: Actor) -> dict[str, Any]:
    lengths = [20, 25, 300, 301]
    return {
        "spread": await actor.asks([1, 2], lengths, SIZES),
        "pinned": [await actor.asks([3, rank], lengths, SIZES, data_parallel_rank=rank) for rank in range(2)],
    }


async def main(model: str, num_ranks: int) -> None:
    actor = Actor(model, num_ranks)
    try:
        result = await (one_rank if num_ranks == 1 else two_ranks)(actor)
        result["unfinished"] = actor.llm.output_processor.get_num_unfinished_requests()
    finally:
        actor.llm.shutdown()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
