"""The demo of tail batching: `vllm-rollout demo --rounds`."""
