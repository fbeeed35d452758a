"""What the checks of trainers share that build vLLM's engine in a process of their own."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Ray would end actors where the machine's memory is nearly full, whoever has it."""


def watch(engine: Any) -> None:
    """Note the requests of an engine client from now on, in `engine.seen`: tokens, and how each ended (None where its
    reader went away)."""
    engine.seen, generate = [], engine.generate

    async def watched(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        row = {"prompt": 0, "tokens": 0, "end": None, "reason": None}
        engine.seen.append(row)
        async for output in generate(prompt, *args, **kwargs):
            (choice,) = output.outputs
            row |= {"prompt": len(output.prompt_token_ids), "tokens": len(choice.token_ids)}
            row |= {"end": choice.finish_reason, "reason": choice.stop_reason}
            yield output

    engine.generate = watched


@contextmanager
def ray_cluster(**kwargs: Any) -> Iterator[None]:
    """Ray on this machine as long as the block lasts, or a block around it. Its GPUs, where `num_gpus` says so, are
    numbers only."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.update(ENVIRONMENT)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, **kwargs)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def replaced(owner: Any, name: str) -> Iterator[None]:
    """What the block sets there is put back."""
    before = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, before)


def summary(rows: list[dict[str, Any]], ended: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Of requests as `watch` saw them: how many, how many `ended`, tokens generated, and those of the others."""
    kept = [row["tokens"] for row in rows if ended(row)]
    others = [row["tokens"] for row in rows if not ended(row)]
    return {"requests": len(rows), "ended": len(kept), "tokens": sum(kept), "tokens_of_others": sum(others)}
