"""Triton kernels, imported as vllm_rollout.kernels. Each module needs triton; importing this package does not."""
