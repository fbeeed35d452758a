"""What vLLM is told to build engines of. Invariant: each is a name in `vllm_rollout`, so that anybody can write it."""

from __future__ import annotations

SCHEDULER_CLS = "vllm_rollout.Scheduler"
WORKER_CLS = "vllm_rollout.Worker"
