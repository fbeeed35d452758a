"""Races in an engine that a trainer builds itself, without a server: the calls that three trainers make.

    python examples/trainer_actors.py [MODEL]        # CPU: VLLM_CPU_KVCACHE_SPACE=1

One engine argument turns races on. Requests without a group id are siblings if they have the same prompt.
docs/recipes/ has the trainers' own settings. This file makes the calls as the trainers' code makes them.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from uuid import uuid4

from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.outputs import RequestOutput

from vllm_rollout.integrations.spares import End, Spares

PROMPT = [11, 12, 13, 14]
SIZE, NUM_CANDIDATES = 4, 8
FIELDS = {"rollout_group_size": SIZE, "rollout_num_candidates": NUM_CANDIDATES}

END_OF: Mapping[str | None, End] = {"stop": "finished", "length": "truncated"}


async def generate(engine: AsyncLLMEngine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """The last output of one request, which the actors of all three trainers keep."""
    async for output in engine.generate({"prompt_token_ids": list(prompt)}, params, request_id=uuid4().hex):
        last = output
    return last


async def like_skyrl(engine: AsyncLLMEngine) -> list[RequestOutput]:
    """One request per sample, each with the same fields (`generator.sampling_params.additional_kwargs`).

    Stopped candidates are returned too, with `finish_reason` "abort", which is SkyRL's stop reason.
    `generator.apply_overlong_filtering` masks them.
    """
    params = SamplingParams(max_tokens=1500, extra_args=FIELDS)
    return await asyncio.gather(*[generate(engine, PROMPT, params) for _ in range(NUM_CANDIDATES)])


async def like_verl(engine: AsyncLLMEngine) -> list[RequestOutput]:
    """n agent loops ask for one answer each, and each gets a finished one.

    Spare candidates run beside them, and no loop gets a stopped one (`vllm_rollout.integrations.verl`).
    """
    spares = Spares(SIZE, NUM_CANDIDATES - SIZE, lambda output: END_OF.get(output.outputs[0].finish_reason, "stopped"))

    async def agent_loop() -> RequestOutput:
        async def launch(extra_args: Mapping[str, object], _: int) -> RequestOutput:
            return await generate(engine, PROMPT, SamplingParams(max_tokens=1500, extra_args=dict(extra_args)))

        return await spares.answer(tuple(PROMPT), launch)

    return await asyncio.gather(*[agent_loop() for _ in range(SIZE)])


async def like_openrlhf(engine: AsyncLLMEngine) -> list[RequestOutput]:
    """`generate_responses` of one prompt, with a group id of its own. Stopped candidates are left out."""
    params = SamplingParams(max_tokens=1500, extra_args={**FIELDS, "rollout_group_id": uuid4().hex})
    outputs = await asyncio.gather(*[generate(engine, PROMPT, params) for _ in range(NUM_CANDIDATES)])
    return [output for output in outputs if output.outputs[0].finish_reason != "abort"]


async def main(model: str) -> None:
    args = AsyncEngineArgs(
        model=model,
        max_model_len=2048,
        max_num_seqs=16,
        enforce_eager=True,
        dtype="float32",  # vLLM's bfloat16 attention ends on some CPUs by an illegal instruction
        scheduler_cls="vllm_rollout.Scheduler",
    )
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        for ask in (like_skyrl, like_verl, like_openrlhf):
            choices = [output.outputs[0] for output in await ask(engine)]
            ends = [f"{len(choice.token_ids)} {choice.stop_reason or choice.finish_reason}" for choice in choices]
            print(f"{ask.__name__}: {', '.join(ends)}", flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if len(sys.argv) > 1:
        path = sys.argv[1]
    else:
        from vllm_rollout.models import resolve

        path = resolve("tiny-random")
    asyncio.run(main(path))
