"""A script that knows nothing of us, as JSON: `somebody_elses.py llm|sleeping|async MODEL`. The environment decides."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ.pop("VLLM_PLUGINS", None)
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1",
)  # fmt: skip

from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams
from vllm.v1.engine.async_llm import AsyncLLM

PROMPTS = [{"prompt_token_ids": [5 + number] * 20} for number in range(2)]
SETTINGS: dict[str, Any] = {
    "max_model_len": 512, "enforce_eager": True, "dtype": "float32", "max_num_seqs": 16, "disable_log_stats": False,
}  # fmt: skip
SAMPLING = {"temperature": 1.0, "max_tokens": 200}


def lengths(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[output.prompt_token_ids[0], *(len(each.token_ids) for each in output.outputs)] for output in outputs]


def once(model: str) -> dict[str, Any]:
    llm = LLM(model, **SETTINGS)

    def num_stopped() -> int:
        counts = [each.value for each in llm.get_metrics() if each.name == "vllm:request_success"]
        return int(sum(counts)) - num_stopped.before

    num_stopped.before = 0

    def ask(prompts: list[Any], **sampling: Any) -> dict[str, Any]:
        outputs = llm.generate(prompts, SamplingParams(**{**SAMPLING, **sampling}))
        ended, num_stopped.before = num_stopped(), num_stopped.before + num_stopped()
        return {"rows": lengths(outputs), "num_ended": ended}

    return {
        "with_n": ask(PROMPTS, n=4),
        "in_a_row": ask([prompt for prompt in PROMPTS for _ in range(4)]),
        "cut": ask([PROMPTS[0]] * 3 + [PROMPTS[1]] * 4),
        "single": ask(PROMPTS),
        "greedy": ask(PROMPTS * 2, temperature=0.0, n=1),
        "beams": [len(each.sequences) for each in llm.beam_search(PROMPTS, BeamSearchParams(2, 4))],
        "class": type(llm).__name__,
        "max_num_seqs": llm.llm_engine.vllm_config.scheduler_config.max_num_seqs,
        "module": type(llm).__module__,
    }


def lost(worker: Any) -> None:
    """Clear a worker's memory as level 2 of sleep does: no weights, no KV cache."""
    for parameter in worker.model_runner.model.parameters():
        parameter.data.fill_(float("nan"))
    for cache in worker.model_runner.kv_caches:
        cache.fill_(1000.0)  # not NaN: kernels multiply what they mask by 0


def sleeping(model: str) -> dict[str, Any]:
    """TRL's calls at each step, in their order. vLLM's CPU worker keeps its memory, so that `lost` is called."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    llm = LLM(model, logprobs_mode="processed_logprobs", **SETTINGS)
    params = SamplingParams(**{**SAMPLING, "logprobs": 0})
    rows = []
    for _ in range(3):
        outputs = llm.generate([PROMPTS[0]] * 4, params)
        rows += [
            {
                "prompt": list(output.prompt_token_ids),
                "token_ids": list(output.outputs[0].token_ids),
                "logprobs": [next(iter(each.values())).logprob for each in output.outputs[0].logprobs],
            }
            for output in outputs
        ]
        llm.sleep(level=2)
        llm.collective_rpc(lost)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        llm.wake_up(tags=["kv_cache"])
    return {"rows": rows, "module": type(llm).__module__}


async def serving(model: str) -> dict[str, Any]:
    llm = AsyncLLM.from_vllm_config(AsyncEngineArgs(model, **SETTINGS).create_engine_config())
    last = None
    async for output in llm.generate(PROMPTS[0], SamplingParams(**SAMPLING, n=4), "r"):
        last = output
    llm.shutdown()
    return {"rows": lengths([last]), "module": type(llm).__module__}


if __name__ == "__main__":
    ways = {"llm": once, "sleeping": sleeping, "async": lambda model: asyncio.run(serving(model))}
    result = ways[sys.argv[1]](sys.argv[2])
    print("RESULT " + json.dumps(result))
