"""Use `vllm_rollout.LLM` or `vllm_rollout.AsyncLLM` as a trainer would, and print what came out as JSON.

`in_process.py {llm,async,teach} MODEL`
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1", VLLM_PLUGINS="",
)  # fmt: skip

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import vllm_rollout

SETTINGS = {"max_model_len": 256, "enforce_eager": True, "dtype": "float32", "max_num_seqs": 16}
PROMPTS = [[3, 4, 5], "two", {"id": "chat", "messages": [{"role": "user", "content": "three"}]}]
SHADOW = {"detection_length": 4, "mode": "shadow"}
ROLLOUT = {
    "group_size": 4,
    "redundancy": 2,
    "pruning": SHADOW,
    "audit_ratio": 0.0,
    "sampling": {"max_tokens": 24, "min_tokens": 6, "seed": 3},
}


class Waiting:
    """The async LLM with the methods of the one that waits."""

    def __init__(self, model: str) -> None:
        self._loop = asyncio.new_event_loop()
        args = AsyncEngineArgs(model, **SETTINGS)
        self._llm = self._run(self._make(args))

    async def _make(self, args: AsyncEngineArgs) -> vllm_rollout.AsyncLLM:
        return vllm_rollout.AsyncLLM.from_engine_args(args)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._run(getattr(self._llm, name)(*args, **kwargs))

    def stream(self, *args: Any, **kwargs: Any) -> list[Any]:
        async def events() -> list[Any]:
            return [event async for event in self._llm.stream(*args, **kwargs)]

        return self._run(events())

    def generate(self, prompts: list[dict], params: SamplingParams, **kwargs: Any) -> list[Any]:
        async def last(number: int, prompt: dict) -> Any:
            return [output async for output in self._llm.generate(prompt, params, f"r{number}")][-1]

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(last(number, prompt) for number, prompt in enumerate(prompts)))

        return self._run(all_of_them())

    def close(self) -> None:
        self._llm.shutdown()


async def teach_another(model: str) -> dict[str, Any]:
    """An engine of vLLM's own with our scheduler and worker."""
    args = AsyncEngineArgs(model, **SETTINGS, scheduler_cls="vllm_rollout.Scheduler", worker_cls="vllm_rollout.Worker")
    engine = AsyncLLM.from_engine_args(args)
    fields = {"rollout_group_id": "g", "rollout_group_size": 2, "rollout_num_candidates": 3}
    fields |= {"rollout_detection_length": 4, "rollout_pruning_mode": "shadow", "rollout_early_stop": False}
    params = SamplingParams(max_tokens=8, min_tokens=6, extra_args=fields)

    async def last(name: str, params: SamplingParams = params) -> Any:
        return [output async for output in engine.generate({"prompt_token_ids": [3, 4]}, params, name)][-1]

    names = ["a", "b", "c"]
    outputs = await asyncio.gather(*map(last, names))
    answer = await vllm_rollout.teach(engine, [*((name, 0, 1.0) for name in names), ("nobody", 0, 1.0)])
    several = params.clone()
    several.n, several.extra_args = 3, {**fields, "rollout_group_id": "n", "rollout_group_size": 3}
    several.output_kind = RequestOutputKind.FINAL_ONLY  # all choices in one output, whichever step each ends in
    assert len((await last("d", several)).outputs) == 3
    of_several = await vllm_rollout.teach(engine, [("d", choice, 1.0) for choice in range(4)])
    engine.shutdown()
    statuses, of_several = ([result.status for result in each.results] for each in (answer, of_several))
    reasons = [output.outputs[0].stop_reason for output in outputs]
    return {"reasons": reasons, "statuses": statuses, "of_several": of_several}


def main(which: str, model: str) -> None:
    if which == "teach":
        print("RESULT " + json.dumps(asyncio.run(teach_another(model))))
        return
    llm: Any = vllm_rollout.LLM(model, **SETTINGS) if which == "llm" else Waiting(model)
    answer = llm.rollout(PROMPTS, **ROLLOUT)
    rewards = [(group.prompt_id, t.index, float(t.index % 2)) for group in answer.groups for t in group.trajectories]
    result: dict[str, Any] = {
        "answer": answer.model_dump(mode="json"),
        "rewards": llm.post_rewards(answer.id, rewards).counts.model_dump(),
        "again": llm.rollout(PROMPTS, **ROLLOUT).model_dump(mode="json"),
        "report": llm.report().signals["confidence"].num_positive,
        "events": [event.type for event in llm.stream(PROMPTS[:2], 2, 1, stream_tokens=4, sampling={"max_tokens": 9})],
        "state": len(llm.state()),
    }
    groups = SamplingParams(
        n=3, max_tokens=12, min_tokens=6, seed=1,
        extra_args={"rollout_redundancy": 2, "rollout_detection_length": 4, "rollout_pruning_mode": "shadow"},
    )  # fmt: skip
    ids = [{"prompt_token_ids": [7, 8, number]} for number in range(2)]
    outputs = llm.generate(ids, groups, use_tqdm=False)
    result["generated"] = [[len(output.outputs), [len(c.token_ids) for c in output.outputs]] for output in outputs]
    named = [(output.request_id, choice.index, 1.0) for output in outputs for choice in output.outputs]
    result["named"] = llm.post_named_rewards(named).counts.model_dump()
    result["audited"] = [audited_labels(llm, groups, seed) for seed in range(8)]
    last = RequestOutputKind.FINAL_ONLY  # AsyncLLM's last output would have the choice that ended last
    plain = llm.generate(ids, SamplingParams(n=2, max_tokens=5, seed=1, output_kind=last), use_tqdm=False)
    result["plain"] = [len(output.outputs) for output in plain]
    result["errors"] = [said(lambda: llm.rollout(PROMPTS, 0)), said(lambda: list(llm.stream(PROMPTS, 99)))]
    bad = SamplingParams(n=2, max_tokens=5, extra_args={"rollout_redundancy": 99})
    result["errors"].append(said(lambda: llm.generate(ids, bad, use_tqdm=False)))
    result["after"] = [len(o.outputs) for o in llm.generate(ids, groups, use_tqdm=False)]
    if which == "llm":
        stream = llm.stream(PROMPTS[:1], 2, 2, stream_tokens=1, sampling={"max_tokens": 60, "min_tokens": 50})
        next(stream)
        result["meanwhile"] = llm.report().detection_length
        open_stream = said(lambda: llm.generate(ids, SamplingParams(max_tokens=5), use_tqdm=False))
        stream.close()
        result["closed"] = [open_stream, len(llm.generate(ids, SamplingParams(max_tokens=5), use_tqdm=False))]
        llm.enqueue(ids, groups, use_tqdm=False)
        result["errors"].append(said(lambda: llm.rollout(PROMPTS, 2)))
        result["enqueued"] = [len(o.outputs) for o in llm.wait_for_completion(use_tqdm=False)]
    else:
        llm.close()
    print("RESULT " + json.dumps(result))


def audited_labels(llm: Any, params: SamplingParams, seed: int) -> float:
    """How many labels of audit groups come of one call that runs four groups, of which half are audited."""
    params = params.clone()
    params.seed, params.extra_args = seed, {**params.extra_args, "rollout_audit_ratio": 0.5}
    before = llm.report().audit.num_labels
    ids = [{"prompt_token_ids": [11, 12, 20 + number]} for number in range(4)]
    outputs = llm.generate(ids, params, use_tqdm=False)
    llm.post_named_rewards([(output.request_id, choice.index, 1.0) for output in outputs for choice in output.outputs])
    return llm.report().audit.num_labels - before


def said(do: Any) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main(*sys.argv[1:])
