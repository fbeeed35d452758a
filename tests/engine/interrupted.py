"""Ctrl-C as a terminal sends it, to all processes at once, while a `vllm_rollout.LLM` works; print what came of it.

`interrupted.py MODEL DEVICE`, in a session of its own. DEVICE: settings of an emulated device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS="")

import vllm_rollout
from vllm_rollout.adapter.api.client.emulate import EXECUTOR_CLS, WORKER_CLS
from vllm_rollout.adapter.in_process import engine_args
from vllm_rollout.adapter.options import EmulationOptions, RolloutOptions

PROMPTS = [[3, 4, 5], [6, 7, 8]]


def interrupt_all() -> None:
    os.killpg(os.getpgrp(), signal.SIGINT)


def stream(llm: Any) -> None:
    for _ in llm.stream(PROMPTS, 2, 2, stream_tokens=1, sampling={"max_tokens": 400}):
        interrupt_all()


def rollout(llm: Any) -> None:
    calls, step = [], llm.llm_engine.step

    def interrupting() -> Any:
        calls.append(None)
        if len(calls) in (5, 6):
            interrupt_all()
        return step()

    llm.llm_engine.step = interrupting
    try:
        llm.rollout(PROMPTS, 2, 2, sampling={"max_tokens": 400})
    finally:
        llm.llm_engine.step = step


def raised_by(use: Any, llm: Any) -> str:
    try:
        use(llm)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def main(model: str, device: str) -> None:
    engine_args.WORKER_CLS = WORKER_CLS
    emulation = EmulationOptions(device, speed=1.0, log=None, async_scheduling=False, num_ranks=1, forks=False)
    llm = vllm_rollout.LLM(
        model,
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=True,
        distributed_executor_backend=EXECUTOR_CLS,
        additional_config=RolloutOptions(audit_ratio=0.0, emulation=emulation).into({}),
    )
    results = []
    for use in (stream, rollout, stream):
        raised = raised_by(use, llm)
        answer = llm.rollout(PROMPTS, 2, 2, sampling={"max_tokens": 400})
        results.append([raised, [group.status for group in answer.groups], answer.usage.num_candidates])
    print("RESULT " + json.dumps({"results": results, "left": llm.llm_engine.get_num_unfinished_requests()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
