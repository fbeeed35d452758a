"""The only folder that imports vllm. Each override translates and obeys; the rules live in `vllm_rollout.group`."""
