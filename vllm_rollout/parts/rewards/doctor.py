"""Checks of `vllm-rollout doctor` for rewards."""

from __future__ import annotations

import asyncio

from vllm_rollout.doctor.finding import Finding, ok
from vllm_rollout.parts.rewards.grading.sandbox import SandboxError, choose_sandbox


def check_sandbox() -> Finding:
    """Face `doctor`: a sandbox for rewards that run programs."""
    try:
        asyncio.run(choose_sandbox())
    except (SandboxError, OSError) as error:
        return Finding("sandbox", "warning", f"rewards that run programs are off. {error}")
    return ok("sandbox", "bubblewrap holds: rewards may run programs")
