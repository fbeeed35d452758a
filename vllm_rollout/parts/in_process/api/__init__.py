"""vLLM in a trainer's own process: an API process without a server."""
