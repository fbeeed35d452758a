"""vLLM in a trainer's own process."""
