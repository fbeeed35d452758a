"""Pieces in which vLLM itself fails a step that does what it should not."""

from __future__ import annotations

from benchmarks.gpu_check.engine import Engines, Settings
from benchmarks.gpu_check.equal import COMPILED, DETECTION_LENGTH, scored_groups
from benchmarks.gpu_check.pieces import Result


def sync_check(engines: Engines) -> Result:
    return steps_pass(engines, Settings(options=COMPILED, environment={"VLLM_GPU_SYNC_CHECK": "error"}))


def jit_monitor(engines: Engines) -> Result:
    return steps_pass(engines, Settings(options={**COMPILED, "jit_monitor_mode": "error"}))


def steps_pass(engines: Engines, settings: Settings) -> Result:
    """Prefills in chunks, strangers, groups that stop and candidates that are scored, three times over: the first step
    of each kind is where a kernel would be compiled."""
    result = Result()
    chunks = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    chunked = Settings(options={**settings.options, **chunks}, environment=settings.environment)
    with engines.start(chunked) as engine:
        engine.publish_head(DETECTION_LENGTH)
        for number in range(3):
            candidates = engine.run(scored_groups(engines))["candidates"]
            finished = sum(candidate["finish_reason"] == "length" for candidate in candidates)
            result.check(f"run {number}: requests that ended", finished == len(candidates), finished, len(candidates))
    return result
