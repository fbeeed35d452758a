"""Use `vllm_rollout.LLM` or `vllm_rollout.AsyncLLM` as a trainer would, and print what came out as JSON.

`in_process.py {llm,async} MODEL`, the former in a session of its own: it gets Ctrl-C as a terminal sends it, to all
processes at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1", VLLM_PLUGINS="",
)  # fmt: skip

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind

import vllm_rollout

SETTINGS = {"max_model_len": 256, "enforce_eager": True, "dtype": "float32", "max_num_seqs": 16}
PROMPTS = [[3, 4, 5], "two", {"id": "chat", "messages": [{"role": "user", "content": "three"}]}]
SHADOW = {"detection_length": 4, "mode": "shadow"}
ROLLOUT = {
    "group_size": 4,
    "redundancy": 2,
    "pruning": SHADOW,
    "audit_ratio": 0.0,
    "sampling_params": {"max_tokens": 24, "min_tokens": 6, "seed": 3},
}


def length(text: str, data: dict) -> float:
    return len(text) * data["times"]


class Waiting:
    """The async LLM with the methods of the one that waits."""

    def __init__(self, model: str) -> None:
        self._loop = asyncio.new_event_loop()
        args = AsyncEngineArgs(model, **SETTINGS)
        self._llm = self._run(self._make(args))
        self._llm.rollout_rewards = {"length": length}

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


def main(which: str, model: str) -> None:
    llm: Any = vllm_rollout.LLM(model, rewards={"length": length}, **SETTINGS) if which == "llm" else Waiting(model)
    answer = llm.rollout(PROMPTS, **ROLLOUT)
    rewards = [(group.prompt_id, t.index, float(t.index % 2)) for group in answer.groups for t in group.trajectories]
    result: dict[str, Any] = {
        "answer": answer.model_dump(mode="json"),
        "rewards": llm.post_rewards(answer.id, rewards).counts.model_dump(),
        "again": llm.rollout(PROMPTS, **ROLLOUT).model_dump(mode="json"),
        "report": llm.report().signals["confidence"].num_positive,
        "events": [
            event.type for event in llm.stream(PROMPTS[:2], 2, 1, stream_tokens=4, sampling_params={"max_tokens": 9})
        ],
        "state": len(llm.state()),
        "graded": llm.rollout(
            [{"prompt": "one", "data": {"times": 2}}],
            3,
            reward="length",
            sampling_params={"max_tokens": 9},
            include=["text", "logprobs"],
        ).model_dump(mode="json"),
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
        stream = llm.stream(PROMPTS[:1], 2, 2, stream_tokens=1, sampling_params={"max_tokens": 60, "min_tokens": 50})
        next(stream)
        result["meanwhile"] = llm.report().detection_length
        open_stream = said(lambda: llm.generate(ids, SamplingParams(max_tokens=5), use_tqdm=False))
        stream.close()
        result["closed"] = [open_stream, len(llm.generate(ids, SamplingParams(max_tokens=5), use_tqdm=False))]
        llm.enqueue(ids, groups, use_tqdm=False)
        result["errors"].append(said(lambda: llm.rollout(PROMPTS, 2)))
        result["enqueued"] = [len(o.outputs) for o in llm.wait_for_completion(use_tqdm=False)]
        result["interrupted"] = [interrupted(llm, use) for use in (interrupted_stream, interrupted_rollout) * 2]
        result["left"] = llm.llm_engine.get_num_unfinished_requests()
    else:
        llm.close()
    print("RESULT " + json.dumps(result))


def audited_labels(llm: Any, params: SamplingParams, seed: int) -> float:
    """Number of labels from audit groups after one call with four groups, of which half are audited."""
    params = params.clone()
    params.seed, params.extra_args = seed, {**params.extra_args, "rollout_audit_ratio": 0.5}
    before = llm.report().audit.num_labels
    ids = [{"prompt_token_ids": [11, 12, 20 + number]} for number in range(4)]
    outputs = llm.generate(ids, params, use_tqdm=False)
    llm.post_named_rewards([(output.request_id, choice.index, 1.0) for output in outputs for choice in output.outputs])
    return llm.report().audit.num_labels - before


UNENDING = {"sampling_params": {"max_tokens": 200, "ignore_eos": True}}


def interrupt_all() -> None:
    os.killpg(os.getpgrp(), signal.SIGINT)


def interrupted_stream(llm: Any) -> None:
    for _ in llm.stream(PROMPTS[:2], 2, 2, stream_tokens=1, **UNENDING):
        interrupt_all()


def interrupted_rollout(llm: Any) -> None:
    calls, step = [], llm.llm_engine.step

    def interrupting() -> Any:
        calls.append(None)
        if len(calls) in (5, 6):
            interrupt_all()
        return step()

    llm.llm_engine.step = interrupting
    try:
        llm.rollout(PROMPTS[:2], 2, 2, **UNENDING)
    finally:
        llm.llm_engine.step = step


def interrupted(llm: Any, use: Any) -> list[Any]:
    """The raised exception, and the outcome of the next rollout."""
    raised = "nothing"
    try:
        use(llm)
    except BaseException as error:
        raised = type(error).__name__
    answer = llm.rollout(PROMPTS[:2], 2, 2, sampling_params={"max_tokens": 20})
    return [raised, [group.status for group in answer.groups], answer.usage.num_candidates]


def said(do: Any) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main(*sys.argv[1:])
