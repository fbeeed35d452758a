"""Profiles made by hand: points, facts of an engine and a file's head, with defaults for what a test is not about."""

from __future__ import annotations

from typing import Any

from vllm_rollout.parts.shaping.profile_file import EngineFacts, Point, Profile

HARDWARE = {"num_devices": 1, "device": "abacus", "num_cpus": 2}


def point(batch_size: int, context: int, seconds: float, size: int = 1) -> Point:
    return Point(
        tensor_parallel_size=size,
        batch_size=batch_size,
        context_tokens=context,
        mean_context_tokens=context - 3,
        median_s=seconds,
        p10_s=seconds,
        p90_s=seconds,
        num_steps=8,
    )


def facts(size: int = 1, **changes: Any) -> EngineFacts:
    values = {"max_num_seqs": 64, "max_model_len": 1024, "max_num_batched_tokens": 2048, "block_size": 32}
    values |= {"kv_capacity_tokens": 30_000, "kv_bytes_per_token": 23040}
    return EngineFacts(tensor_parallel_size=size, **values | changes)


def profile_of(model_name: str = "some-model", **fields: Any) -> Profile:
    made = {"created": "2025-01-01T00:00:00+00:00", "updated": "2025-01-01T00:00:00+00:00", "command": "profile"}
    what = {"model": {}, "hardware": HARDWARE, "versions": {}, "serve_flags": (), "flags": {}, "logprobs": True}
    return Profile(model_name=model_name, **{**made, **what, **fields})
