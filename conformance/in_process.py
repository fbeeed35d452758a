"""Shared by the checks of trainers that build vLLM's engine in a process of their own."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from conformance.checks import CAP

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Without the last entry, Ray would end actors when the machine's memory is nearly full, whichever process uses it."""
NUM_STARTS = 5
"""Attempts to start Ray. Ray gives its processes 30 s, which is too short at times on a busy machine."""


def watch(engine: Any) -> None:
    """Record an engine client's requests in `engine.seen`: tokens, their spans of weight versions, and how each ended
    (None if its reader left).
    """
    from vllm_rollout.kernel.api.versions import weight_spans

    engine.seen, generate = [], engine.generate

    async def watched(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        row = {"prompt": list(prompt["prompt_token_ids"]), "tokens": 0, "end": None, "reason": None}
        engine.seen.append(row)
        async for output in generate(prompt, *args, **kwargs):
            (choice,) = output.outputs
            row |= {"tokens": len(choice.token_ids), "end": choice.finish_reason, "reason": choice.stop_reason}
            row |= {"token_ids": list(choice.token_ids), "spans": [vars(each) for each in weight_spans(choice)]}
            yield output

    engine.generate = watched


@contextmanager
def by_environment(device: Path | None = None) -> Iterator[None]:
    """Engines that any code builds in the block are ours, on an emulated device if `device` is given."""
    wanted = {"VLLM_ROLLOUT": "scheduler,worker"} | ({} if device is None else {"VLLM_ROLLOUT_EMULATE": str(device)})
    with mock.patch.dict(os.environ, wanted):
        yield


@contextmanager
def ray_cluster(**kwargs: Any) -> Iterator[None]:
    """Ray on this machine until the outermost such block ends. GPUs of `num_gpus` are numbers only."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.update(ENVIRONMENT)
    for start in range(1, NUM_STARTS + 1):
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, **kwargs)
            break
        except Exception:
            ray.shutdown()
            if start == NUM_STARTS:
                raise
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def replaced(owner: Any, name: str) -> Iterator[None]:
    """Restore the attribute at the end of the block."""
    before = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, before)


def assert_best(rows: list[dict[str, Any]], lengths: Sequence[int]) -> None:
    """Assert that the calls for one prompt got the best answers of its requests, as `watch` recorded them.

    The best are all that ended by themselves, as far as there is room, then cut ones, and aborted ones only after
    those.
    """
    left = {end: sorted(row["tokens"] for row in rows if row["end"] == end) for end in ("stop", "length")}
    num_valid, usable = len(left["stop"]), [*left["stop"], *left["length"]]
    for length in lengths:
        assert length in usable, f"an answer of {length} tokens was neither finished nor cut: {rows}"
        usable.remove(length)
    num_cut = sum(length >= CAP for length in lengths) - sum(length >= CAP for length in left["stop"])
    assert num_cut <= max(0, len(lengths) - num_valid), f"{num_cut} answers are cut, and {num_valid} were not: {rows}"


def summary(rows: list[dict[str, Any]], ended: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Requests as `watch` recorded them: number, number that `ended`, all their tokens, and tokens of the others."""
    kept = [row["tokens"] for row in rows if ended(row)]
    others = [row["tokens"] for row in rows if not ended(row)]
    return {"requests": len(rows), "ended": len(kept), "tokens": sum(kept), "tokens_of_others": sum(others)}
