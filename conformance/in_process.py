"""What the checks of trainers share that build vLLM's engine in a process of their own."""

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
"""Ray would end actors where the machine's memory is nearly full, whoever has it."""
NUM_STARTS = 5
"""How often Ray is started, which gives its processes 30 s: a machine that has other work needs longer at times."""


def watch(engine: Any) -> None:
    """Note the requests of an engine client from now on, in `engine.seen`: tokens, and how each ended (None where its
    reader went away)."""
    engine.seen, generate = [], engine.generate

    async def watched(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        row = {"prompt": list(prompt["prompt_token_ids"]), "tokens": 0, "end": None, "reason": None}
        engine.seen.append(row)
        async for output in generate(prompt, *args, **kwargs):
            (choice,) = output.outputs
            row |= {"tokens": len(choice.token_ids), "end": choice.finish_reason, "reason": choice.stop_reason}
            yield output

    engine.generate = watched


@contextmanager
def by_environment(device: Path | None = None) -> Iterator[None]:
    """Engines that are built in the block, by whomever, are ours; on an emulated device where one is named."""
    wanted = {"VLLM_ROLLOUT": "scheduler,worker"} | ({} if device is None else {"VLLM_ROLLOUT_EMULATE": str(device)})
    with mock.patch.dict(os.environ, wanted):
        yield


@contextmanager
def ray_cluster(**kwargs: Any) -> Iterator[None]:
    """Ray on this machine as long as the block lasts, or a block around it. Its GPUs, where `num_gpus` says so, are
    numbers only."""
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
    """What the block sets there is put back."""
    before = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, before)


def assert_best(rows: list[dict[str, Any]], lengths: Sequence[int]) -> None:
    """The answers to the calls for one prompt, by their lengths, are the best that its requests (`watch`) have come to:
    all that ended by themselves, as far as there is room, then what was cut, and what was given up only after that."""
    left = {end: sorted(row["tokens"] for row in rows if row["end"] == end) for end in ("stop", "length")}
    num_valid, usable = len(left["stop"]), [*left["stop"], *left["length"]]
    for length in lengths:
        assert length in usable, f"an answer of {length} tokens was neither finished nor cut: {rows}"
        usable.remove(length)
    num_cut = sum(length >= CAP for length in lengths) - sum(length >= CAP for length in left["stop"])
    assert num_cut <= max(0, len(lengths) - num_valid), f"{num_cut} answers are cut, and {num_valid} were not: {rows}"


def summary(rows: list[dict[str, Any]], ended: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Requests as `watch` saw them: how many, how many `ended`, tokens generated, and those of the others."""
    kept = [row["tokens"] for row in rows if ended(row)]
    others = [row["tokens"] for row in rows if not ended(row)]
    return {"requests": len(rows), "ended": len(kept), "tokens": sum(kept), "tokens_of_others": sum(others)}
