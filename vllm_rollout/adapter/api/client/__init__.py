"""vLLM's engine client with groups: one tagged request per candidate, and its rank."""
