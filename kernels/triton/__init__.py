"""Triton kernels, imported as vllm_rollout.kernels. Each module needs triton, but importing this package does not."""
