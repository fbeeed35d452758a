"""What a trainer asks of its server beside vLLM's own endpoints (`--rollout-compat`)."""
