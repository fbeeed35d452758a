"""vLLM's engine client with groups: a tagged request per candidate, and its rank."""
